"""What Adam makes of the paths into a matrix: each path's part of the step, not of the gradient.

Adam divides by the running size of the gradient, entry by entry. In a tied matrix both paths are
divided by the size of their sum, in an untied model each by its own. Source: Kingma and Ba,
arXiv:1412.6980.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class AdamSettings:
    """The optimiser's constants; torch's defaults."""

    beta_1: float = 0.9
    beta_2: float = 0.999
    eps: float = 1e-8


Matrices = tuple[tuple[str, ...], ...]
"""Which paths lead into one matrix: (("embedding", "unembedding"),) is a tied model."""


class AdamPaths:
    """Adam's running means for each path, over batches at fixed weights.

    `ways` are the ways in which the paths may share matrices; `steps` takes one of them.
    """

    def __init__(self, settings: AdamSettings, ways: Sequence[Matrices]) -> None:
        self.settings = settings
        self.n_steps = 0
        self._mean: dict[str, Tensor] = {}
        self._square: dict[tuple[str, ...], Tensor] = {}
        self._matrices = list(dict.fromkeys(matrix for way in ways for matrix in way))

    def add(self, by_path: Mapping[str, Float[Tensor, "_ _"]]) -> None:
        """One more step: the gradients of a batch's mean loss, by path."""
        self.n_steps += 1
        beta_1, beta_2 = self.settings.beta_1, self.settings.beta_2
        for path, gradient in by_path.items():
            mean = self._mean.setdefault(path, torch.zeros_like(gradient, dtype=torch.float32))
            mean.lerp_(gradient.float(), 1 - beta_1)
        for matrix in self._matrices:
            whole = torch.stack([by_path[path].float() for path in matrix]).sum(0)
            square = self._square.setdefault(matrix, torch.zeros_like(whole))
            square.lerp_(whole.square(), 1 - beta_2)

    def steps(self, way: Matrices) -> dict[str, Float[Tensor, "_ _"]]:
        """Each path's part of Adam's step of its matrix, for rate -1: of one matrix they add up."""
        sizes = {path: self._size(self._square[matrix]) for matrix in way for path in matrix}
        unbias = 1 - self.settings.beta_1**self.n_steps
        return {path: mean / unbias / sizes[path] for path, mean in self._mean.items()}

    def _size(self, square: Tensor) -> Tensor:
        unbiased = square / (1 - self.settings.beta_2**self.n_steps)
        return unbiased.sqrt() + self.settings.eps
