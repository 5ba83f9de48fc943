"""Measure one or two checkpoints, and write what was found as one page."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lens.checkpoint.plain_torch import in_plain_torch
from lens.corpus import Corpus, read_corpus, require_apart
from lens.errors import ExportError, SelectionError
from lens.files import written_whole
from lens.measuring.comparison import Comparison, compared, require_inner_layers
from lens.measuring.confounds import Confound, caution, confounds
from lens.measuring.measure import Progress
from lens.measuring.windows import common_window, default_window
from lens.show.export import require_exportable
from lens.trust.layout import page_of_one, page_of_two
from lens.trust.sections import Findings
from lens.trust.studied import first_prompts, studied
from lens.trust.subject import PROMPT_TOKENS, Plan
from lens.trust.words import comparison_headline, comparison_lines, verdict_line

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint

SAMPLE_POSITIONS = 1024
"""Positions that are read a second time for what needs whole distributions."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Report:
    """What a report found: the page's place, its findings, and the comparison of two."""

    path: Path
    findings: tuple[Findings, ...]
    comparison: Comparison | None
    confounds: tuple[Confound, ...]

    def __str__(self) -> str:
        lines = []
        if self.comparison is not None:
            lines += [comparison_headline(self.comparison), *comparison_lines(self.comparison)]
            lines.append(caution([c.what for c in self.confounds]))
        for found in self.findings:
            lines += [found.headline, *(f"  {verdict_line(v)}" for v in found.verdicts)]
            lines.append(f"  {found.why_not_before}")
            lines += [f"  {found.known_line}"] if found.known_line else []
        return "\n".join(lines)


@in_plain_torch
def report(
    model: "Checkpoint | Mapping[str, Checkpoint]",
    corpus: Any = "sample",
    path: str | Path = "report.html",
    *,
    fit_on: Corpus | None = None,
    prompts: Sequence[str | Sequence[int]] | None = None,
    translator: str = "ridge",
    tune_steps: int = 200,
    sample_positions: int = SAMPLE_POSITIONS,
    gap_positions: int = 0,
    window_tokens: int | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    repeat: str | None = None,
    progress: Callable[[str, Progress | None], None] | None = None,
) -> Report:
    """Measure a checkpoint, or two by name, and write one self-contained page.

    The page leads with a verdict: from which layer on the lens can be trusted, for what, and why
    not before; then curves with intervals, the tie, heatmaps of `prompts` (the beginnings of three
    documents where none are given), definitions, sources, and how to repeat it (`repeat`, the
    Python call where left out). `window_tokens` and `seed` are as in `lens.measure`. Without
    `fit_on` a fifth of the corpus, whole sources, is kept back: the context-free guess and the
    `translator` ("ridge", "tuned" or "none") are fitted there, a tuned one in `tune_steps` steps at
    most, as by `lens.tune`. `sample_positions` and `folder` are as in `lens.measure`; with
    `gap_positions` the distance is taken apart on so many positions, as by `lens.decompose`. The
    page holds no script and loads nothing; the file appears whole, or not at all.

    Raises ExportError before anything is measured where `path` cannot be written, SelectionError
    for more than two models, too few documents and documents that are fitted on too, and as
    `lens.measure` does.

    >>> lens.report(model, "corpus.jsonl", "report.html")  # doctest: +SKIP
    """
    target = Path(path)
    require_page(target)
    models = _by_name(model)
    if len(models) > 1:
        require_inner_layers((name, m.n_layers) for name, m in models.items())
    texts = read_corpus(corpus)
    plan = _plan(
        texts,
        fit_on,
        prompts=prompts,
        translator=translator,
        tune_steps=tune_steps,
        sample_positions=sample_positions,
        gap_positions=gap_positions,
        window_tokens=_window(models, window_tokens),
        seed=seed,
        folder=None if folder is None else Path(folder),
        repeat=repeat or _python(models, texts, target),
    )
    told = progress or _silent
    findings = tuple(Findings(studied(name, m, plan, told)) for name, m in models.items())
    comparison, differing = None, ()
    if len(findings) == 2:
        differing = confounds(*models.values())
        sides = [found.subject.side for found in findings]
        comparison = compared(*sides, confounds=tuple(map(str, differing)))
        text = page_of_two(findings, comparison, differing, plan)
    else:
        text = page_of_one(findings[0], plan)
    with written_whole(target) as partial:
        partial.write_text(text, encoding="utf-8")
    return Report(path=target, findings=findings, comparison=comparison, confounds=differing)


def require_page(path: Path) -> None:
    """Raise ExportError where no page could be written at `path`; nothing is left behind."""
    if path.suffix.lower() != ".html":
        raise ExportError(f"A report is one .html page; {path.name!r} is not one.")
    require_exportable(path)


def _by_name(model: "Checkpoint | Mapping[str, Checkpoint]") -> "dict[str, Checkpoint]":
    if not isinstance(model, Mapping):
        return {model.origin.model_id: model}
    if not 1 <= len(model) <= 2:
        raise SelectionError(
            f'report takes one model, or two by name, {{"a": a, "b": b}}; found {len(model)}: '
            f"{', '.join(map(str, model)) or 'none'}."
        )
    return {str(name): one for name, one in model.items()}


def _plan(
    texts: Corpus,
    fit_on: Corpus | None,
    *,
    prompts: Sequence[str | Sequence[int]] | None,
    **how: Any,
) -> Plan:
    if len(texts) < (3 if fit_on is None else 2):
        raise SelectionError(
            f"{texts.name!r} holds {len(texts)} documents. A report needs two to draw intervals "
            "from, and one more to fit on where fit_on is left out."
        )
    if how["translator"] not in ("ridge", "tuned", "none"):
        raise SelectionError(f'No translator {how["translator"]!r}: "ridge", "tuned" or "none".')
    fit, held_out = texts.split() if fit_on is None else (fit_on, texts)
    require_apart(fit, held_out)
    given = (
        None if prompts is None else tuple(p if isinstance(p, str) else tuple(p) for p in prompts)
    )
    return Plan(
        held_out=held_out,
        fit_on=fit,
        prompts=first_prompts(held_out) if given is None else given,
        prompt_tokens=PROMPT_TOKENS if given is None else None,
        **how,
    )


def _window(models: "Mapping[str, Checkpoint]", window_tokens: int | None) -> int | None:
    """Two models that would take windows of other lengths are both read in the shorter ones."""
    if window_tokens is None and len({default_window(m) for m in models.values()}) > 1:
        return common_window(models.values())
    return window_tokens


def _python(models: "Mapping[str, Checkpoint]", texts: Corpus, path: Path) -> str:
    """The call that made the page, with names for what was given in memory."""
    loaded = [f'lens.load("{m.origin.model_id}")' for m in models.values()]
    pairs = ", ".join(f'"{n}": {text}' for n, text in zip(models, loaded, strict=True))
    what = loaded[0] if len(loaded) == 1 else f"{{{pairs}}}"
    return f'import lens\n\nlens.report({what}, "{texts.name}", "{path.name}")'


def _silent(name: str, done: Progress | None) -> None:
    """Tells nothing."""
