"""Fit the tuned lens on a corpus: a translator for every layer, by KL."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lens.checkpoint.plain_torch import in_plain_torch
from lens.corpus import Corpus, read_corpus
from lens.errors import PromptError, SelectionError
from lens.lenses.affine import AffineLens, fitted_lens
from lens.lenses.state_divergence import StateDivergence, StateRows
from lens.measuring.state_batches import StateBatches, rows_of
from lens.measuring.translator_fit import TranslatorFit
from lens.measuring.tuning_folder import TuningFolder
from lens.measuring.windows import Window, windows_of

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint

HELD_OUT_SHARE = 10
"""One document of so many is held out."""

_HELD_OUT = 3


@dataclass(frozen=True, kw_only=True)
class Step:
    """How far fitting is: the step, and the mean KL over layers on documents held out."""

    step: int
    steps: int
    held_out_kl_bits: float


@in_plain_torch
def tune(
    model: "Checkpoint",
    corpus: Any = "sample",
    *,
    steps: int = 200,
    positions: int = 256,
    optimiser: str = "adam",
    learning_rate: float | None = None,
    window_tokens: int | None = None,
    check_every: int = 20,
    patience: int = 5,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: Callable[[Step], None] | None = None,
) -> AffineLens:
    """Fit a translator for every layer at once, by KL(final || lens): the tuned lens.

    All start as the identity. A tenth of the documents is held out (of a lone document its last
    windows); each layer keeps the step at which its KL was least on 4 * `positions` held-out
    positions, the identity among them, so none is worse than the logit lens there. Fitting ends
    after `steps`, or after `patience` looks, `check_every` steps apart, of which none gained. About
    `positions` positions are drawn for each step, in windows of `window_tokens` (256, or the
    context where that is less). `optimiser` is "adam" or "muon"; `learning_rate` is 1e-3 for the
    one and 1e-2 for the other (biases take Adam's) unless given, rises over the first tenth of the
    steps, then falls in a line. `seed` draws documents and positions. With a `folder` the lens is
    saved there and a run that was stopped continues, to the same bits where as many threads work.
    Nothing of the model changes. Source: Belrose et al. 2023.

    Raises ProvenanceError where the folder holds another fit, UnsupportedArchitectureError for a
    readout passed by hand, SelectionError for a lone document of one window, and as `lens.measure`
    does.

    >>> lens.tune(model, fit, folder="lenses/mine")  # doctest: +SKIP
    """
    texts = read_corpus(corpus)
    options = {
        "steps": steps,
        "positions": positions,
        "optimiser": optimiser,
        "learning_rate": learning_rate,
        "window_tokens": window_tokens,
        "check_every": check_every,
        "patience": patience,
        "seed": seed,
    }
    divergence = StateDivergence(model)
    claim = {"model": model.model_hash, "unembedding": model.unembedding_hash}
    kept = TuningFolder(None if folder is None else Path(folder), claim | _of(texts) | options)
    if (finished := kept.finished()) is not None:
        return finished
    fit_windows, held_out = _apart(model, texts, window_tokens, positions, seed)
    batches = StateBatches(model, fit_windows, positions=positions, seed=seed)
    fit = TranslatorFit(
        divergence, held_out, steps=steps, optimiser=optimiser, learning_rate=learning_rate
    )
    if (state := kept.load()) is not None:
        kept.resumed(fit.resume, state)
    while fit.done < steps and fit.checks_without_gain < patience:
        fit.step(batches.at(fit.done + 1))
        if fit.done % check_every == 0 or fit.done == steps:
            fit.check()
            kept.save(fit.state())
            if progress is not None:
                mean = float(fit.best_kl_bits.mean())
                progress(Step(step=fit.done, steps=steps, held_out_kl_bits=mean))
    found = options | {
        "steps_taken": fit.done,
        "logit_lens_kl_bits": fit.first_kl_bits.tolist(),
        "held_out_kl_bits": fit.best_kl_bits.tolist(),
    }
    lens = fitted_lens(
        model, "tuned", fit.best_weight, fit.best_bias, f"{texts.name} {texts.hash}", found
    )
    kept.finish(lens)
    return lens


def _of(texts: Corpus) -> dict[str, str]:
    return {"corpus": texts.name, "corpus_hash": texts.hash}


def _apart(
    model: "Checkpoint", texts: Corpus, window_tokens: int | None, positions: int, seed: int
) -> tuple[list[Window], list[StateRows]]:
    """The windows of the documents to fit on, and the states of those held out."""
    by_document = windows_of(model, texts, window_tokens=window_tokens).by_document
    generator = np.random.default_rng([seed, _HELD_OUT])
    order = [d for d in generator.permutation(len(texts)).tolist() if by_document[d]]
    if not order:
        raise PromptError(f"{texts.name!r} leaves nothing to fit on.")
    count = max(1, len(order) // HELD_OUT_SHARE)
    back = [window for d in order[:count] for window in by_document[d]]
    fit = [window for d in order[count:] for window in by_document[d]]
    if not fit:
        fit, back = _parts_of_one(texts.documents[order[0]].id, back)
    limit = 4 * positions
    chosen: list[Window] = []
    # Enough windows for the positions that are kept, whole ones where the readout is a replay.
    for place in generator.permutation(len(back)).tolist():
        if sum(w.n_read - 1 for w in chosen) >= limit:
            break
        chosen.append(back[place])
    return fit, rows_of(model, chosen, positions=limit, generator=generator)


def _parts_of_one(name: str, windows: list[Window]) -> tuple[list[Window], list[Window]]:
    """The windows of a lone document to fit on, and its last ones, which are held out."""
    if len(windows) < 2:
        raise SelectionError(
            f"Only document {name!r} can be read, and it is one window: nothing is left to hold "
            "out. Pass a second document, or a shorter window_tokens."
        )
    count = max(1, len(windows) // HELD_OUT_SHARE)
    return windows[:-count], windows[-count:]
