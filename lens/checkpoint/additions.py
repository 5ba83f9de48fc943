"""Hear each addition that carries the residual stream through a block, as the model makes it.

A block returns its input plus what its parts add. The additions are heard one by one among the
torch functions that a forward calls, so that parts need not be modules: T5 adds inside of them,
OPT on rows laid flat, Granite after a multiplier. No model name and no config key takes part.
"""

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxtyping import Float
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lens.checkpoint.residual import EnoughError, block_calls
from lens.checkpoint.trunk import Trunk

ADDS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__"})
"""Names of torch functions and methods that add."""

# What a state may pass on its way and stay the state, value for value and in the same order.
_KEEPS = frozenset(
    {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous", "clone"}
    | {"detach", "dropout", "to", "float", "half", "bfloat16", "double", "type", "type_as"}
)
_IN_PLACE = frozenset({"__imul__", "__isub__", "__itruediv__", "__setitem__"})


@dataclass(frozen=True, eq=False)
class Addition:
    """One addition to the stream: `added` came to a state and made it `state`.

    `summands` are what `added` was itself the sum of, where it was (parallel blocks). All in the
    block's own order of axes.
    """

    added: Tensor
    state: Tensor
    summands: tuple[Tensor, ...] = ()


@dataclass(frozen=True, eq=False)
class Passage:
    """The stream through one block call, [batch, pos, d_model] each.

    `states` are the block's input and the state after each addition, `added` what was added. None
    of `added` where the additions do not lead to what the block returned; `last_step` is the
    function that made that.
    """

    states: tuple[Float[Tensor, "batch pos d_model"], ...]
    added: tuple[Float[Tensor, "batch pos d_model"], ...]
    last_step: str


Answer = Callable[[int, int, Addition, Tensor], None]
"""(block call, number of the addition, the addition, its output to be changed in place)."""


@dataclass(frozen=True, eq=False)
class _Node:
    """A state of the stream, and how it came to be; the node before is None at the input."""

    number: int
    before: "_Node | None"
    addition: Addition | None


class _Stream(TorchFunctionMode):
    """Follows the additions from one tensor on, between `begin` and `end`."""

    def __init__(self) -> None:
        super().__init__()
        self.answer: Callable[[int, Addition, Tensor], None] | None = None
        self.keeps_summands = False
        self._nodes: dict[int, _Node] | None = None
        self._sums: dict[int, tuple[Tensor, ...]] = {}
        self._makers: dict[int, str] = {}
        # Alive until the block ends, so that no id comes twice.
        self._held: list[Tensor] = []

    def begin(self, state: Tensor) -> None:
        """`state` enters the block."""
        self._nodes = {id(state): _Node(0, None, None)}
        self._held, self._sums, self._makers = [state], {}, {}

    def end(self, state: Tensor) -> tuple[list[Addition] | None, str]:
        """The additions that led to `state`, None where none did, and what made it."""
        assert self._nodes is not None
        node, last = self._nodes.get(id(state)), self._makers.get(id(state), "no torch function")
        self._nodes, self._held, self._sums = None, [], {}
        if node is None:
            return None, last
        found: list[Addition] = []
        while node is not None and node.addition is not None:
            found.append(node.addition)
            node = node.before
        return found[::-1], last

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._nodes is None:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in ADDS and len(args) == 2 and not kwargs:
            output = self._add(func, args)
        else:
            output = func(*args, **kwargs)
            self._pass(name, args, output)
        if isinstance(output, Tensor):
            self._makers[id(output)] = name
        return output

    def _pass(self, name: str, args: Any, output: Any) -> None:
        """Any function but an addition: the state stays the state, or is one no more."""
        assert self._nodes is not None
        first = args[0] if args else None
        if not isinstance(first, Tensor) or id(first) not in self._nodes:
            return
        if name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
            del self._nodes[id(first)]
        elif name in _KEEPS and isinstance(output, Tensor) and output.numel() == first.numel():
            self._nodes[id(output)] = self._nodes[id(first)]
            self._held.append(output)

    def _add(self, func: Any, args: tuple[Any, Any]) -> Any:
        assert self._nodes is not None
        nodes = [self._nodes.get(id(one)) for one in args]
        # Where both are states of the stream, the later one is the stream.
        place = max((0, 1), key=lambda i: -1 if nodes[i] is None else nodes[i].number)  # type: ignore[union-attr]
        node, other = nodes[place], args[1 - place]
        if node is None or not isinstance(other, Tensor) or other.ndim > args[place].ndim:
            return self._other_sum(func, args)
        shape, summands = args[place].shape, self._sums.get(id(other), ())
        # Before the function: it may work in place on either.
        added = other.expand(shape).clone()
        output = func(*args)
        addition = Addition(added, output.clone(), summands)
        self._nodes[id(output)] = _Node(node.number + 1, node, addition)
        self._held.append(output)
        if self.answer is not None:
            self.answer(node.number, addition, output)
        return output

    def _other_sum(self, func: Any, args: tuple[Any, Any]) -> Any:
        """An addition beside the stream; its summands are kept where they are asked for."""
        assert self._nodes is not None
        alike = all(isinstance(t, Tensor) for t in args) and args[0].shape == args[1].shape
        if not (alike and self.keeps_summands):
            output = func(*args)
        else:
            summed = [self._sums.get(id(t)) or (t.clone(),) for t in args]
            output = func(*args)
            self._sums[id(output)] = (*summed[0], *summed[1])
            self._held.append(output)
        if output is args[0]:
            self._nodes.pop(id(output), None)
        return output


def passages(
    trunk: Trunk,
    run: Callable[[], Any],
    *,
    length: int,
    blocks: Collection[int] | None = None,
    enter: Callable[[int, Tensor], Tensor] | None = None,
    answer: Answer | None = None,
    stop_early: bool = False,
) -> dict[int, Passage]:
    """Run one forward and give the stream's passage through these block calls (all where None).

    `enter(block, state)` may put another state in place of a block's input, and `answer` may
    change what an addition made, in place; both see the block's own order of axes. `stop_early`
    ends the forward after the last of the blocks. Calls that did not pass by are not in the
    result.
    """
    stream = _Stream()
    stream.keeps_summands = answer is not None
    found: dict[int, Passage] = {}
    wanted = set(range(trunk.n_layers) if blocks is None else blocks)
    entered: list[Tensor] = []

    def _canonical(state: Tensor) -> Tensor:
        return trunk.layout.canonical(state.reshape(entered[-1].shape), length=length)

    def _before(index: int, args: Any, kwargs: Any) -> Any:
        if index not in wanted:
            return None
        state = trunk.input_slot.get(args, kwargs)
        changed = state if enter is None else enter(index, state)
        # A copy, since a block may work in place on its input.
        entered[:] = [changed.clone()]
        if answer is not None:
            stream.answer = partial(answer, index)
        stream.begin(changed)
        return None if changed is state else trunk.input_slot.put(args, kwargs, changed)

    def _after(index: int, output: Any) -> None:
        if index not in wanted:
            return
        end = trunk.output_slot.get(output)
        additions, last = stream.end(end)
        # Where a block lies on another device than the one before it, its input is moved there.
        start = entered[0].to(end.device)
        found[index] = Passage(
            states=tuple(map(_canonical, (start, *(a.state for a in additions or ())))),
            added=tuple(_canonical(a.added) for a in additions or ()),
            last_step=last,
        )
        if stop_early and index == max(wanted):
            raise EnoughError

    with block_calls(trunk, _before, _after, first=True), stream, suppress(EnoughError):
        run()
    return found
