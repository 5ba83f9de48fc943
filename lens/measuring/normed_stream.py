"""The stream through a block that norms it: additions, and the norms that the sum passes through.

A post-norm block (BART, GPT, OPT-350m) returns norm(norm(x + attention) + mlp). Its steps are told
from the tensors that passed between its modules: an addition is one whose two summands give the sum
bit for bit, a norm is a module whose scale at the position can be frozen. Source of the block:
Vaswani et al. 2017.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lens.measuring.frozen_norm import FrozenNorm, frozen_norm


@dataclass(frozen=True, eq=False)
class Output:
    """What a module within a block was given first (None where no tensor) and what it returned."""

    path: str
    module: nn.Module
    made: Tensor
    given: Tensor | None


@dataclass(frozen=True, eq=False)
class Added:
    """A module's output that was added to the stream; `rounding` is what the sum lost by it."""

    output: Output
    value: Float[Tensor, "batch pos d_model"]
    rounding: Float[Tensor, "batch pos d_model"]


def normed_steps(
    before: Float[Tensor, "batch pos d_model"],
    after: Float[Tensor, "batch pos d_model"],
    outputs: Sequence[Output],
    position: int,
) -> list[Added | FrozenNorm] | None:
    """The steps from a block's input to its output, norms frozen at the position, in order.

    None where no chain of additions and norms leads from the one to the other.
    """
    same_size = [o for o in outputs if o.made.numel() == after.numel()]
    return _steps(_Search(before, same_size, position), after, len(same_size))


@dataclass(frozen=True, eq=False)
class _Search:
    before: Tensor
    outputs: list[Output]
    position: int

    def shaped(self, tensor: Tensor) -> Tensor:
        # OPT's MLP works on rows of all positions together.
        return tensor.reshape(self.before.shape)

    def is_sum(self, after: Tensor, state: Tensor, made: Tensor) -> bool:
        """Whether the one is the sum of the others, bit for bit; at one position first."""
        at = (0, self.position)
        return torch.equal(state[at] + made[at], after[at]) and torch.equal(state + made, after)

    def norms(self) -> Iterator[Output]:
        """Modules that might be norms: nothing within, and no matrix."""
        for one in self.outputs:
            if one.given is None or one.given.numel() != self.before.numel():
                continue
            leaf = next(one.module.children(), None) is None
            if leaf and all(p.ndim == 1 for p in one.module.parameters()):
                yield one

    def states(self) -> Iterator[Tensor]:
        """What may have been added to: the input, what norms returned, what modules were given."""
        yield self.before
        yield from (self.shaped(norm.made) for norm in self.norms())
        for one in self.outputs:
            if one.given is not None and one.given.numel() == self.before.numel():
                yield self.shaped(one.given)


def _steps(search: _Search, after: Tensor, left: int) -> list[Added | FrozenNorm] | None:
    """Backwards from `after`, with at most so many steps left."""
    if torch.equal(after, search.before):
        return []
    if left <= 0:
        return None
    for norm in search.norms():
        if norm.given is None or not torch.equal(search.shaped(norm.made), after):
            continue
        given = search.shaped(norm.given)
        frozen = frozen_norm([norm.module], given[0, search.position])
        found = None if frozen is None else _steps(search, given, left - 1)
        if found is not None and frozen is not None:
            return [*found, frozen]
    for state in search.states():
        # The outermost module first: an attention before its last linear map.
        for output in sorted(search.outputs, key=lambda one: one.path.count(".")):
            made = search.shaped(output.made)
            # Nothing added is no step: it would lead from the state to itself.
            if not search.is_sum(after, state, made) or not bool(made.any()):
                continue
            found = _steps(search, state, left - 1)
            if found is not None:
                rounding = after.double() - state.double() - made.double()
                return [*found, Added(output, made.double(), rounding)]
    return None
