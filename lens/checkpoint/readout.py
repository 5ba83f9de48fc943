"""A residual state to logits, fast: the model's own final norm and unembedding, composed.

`DirectReadout` is built from the steps that the traced tail of the model took (tail.py) and is
used only after it has matched the reference on this very model (proof.py).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from lens.checkpoint.untouched import at_rest
from lens.errors import ShapeError


@runtime_checkable
class Readout(Protocol):
    """Anything that gives logits [batch, pos, d_vocab] for states [batch, pos, d_model]."""

    @property
    def kind(self) -> str:
        """A word for how it reads: "direct", "replay", or one of your own."""
        ...

    @property
    def d_vocab(self) -> int:
        """Number of logits."""
        ...

    def logits(self, states: Tensor) -> Tensor:
        """The logits of these states."""
        ...


@dataclass(frozen=True, eq=False)
class Step:
    """One elementwise operation on logits, in the model's own order.

    `value` is a number, or a tensor with one entry per vocabulary row (then only for add and mul).
    """

    kind: Literal["mul", "div", "add", "sub", "tanh", "cast"]
    value: float | Tensor | torch.dtype | None = None

    def apply(self, logits: Tensor) -> Tensor:
        """The step's result, computed by the same operation as in the model."""
        return _APPLY[self.kind](logits, self.value)

    def __str__(self) -> str:
        if isinstance(self.value, Tensor):
            shape = self.value.shape
            return f"{self.kind} [{shape[-1]}]" if shape else f"{self.kind} {self.value.item():g}"
        if isinstance(self.value, int | float):
            return f"{self.kind} {self.value:g}"
        return self.kind if self.value is None else f"{self.kind} {self.value}"


_APPLY: dict[str, Callable[[Tensor, object], Tensor]] = {
    "mul": lambda x, v: x * v,  # type: ignore[operator]
    "div": lambda x, v: x / v,  # type: ignore[operator]
    "add": lambda x, v: x + v,  # type: ignore[operator]
    "sub": lambda x, v: x - v,  # type: ignore[operator]
    "tanh": lambda x, v: torch.tanh(x),
    "cast": lambda x, v: x.to(v),  # type: ignore[call-overload]
}


@dataclass(frozen=True, eq=False)
class Unembedding:
    """The product with the vocabulary and what follows it, elementwise.

    `weight` is the model's own matrix (never a copy). `steps` come after product and bias:
    () is plain; a soft-cap of 30 is (div 30, tanh, mul 30); Cohere is (mul 0.0625).
    """

    weight: Float[Tensor, "d_vocab d_unembed"]
    bias: Float[Tensor, " d_vocab"] | None = None
    steps: tuple[Step, ...] = ()

    def logits(self, prepared: Float[Tensor, "*rows d_unembed"]) -> Float[Tensor, "*rows d_vocab"]:
        """Logits of prepared rows, all of the vocabulary at once."""
        out = torch.nn.functional.linear(prepared, self.weight, self.bias)
        for step in self.steps:
            out = step.apply(out)
        return out


@dataclass(frozen=True, eq=False)
class DirectReadout:
    """prepare (final norm, transform, projection) then unembed; each part the model's own."""

    preparation: tuple[Callable[[Tensor], Tensor], ...]
    unembedding: Unembedding
    d_model: int
    modules: tuple[torch.nn.Module, ...] = ()
    kind: str = "direct"

    @property
    def d_vocab(self) -> int:
        """Rows of the unembedding."""
        return self.unembedding.weight.shape[0]

    def prepare(self, states: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows d_unembed"]:
        """What enters the unembedding: everything between the last block and the product."""
        if states.shape[-1] != self.d_model:
            raise ShapeError(
                f"States are {states.shape[-1]} wide; this model's residual stream is "
                f"{self.d_model} wide."
            )
        with at_rest(*self.modules):
            for part in self.preparation:
                states = part(states)
        return states

    def logits(self, states: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows d_vocab"]:
        """Logits of states, all of the vocabulary at once."""
        with torch.no_grad():
            return self.unembedding.logits(self.prepare(states))

    def through(self, weight: Float[Tensor, "d_vocab d_unembed"]) -> "DirectReadout":
        """The same readout with another matrix in place of W_U: the input lens, with W_E."""
        expected = tuple(self.unembedding.weight.shape)
        if tuple(weight.shape) != expected:
            raise ShapeError(
                f"A matrix of shape {tuple(weight.shape)} cannot stand in for W_U of shape "
                f"{expected}: bias and steps are per vocabulary row. Read through W_U instead."
            )
        return replace(self, unembedding=replace(self.unembedding, weight=weight))

    def without(self, rows: Sequence[int]) -> "DirectReadout":
        """The same readout with no probability on these vocabulary rows: their logits are -inf."""
        mask = torch.zeros(self.d_vocab, dtype=torch.float32, device=self.unembedding.weight.device)
        mask[list(rows)] = -math.inf
        steps = (*self.unembedding.steps, Step("add", mask.to(self.unembedding.weight.dtype)))
        return replace(self, unembedding=replace(self.unembedding, steps=steps))

    def describe(self) -> str:
        """One line: the steps from state to logits."""
        names = [getattr(part, "name", type(part).__name__) for part in self.preparation]
        names.append("W_U" + (" + b_U" if self.unembedding.bias is not None else ""))
        names += [str(step) for step in self.unembedding.steps]
        return " -> ".join(names)
