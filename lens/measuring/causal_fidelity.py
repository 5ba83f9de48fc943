"""Does the lens depend on the directions that the model depends on? Measured by ablating them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens.checkpoint.plain_torch import in_plain_torch
from lens.checkpoint.prompts import resolve
from lens.corpus import read_corpus
from lens.errors import PromptError, SelectionError
from lens.lenses.differentiable import in_float32
from lens.measuring.causal_basis import LensInfluence, ablated
from lens.measuring.ranks import rank_correlation
from lens.measuring.required_readout import required_readout
from lens.measuring.windows import Window, default_window, windows_of

if TYPE_CHECKING:
    import pandas as pd

    from lens.checkpoint.checkpoint import Checkpoint

WINDOW_TOKENS = 64
N_LAYERS = 5
_NATS_TO_BITS = float(1 / np.log(2.0))
_NO_CHANGE_NATS = 1e-6
"""Log-probabilities in float32 that move less than this did not move."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CausalFidelity:
    """Influences of directions on the logit lens and on the model's own output, in bits.

    The directions of a layer are those on which the lens depends most there. `rank_correlation`
    (Spearman) asks whether the model depends on the same; `alignment` whether an ablation moves the
    lens' log-probabilities as it moves the model's: the cosine of both changes, weighted by the
    model's own probabilities, 1 the same, 0 unrelated.
    """

    model_id: str
    layers: Int[np.ndarray, " layer"]
    lens_bits: Float[np.ndarray, "layer direction"]
    model_bits: Float[np.ndarray, "layer direction"]
    alignment_of_each: Float[np.ndarray, "layer direction"]
    n_positions: int

    @property
    def rank_correlation(self) -> Float[np.ndarray, " layer"]:
        """Spearman's correlation of the two influences over the directions of each layer."""
        return np.array(
            [rank_correlation(a, b) for a, b in zip(self.lens_bits, self.model_bits, strict=True)]
        )

    @property
    def alignment(self) -> Float[np.ndarray, " layer"]:
        """The mean over a layer's directions."""
        return self.alignment_of_each.mean(axis=1)

    def to_frame(self) -> "pd.DataFrame":
        """A row for each layer and direction."""
        import pandas as pd

        n = self.lens_bits.shape[1]
        return pd.DataFrame(
            {
                "layer": np.repeat(self.layers, n),
                "direction": np.tile(np.arange(n), len(self.layers)),
                "lens_influence_bits": self.lens_bits.ravel(),
                "model_influence_bits": self.model_bits.ravel(),
                "alignment": self.alignment_of_each.ravel(),
            }
        )


@in_plain_torch
def causal_fidelity(
    model: "Checkpoint",
    corpus: Any = "sample",
    *,
    layers: Sequence[int] | None = None,
    n_directions: int = 8,
    max_windows: int = 8,
    window_tokens: int | None = None,
    max_steps: int = 10,
) -> CausalFidelity:
    """Ablate what the lens depends on most, layer by layer, and see what the model does.

    One window (of `window_tokens`, 64) of each of at most `max_windows` documents; position 0 is
    never ablated and never read. By default five layers between the embedding and the last block's
    input. The ablation takes away how a state differs from the mean along a direction;
    `n_directions` of them are found for each layer, in `max_steps` steps each.

    Raises UnsupportedArchitectureError without a direct readout, SelectionError, PromptError, and
    as `lens.measure` does. Source: Belrose et al. 2023.

    >>> lens.causal_fidelity(model, corpus).rank_correlation  # doctest: +SKIP
    """
    readout = required_readout(model, "Causal fidelity")
    if not 3 <= n_directions <= model.d_model or max_windows < 1 or max_steps < 1:
        raise SelectionError(
            f"n_directions {n_directions}, max_windows {max_windows}, max_steps {max_steps}: "
            f"expected 3 to {model.d_model}, 1 or more, 1 or more."
        )
    if layers is None:
        spread = np.linspace(0, model.n_layers - 1, N_LAYERS).tolist()
        chosen = sorted({round(i) for i in spread})
    else:
        chosen = sorted(set(resolve(layers, model.n_layers + 1, "layer")))
    windows = _windows(model, corpus, max_windows, window_tokens)
    own = [_final(model, window) for window in windows]
    unembedding = in_float32(readout.unembedding)
    shape = (len(chosen), n_directions)
    lens_bits, model_bits, aligned = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for row, layer in enumerate(chosen):
        states = torch.cat([_states(model, window, layer) for window in windows])
        influence = LensInfluence(model, unembedding, states)
        for column, direction in enumerate(influence.basis(n_directions, max_steps=max_steps)):
            lens_bits[row, column] = influence.bits(direction)
            of_windows = [
                _response(model, window, layer, direction, influence.mean, final)
                for window, final in zip(windows, own, strict=True)
            ]
            both = np.concatenate(of_windows, axis=1).mean(axis=1)
            model_bits[row, column], aligned[row, column] = both
    return CausalFidelity(
        model_id=model.origin.model_id,
        layers=np.array(chosen),
        lens_bits=lens_bits,
        model_bits=model_bits,
        alignment_of_each=aligned,
        n_positions=sum(window.n_read - 1 for window in windows),
    )


def _windows(
    model: "Checkpoint", corpus: Any, max_windows: int, window_tokens: int | None
) -> list[Window]:
    size = default_window(model, most=WINDOW_TOKENS)
    cut = windows_of(model, read_corpus(corpus), window_tokens=window_tokens or size)
    firsts = [held[0] for held in cut.by_document if held]
    if not firsts:
        raise PromptError("The corpus leaves no position to read.")
    count = min(max_windows, len(firsts))
    return [firsts[i * len(firsts) // count] for i in range(count)]


def _places(window: Window) -> list[int]:
    return list(range(1, window.n_read))


def _states(model: "Checkpoint", window: Window, layer: int) -> Float[Tensor, "pos d_model"]:
    inputs = model.inputs_of([window.ids.tolist()])
    return model.capture(inputs, layers=[layer], positions=_places(window))[layer][0]


def _final(model: "Checkpoint", window: Window) -> Float[Tensor, "pos d_vocab"]:
    """The model's own log-probabilities, in nats."""
    last = _states(model, window, model.n_layers)
    return torch.log_softmax(model.readout.logits(last).float(), -1)


def _response(
    model: "Checkpoint",
    window: Window,
    layer: int,
    direction: Float[Tensor, " d_model"],
    mean: Float[Tensor, " d_model"],
    final: Float[Tensor, "pos d_vocab"],
) -> Float[np.ndarray, "2 pos"]:
    """KL(model || ablated model) in bits, and how alike lens and model move, by position."""

    def without(states: Tensor) -> Tensor:
        return ablated(states.float(), direction, mean).to(states)

    before = _states(model, window, layer)
    with model.edit(layer, _places(window), without):
        after = _final(model, window)
    p = final.exp()
    kl = torch.where(p == 0, 0.0, p * (final - after)).sum(-1) * _NATS_TO_BITS
    lens, lens_after = (
        torch.log_softmax(model.readout.logits(states).float(), -1)
        for states in (before, without(before))
    )
    alike = weighted_cosine(lens_after - lens, after - final, p)
    return torch.stack([kl, alike]).double().cpu().numpy()


def weighted_cosine(
    a: Float[Tensor, "pos d_vocab"],
    b: Float[Tensor, "pos d_vocab"],
    weight: Float[Tensor, "pos d_vocab"],
) -> Float[Tensor, " pos"]:
    """The correlation of two changes of log-probabilities under a distribution; 0 where one is 0.

    Weights of 0 count nothing, even against infinities.
    """

    def centred(x: Tensor) -> Tensor:
        x = torch.where(weight == 0, 0.0, x)
        return x - (weight * x).sum(-1, keepdim=True)

    a, b = centred(a), centred(b)
    both = (weight * a * b).sum(-1)
    of_a, of_b = ((weight * x * x).sum(-1).sqrt() for x in (a, b))
    moved = (of_a > _NO_CHANGE_NATS) & (of_b > _NO_CHANGE_NATS)
    return torch.where(moved, both / (of_a * of_b).clamp_min(1e-30), 0.0)
