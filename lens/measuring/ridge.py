"""Fit the affine map onto the last states by least squares: the ridge lens."""

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from lens.checkpoint.plain_torch import in_plain_torch
from lens.corpus import read_corpus
from lens.lenses.affine import AffineLens, fitted_lens
from lens.measuring.state_batches import read_states
from lens.measuring.windows import windows_of

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint


@in_plain_torch
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
    for rows in read_states(model, windows):
        sums.add(rows)
    weight, bias = sums.solve(penalty)
    return fitted_lens(
        model, "ridge", weight, bias, f"{texts.name} {texts.hash}", {"penalty": penalty}
    )


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
