"""What is allowed to stand between a lens and the model: a temperature, a bias, an affine map.

q = softmax(logits(A h + c) / temperature + bias), with the model's own norm, W_U, scale and cap.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

TERMS = ("temperature", "frequency", "shift", "scale", "rotation", "other linear")
"""What is freed: temperature, bias over the vocabulary, c, A diagonal, A a rotation of a diagonal
one, A any matrix."""

ORDERS = {
    "readout first": TERMS,
    "map first": ("scale", "rotation", "other linear", "shift", "frequency", "temperature"),
}
"""Two orders of freeing that begin and end at the same place; a diagonal map is a special rotated
one and that a special linear one, so these three keep their order."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Correction:
    """One member of the family. `matrix` is A where it is free; else A = rotation @ diag(scale)."""

    temperature: float
    bias: Float[Tensor, " d_vocab"]
    shift: Float[Tensor, " d_model"]
    scale: Float[Tensor, " d_model"]
    rotation: Float[Tensor, "d_model d_model"] | None
    matrix: Float[Tensor, "d_model d_model"] | None

    @classmethod
    def none(cls, *, d_model: int, d_vocab: int, device: torch.device) -> "Correction":
        """The logit lens as it is."""
        return cls(
            temperature=1.0,
            bias=torch.zeros(d_vocab, dtype=torch.float32, device=device),
            shift=torch.zeros(d_model, dtype=torch.float32, device=device),
            scale=torch.ones(d_model, dtype=torch.float32, device=device),
            rotation=None,
            matrix=None,
        )

    @property
    def map(self) -> Float[Tensor, "d_model d_model"]:
        """A."""
        if self.matrix is not None:
            return self.matrix
        return self.scale.diag() if self.rotation is None else self.rotation * self.scale

    def moved(self, states: Float[Tensor, "pos d_model"]) -> Float[Tensor, "pos d_model"]:
        """A h + c."""
        if self.matrix is None and self.rotation is None:
            return states * self.scale + self.shift
        return states @ self.map.T + self.shift

    def with_bias(self, bias: Float[Tensor, " d_vocab"]) -> "Correction":
        """The same with another bias over the vocabulary."""
        return replace(self, bias=bias)


def steps_of(order: tuple[str, ...]) -> Iterator[tuple[str, frozenset[str]]]:
    """Each term of an order, with all that are free once it is."""
    for place, term in enumerate(order):
        yield term, frozenset(order[: place + 1])
