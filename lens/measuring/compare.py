"""Measure two checkpoints on the same documents, and compare."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lens.checkpoint.plain_torch import in_plain_torch
from lens.checkpoint.readout import DirectReadout
from lens.corpus import Corpus, read_corpus
from lens.errors import SelectionError
from lens.measuring.comparison import Comparison, Side, compared, require_inner_layers
from lens.measuring.confounds import confounds
from lens.measuring.measure import Progress, measure
from lens.measuring.reading import Translator
from lens.measuring.windows import common_window

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint


@in_plain_torch
def compare(
    models: "Mapping[str, Checkpoint]",
    corpus: Any = "sample",
    *,
    fit_on: Corpus | None = None,
    tuned: Mapping[str, Translator] | None = None,
    window_tokens: int | None = None,
    folder: str | Path | None = None,
    progress: Callable[[str, Progress], None] | None = None,
) -> Comparison:
    """The lenses of two checkpoints over one corpus: what differs, second less first.

    `corpus` and `fit_on` are as in `lens.measure`; windows are alike, by default
    of 256 tokens or what both models take where that is less. Without `fit_on` there is no skill
    and no verdict. With `tuned`, a translator for each name, the difference in KL is told apart
    into reading loss G and what is not there yet, R. An untied
    model is read through W_E as well. With a `folder`, a run that was stopped continues.
    `progress` is called with the name of a model and lens, and a `Progress`.

    Raises SelectionError for other than two models and one of a single block, and as
    `lens.measure` does.

    >>> lens.compare({"tied": a, "untied": b}, corpus)  # doctest: +SKIP
    """
    if len(models) != 2:
        raise SelectionError(
            f'compare takes two models by name, {{"tied": a, "untied": b}}; found {len(models)}: '
            f"{', '.join(models) or 'none'}."
        )
    if tuned is not None and set(tuned) != set(models):
        raise SelectionError(f"tuned names {sorted(tuned)}; expected a translator for {[*models]}.")
    require_inner_layers((name, model.n_layers) for name, model in models.items())
    texts = read_corpus(corpus)
    if window_tokens is None:
        window_tokens = common_window(models.values())
    sides = []
    for name, model in models.items():

        def profile(lens: Any, kind: str, model: Any = model, name: str = name) -> Any:
            def report(done: Progress) -> None:
                if progress is not None:
                    progress(f"{name}, {kind}", done)

            return measure(
                model,
                texts,
                lens=lens,
                fit_on=fit_on,
                window_tokens=window_tokens,
                folder=None if folder is None else Path(folder) / name / kind,
                progress=report,
            )

        two_lenses = isinstance(model.readout, DirectReadout) and not model.tie.is_tied
        fits = two_lenses and model.W_E.shape == model.W_U.shape
        sides.append(
            Side(
                name=name,
                output=profile("output", "output lens"),
                through_input=profile("input", "input lens") if fits else None,
                translated=None if tuned is None else profile(tuned[name], tuned[name].name),
            )
        )
    first, second = models.values()
    found = tuple(str(c) for c in confounds(first, second))
    return compared(sides[0], sides[1], confounds=found)
