"""Fit lenses on a corpus: the tuned lens by KL, the ridge map by least squares."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lens.checkpoint.readout import DirectReadout
from lens.checkpoint.untouched import untouched
from lens.corpus import read_corpus
from lens.errors import UnsupportedArchitectureError
from lens.lenses.affine import AffineLens, AffineSource, unembedding_hashes
from lens.measuring.collect import batches
from lens.measuring.windows import Windows, windows_of

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint

ROW_FLOATS = 2**23
"""About this many logits of one layer are held at once while fitting."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """How far fitting is: the step, and the mean KL over layers on documents held out."""

    step: int
    steps: int
    held_out_kl_bits: float


def tune(
    model: "Checkpoint",
    corpus: Any = "sample",
    *,
    steps: int = 200,
    positions: int = 256,
    learning_rate: float = 1e-3,
    window_tokens: int | None = None,
    check_every: int = 20,
    seed: int = 0,
    progress: Callable[[Step], None] | None = None,
) -> AffineLens:
    """Fit a translator for every layer at once, by KL(final || lens): the tuned lens.

    All start as the identity. A tenth of the documents is held out; each layer keeps the step at
    which its held-out KL was least, the identity among them, so none is worse than the logit lens
    there. `positions` are drawn for each step. Adam with warm-up over the first tenth, then a
    linear fall. Nothing of the model changes. Source: Belrose et al. 2023.

    Raises UnsupportedArchitectureError without a direct readout, and as `lens.measure` does.
    """
    readout = _direct(model)
    texts = read_corpus(corpus)
    fit, held_out = _states_of(model, texts, window_tokens, positions, seed, steps)
    fitted = fit_translators(
        readout,
        fit,
        held_out,
        steps=steps,
        learning_rate=learning_rate,
        check_every=check_every,
        progress=progress,
    )
    options = {"steps": steps, "positions": positions, "learning_rate": learning_rate, "seed": seed}
    return _lens(model, "tuned", *fitted, f"{texts.name} {texts.hash}", options)


def fit_ridge(
    model: "Checkpoint",
    corpus: Any = "sample",
    *,
    penalty: float = 1e-3,
    window_tokens: int | None = None,
) -> AffineLens:
    """Fit for every layer the affine map onto the last states by least squares (Din et al. 2023).

    `penalty` is relative to the mean variance of a layer's states, and pulls towards the identity.
    Position 0 is left out. Raises as `lens.measure` does.
    """
    texts = read_corpus(corpus)
    windows = windows_of(model, texts, window_tokens=window_tokens)
    sums = _Moments(model.n_layers, model.d_model)
    for rows in _all_states(model, windows):
        sums.add(rows)
    weight, bias = sums.solve(penalty)
    options = {"penalty": penalty}
    return _lens(model, "ridge", weight, bias, f"{texts.name} {texts.hash}", options)


def fit_translators(
    readout: DirectReadout,
    batches_to_fit: Iterator[Float[Tensor, "layer pos d_model"]],
    held_out: Float[Tensor, "layer pos d_model"],
    *,
    steps: int,
    learning_rate: float,
    check_every: int,
    progress: Callable[[Step], None] | None = None,
) -> tuple[Float[Tensor, "translator d_model d_model"], Float[Tensor, "translator d_model"]]:
    """Translators (weight, bias) of all layers but the last; the last of a batch is the target."""
    n_layers, _, d_model = held_out.shape
    device = held_out.device
    weight = torch.zeros(n_layers - 1, d_model, d_model, device=device)
    bias = torch.zeros(n_layers - 1, d_model, device=device)
    optimiser = torch.optim.Adam([weight, bias], lr=learning_rate)
    best = (weight.clone(), bias.clone())
    least = _held_out_kl(readout, weight, bias, held_out)
    for step in range(1, steps + 1):
        rate = min(step / max(1, steps // 10), 1.0) * (1 - (step - 1) / steps)
        optimiser.param_groups[0]["lr"] = learning_rate * rate
        states = next(batches_to_fit)
        weight.grad, bias.grad = torch.zeros_like(weight), torch.zeros_like(bias)
        for layer in range(n_layers - 1):
            _, grads = _loss(readout, weight[layer], bias[layer], states[layer], states[-1])
            weight.grad[layer], bias.grad[layer] = grads
        optimiser.step()
        if step % check_every == 0 or step == steps:
            kl = _held_out_kl(readout, weight, bias, held_out)
            better = kl < least
            least = torch.where(better, kl, least)
            for kept, now in zip(best, (weight, bias), strict=True):
                kept[better] = now[better]
            if progress is not None:
                progress(Step(step=step, steps=steps, held_out_kl_bits=float(least.mean())))
    return best


def _loss(
    readout: DirectReadout, weight: Tensor, bias: Tensor, states: Tensor, final: Tensor
) -> tuple[float, tuple[Tensor, Tensor]]:
    """Mean KL in bits of one layer, and its gradients, some positions at a time."""
    at_once = max(1, ROW_FLOATS // readout.d_vocab)
    w, b = weight.detach().requires_grad_(), bias.detach().requires_grad_()
    grads, total = (torch.zeros_like(weight), torch.zeros_like(bias)), 0.0
    for first in range(0, len(states), at_once):
        part = slice(first, first + at_once)
        with untouched(*readout.modules), torch.enable_grad():
            moved = states[part] + states[part] @ w.T + b
            kl = _kl_bits(readout, moved, final[part]).sum() / len(states)
            # Of the translator alone: nothing gathers in the model's own parameters.
            for kept, found in zip(grads, torch.autograd.grad(kl, (w, b)), strict=True):
                kept.add_(found)
        total += float(kl.detach())
    return total, grads


def _held_out_kl(
    readout: DirectReadout, weight: Tensor, bias: Tensor, states: Tensor
) -> Float[Tensor, " translator"]:
    at_once = max(1, ROW_FLOATS // readout.d_vocab)
    kls = torch.zeros(len(weight), device=weight.device)
    with untouched(*readout.modules):
        for layer in range(len(weight)):
            for first in range(0, states.shape[1], at_once):
                rows = states[layer, first : first + at_once]
                moved = rows + rows @ weight[layer].T + bias[layer]
                final = states[-1, first : first + at_once]
                kls[layer] += _kl_bits(readout, moved, final).sum() / states.shape[1]
    return kls


def _kl_bits(readout: DirectReadout, moved: Tensor, final: Tensor) -> Float[Tensor, " pos"]:
    with torch.no_grad():
        log_p = torch.log_softmax(readout.logits(final).float(), dim=-1)
    for part in readout.preparation:
        moved = part(moved)
    log_q = torch.log_softmax(readout.unembedding.logits(moved).float(), dim=-1)
    terms = torch.where(log_p == -torch.inf, 0.0, log_p.exp() * (log_p - log_q))
    return terms.sum(-1) / np.log(2.0)


class _Moments:
    """Sums of products, in float64, of which least squares needs no more."""

    def __init__(self, n_layers: int, d_model: int):
        self.count = 0
        self.x = torch.zeros(n_layers, d_model, dtype=torch.float64)
        self.y = torch.zeros(d_model, dtype=torch.float64)
        self.xx = torch.zeros(n_layers, d_model, d_model, dtype=torch.float64)
        self.xy = torch.zeros(n_layers, d_model, d_model, dtype=torch.float64)

    def add(self, states: Float[Tensor, "layer pos d_model"]) -> None:
        rows = states.double().cpu()
        self.count += rows.shape[1]
        self.y += rows[-1].sum(0)
        for layer, x in enumerate(rows[:-1]):
            self.x[layer] += x.sum(0)
            self.xx[layer] += x.T @ x
            self.xy[layer] += x.T @ (rows[-1] - x)

    def solve(self, penalty: float) -> tuple[Tensor, Tensor]:
        mean_x, mean_y = self.x / self.count, self.y / self.count
        weights, biases = [], []
        for layer, mean in enumerate(mean_x):
            shift = mean_y - mean
            xx = self.xx[layer] / self.count - torch.outer(mean, mean)
            xy = self.xy[layer] / self.count - torch.outer(mean, shift)
            ridge = penalty * float(xx.diagonal().mean()) * torch.eye(len(mean)).double()
            moved = torch.linalg.solve(xx + ridge, xy).T
            weights.append(moved)
            biases.append(shift - moved @ mean)
        return torch.stack(weights).float(), torch.stack(biases).float()


def _all_states(model: "Checkpoint", windows: Windows) -> Iterator[Float[Tensor, "layer pos d"]]:
    """The states of every position that is read, position 0 left out, document by document."""
    for document in windows.by_document:
        for batch in batches(model, document):
            at = np.concatenate([np.arange(len(w.ids)) for w in batch.windows])
            last = np.concatenate([np.full(len(w.ids), w.n_read) for w in batch.windows])
            yield batch.states[:, torch.from_numpy((at > 0) & (at < last))].float()


def _states_of(
    model: "Checkpoint",
    texts: Any,
    window_tokens: int | None,
    positions: int,
    seed: int,
    steps: int,
) -> tuple[Iterator[Tensor], Tensor]:
    """Batches to fit on without end, and the states of the documents held out."""
    windows = windows_of(model, texts, window_tokens=window_tokens)
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(texts)).tolist()
    n_held_out = max(1, len(order) // 10)
    held_out = [windows.by_document[d] for d in order[:n_held_out]]
    fit = [windows.by_document[d] for d in order[n_held_out:]] or held_out
    kept = torch.cat(list(_all_states(model, _only(windows, held_out))), dim=1)
    if kept.shape[1] > 4 * positions:
        kept = kept[:, torch.from_numpy(generator.permutation(kept.shape[1])[: 4 * positions])]

    def endless() -> Iterator[Tensor]:
        while True:
            pool = torch.empty(kept.shape[0], 0, kept.shape[2], device=kept.device)
            for place in generator.permutation(len(fit)).tolist():
                pool = torch.cat([pool, *_all_states(model, _only(windows, [fit[place]]))], dim=1)
                # Some documents at a time are mixed, so that a step does not see one text alone.
                while pool.shape[1] >= 4 * positions:
                    mixed = torch.from_numpy(generator.permutation(pool.shape[1]))
                    yield pool[:, mixed[:positions]]
                    pool = pool[:, mixed[positions:]]
            if pool.shape[1]:
                yield pool[:, torch.from_numpy(generator.permutation(pool.shape[1])[:positions])]

    return endless(), kept


def _only(windows: Windows, documents: list[Any]) -> Windows:
    return Windows(by_document=tuple(documents), window_tokens=windows.window_tokens)


def _direct(model: "Checkpoint") -> DirectReadout:
    if not isinstance(model.readout, DirectReadout):
        raise UnsupportedArchitectureError(
            f"A tuned lens is fitted through a direct readout, and this one is "
            f"{model.readout.kind}: {model.summary().why_not_direct}. fit_ridge needs none."
        )
    return model.readout


def _lens(
    model: "Checkpoint",
    name: str,
    weight: Tensor,
    bias: Tensor,
    fitted_on: str,
    options: dict[str, Any],
) -> AffineLens:
    source = AffineSource(
        model_id=model.origin.model_id,
        unembedding_hash=unembedding_hashes(model)[0],
        fitted_on=fitted_on,
        options=options,
    )
    return AffineLens(name=name, weight=weight, bias=bias, source=source)
