"""Take the gap between a lens and the model apart, by what closes it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lens.checkpoint.plain_torch import in_plain_torch
from lens.checkpoint.prompts import resolve
from lens.corpus import Corpus, read_corpus, require_apart
from lens.errors import ProvenanceError, SelectionError
from lens.lenses.differentiable import in_float32
from lens.lenses.logit import provenance
from lens.measuring.correction import ORDERS, TERMS, Correction, steps_of
from lens.measuring.decomposition import Decomposition, GapProvenance
from lens.measuring.gap_fit import GapProblem, LastStates
from lens.measuring.required_readout import required_readout
from lens.measuring.sampled_states import SampledStates, sampled_states
from lens.measuring.windows import default_window

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint

WINDOW_TOKENS = 128
"""Default length of a window: the trunk runs over all of it for the few positions drawn."""

N_LAYERS = 5
CHECK_SHARE = 0.2


@dataclass(frozen=True, kw_only=True)
class Rung:
    """How far a decomposition is: the layer, the order and the term just freed."""

    done: int
    total: int
    layer: int
    order: str
    freed: str
    fit_kl_bits: float


@in_plain_torch
def decompose(
    model: "Checkpoint",
    corpus: Any = "sample",
    *,
    fit_on: Corpus | None = None,
    layers: Sequence[int] | None = None,
    positions: int = 1024,
    fit_positions: int = 1024,
    max_documents: int = 64,
    window_tokens: int | None = None,
    bias_sd: float = 3.0,
    max_steps: int = 40,
    seed: int = 0,
    progress: Callable[[Rung], None] | None = None,
) -> Decomposition:
    """How much of KL(final || logit lens) each kind of correction removes, on held-out documents.

    q = softmax(logits(A h + c) / temperature + bias) is fitted by KL with temperature, bias over
    the vocabulary, c, A diagonal, A rotated diagonal, A full freed in turn, in two orders. About
    `positions` positions of `corpus` are measured and `fit_positions` of `fit_on` fitted on, drawn
    evenly from at most `max_documents` documents of each; without `fit_on` half of the corpus, of
    whole sources, is fitted on. A fifth of its documents tells when to stop. By default `layers`
    are five from the embedding to the last block's input. `bias_sd` is the prior's standard
    deviation of each entry of the bias, in nats. Each fit starts at the one before it, so that the
    loss on its own rows never rises; on other documents it may; it takes `max_steps` steps at most.
    Windows are of `window_tokens` (128); `seed` draws the positions.

    Raises UnsupportedArchitectureError without a direct readout, SelectionError for the last
    layer and where a document of `fit_on` is measured too, and as `lens.measure` does.

    >>> lens.decompose(model, "sample", layers=[6, 12]).to_frame()  # doctest: +SKIP
    """
    readout = required_readout(model, "A decomposition of the gap")
    chosen = _layers(model, layers)
    texts = read_corpus(corpus)
    fit_texts, held_texts = texts.split(fit_share=0.5) if fit_on is None else (fit_on, texts)
    require_apart(fit_texts, held_texts)
    sampling: dict[str, Any] = {
        "layers": chosen,
        "max_documents": max_documents,
        "window_tokens": _window(model, window_tokens),
        "seed": seed,
    }
    fit, check = _apart(sampled_states(model, fit_texts, positions=fit_positions, **sampling), seed)
    held_out = sampled_states(model, held_texts, positions=positions, **sampling)
    unembedding = in_float32(readout.unembedding)
    last, check_last, held_last = (
        LastStates(model, unembedding, part.final) for part in (fit, check, held_out)
    )
    tables = _Tables(held_out, held_last, len(chosen))
    for place, layer in enumerate(chosen):
        problem = GapProblem(
            model,
            unembedding,
            fit.states[layer],
            last,
            check.states[layer],
            check_last,
            bias_sd=bias_sd,
            seed=seed,
        )
        for order, rung, freed, found in _ladder(problem, max_steps):
            tables.fill((order, place, rung), problem, found, layer)
            if progress is not None:
                progress(tables.rung(layer, list(ORDERS)[order], freed, (order, place, rung)))
    asked = {"positions": positions, "fit_positions": fit_positions, "seed": seed}
    options = {"bias_sd": bias_sd, "max_steps": max_steps, "max_documents": max_documents}
    return Decomposition(
        provenance=GapProvenance(
            reading=provenance(model, "output"),
            corpus_name=held_texts.name,
            corpus_hash=held_texts.hash,
            fitted_on=fit_texts.name,
            fitted_on_hash=fit_texts.hash,
            n_fit_positions=len(fit),
            n_check_positions=len(check),
            window_tokens=held_out.window_tokens,
            options=options | asked,
        ),
        layers=np.array(chosen, dtype=np.int64),
        documents=tables.documents,
        counts=np.bincount(tables.of_row).astype(np.int64),
        sums=tables.sums,
        fit_kl_bits=tables.fit_kl_bits,
        fit_loss_bits=tables.fit_loss_bits,
        temperatures=tables.temperatures,
    )


def require_asked(
    found: Decomposition,
    model: "Checkpoint",
    corpus: Corpus,
    fit_on: Corpus,
    *,
    window_tokens: int | None,
    **asked: Any,
) -> None:
    """Raise ProvenanceError where a kept result is not what `decompose` would be asked for.

    `asked` are options by name, such as `positions`, `fit_positions` and `seed`.
    """
    held, mine = found.provenance, provenance(model, "output")
    pairs = {
        "corpus": (held.corpus_hash, corpus.hash),
        "what it was fitted on": (held.fitted_on_hash, fit_on.hash),
        "window_tokens": (held.window_tokens, _window(model, window_tokens)),
    }
    pairs |= {name: (held.options.get(name), value) for name, value in asked.items()}
    if held.reading != mine:
        pairs |= {n: (getattr(held.reading, n), value) for n, value in vars(mine).items()}
    differing = [f"{name} ({a} there, {b} here)" for name, (a, b) in pairs.items() if a != b]
    if differing:
        raise ProvenanceError(
            f"The decomposition that is kept differs in {', '.join(differing)}. Ask for the same "
            "again, or name a new folder."
        )


def _window(model: "Checkpoint", window_tokens: int | None) -> int:
    return default_window(model, most=WINDOW_TOKENS) if window_tokens is None else window_tokens


def _ladder(problem: GapProblem, max_steps: int) -> Iterator[tuple[int, int, str, Correction]]:
    """Order, rung, what was just freed, and the correction with all that is free by then."""
    for number, terms in enumerate(ORDERS.values()):
        found = problem.none()
        yield number, 0, "logit lens", found
        for rung, (freed, free) in enumerate(steps_of(terms), 1):
            found = problem.fitted(found, free, freed=freed, max_steps=max_steps)
            yield number, rung, freed, found


class _Tables:
    """What a decomposition holds, filled rung by rung."""

    def __init__(self, held_out: SampledStates, last: LastStates, n_layers: int):
        self.held_out, self.last = held_out, last
        self.documents, self.of_row = np.unique(held_out.documents, return_inverse=True)
        shape = (len(ORDERS), n_layers, len(TERMS) + 1)
        self.sums = np.zeros((*shape, len(self.documents)))
        self.fit_kl_bits, self.fit_loss_bits = np.zeros(shape), np.zeros(shape)
        self.temperatures = np.zeros(shape)
        self.done = 0

    def fill(
        self, at: tuple[int, int, int], problem: GapProblem, found: Correction, layer: int
    ) -> None:
        """Measure one correction of a layer on the rows fitted on and on held-out documents."""
        states = self.held_out.states[layer].float()
        kl = problem.kl_bits(found, states, self.last.final).double().cpu().numpy()
        self.sums[at] = np.bincount(self.of_row, kl, minlength=len(self.documents))
        self.fit_kl_bits[at] = problem.fit_kl_bits(found)
        self.fit_loss_bits[at] = problem.loss_bits(found)
        self.temperatures[at] = found.temperature
        self.done += 1

    def rung(self, layer: int, order: str, freed: str, at: tuple[int, int, int]) -> Rung:
        """How far it is."""
        return Rung(
            done=self.done,
            total=self.temperatures.size,
            layer=layer,
            order=order,
            freed=freed,
            fit_kl_bits=float(self.fit_kl_bits[at]),
        )


def _layers(model: "Checkpoint", layers: Sequence[int] | None) -> list[int]:
    if layers is None:
        return sorted({round(i) for i in np.linspace(0, model.n_layers - 1, N_LAYERS).tolist()})
    chosen = sorted(set(resolve(layers, model.n_layers + 1, "layer")))
    if model.n_layers in chosen:
        raise SelectionError(
            f"Layer {model.n_layers} is the model's own output: there is no gap to decompose. "
            f"Choose layers from 0 to {model.n_layers - 1}."
        )
    return chosen


def _apart(sample: SampledStates, seed: int) -> tuple[SampledStates, SampledStates]:
    """To fit on, and whole documents kept back to tell when to stop (rows, of one document)."""
    documents = np.unique(sample.documents)
    if len(documents) > 1:
        count = max(1, round(CHECK_SHARE * len(documents)))
        back = np.random.default_rng(seed).permutation(documents)[:count]
        kept = np.isin(sample.documents, back)
    else:
        kept = np.arange(len(sample)) >= (1 - CHECK_SHARE) * len(sample)
    if kept.all() or not kept.any():
        raise SelectionError(
            f"{len(sample)} positions to fit on are too few to keep some back; ask for more "
            "(fit_positions) or pass a larger corpus."
        )
    return sample.select(np.flatnonzero(~kept)), sample.select(np.flatnonzero(kept))
