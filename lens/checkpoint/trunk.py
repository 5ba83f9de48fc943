"""The blocks of a model, found by structure in one traced forward: calls, state slots, layout.

A residual stack is a ModuleList whose children run one after another, the state that one returns
being the state that the next receives. No model name and no config key takes part.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lens.checkpoint.layout import Layout, layouts_of_rows, plain_layout, unknown_layout
from lens.checkpoint.listening import listening
from lens.checkpoint.slots import (
    InputSlot,
    JoinedInput,
    JoinedOutput,
    OutputSlot,
    tensors_in,
    tensors_out,
)
from lens.errors import UnsupportedArchitectureError

Run = Callable[[], Any]
"""Runs one forward of the model."""


@dataclass(frozen=True, eq=False)
class Trunk:
    """The blocks in the order in which they are called, and where the state sits.

    A block that is called several times (ALBERT) stands in `blocks` several times. `container` is
    the path of the ModuleList, `templates` one output of each call with the state's slot alone.
    `linked` is False where something acts on the state between blocks, so that a block's output
    is not quite the next one's input; `past_hooks` is True where the model calls the blocks'
    `forward` itself, so that no hook fires.
    """

    container: str
    blocks: tuple[nn.Module, ...]
    input_slot: InputSlot | JoinedInput
    output_slot: OutputSlot | JoinedOutput
    output_forms: tuple[Any, ...]
    layout: Layout
    d_model: int
    linked: bool
    past_hooks: bool = False

    @property
    def n_layers(self) -> int:
        """Number of block calls; residual states have indices 0 .. n_layers."""
        return len(self.blocks)

    def describe(self) -> str:
        """What a residual state is in this model, in one line."""
        parts = [str(self.layout)]
        if not self.linked:
            parts.append(f"changed again between blocks; layer 0 enters {self.container}.0")
        return ", ".join(parts)

    @property
    def distinct_blocks(self) -> tuple[nn.Module, ...]:
        """Each block module once."""
        return tuple({id(block): block for block in self.blocks}.values())


@dataclass(eq=False)
class _Call:
    """One call of one child of a ModuleList during the trace."""

    module: nn.Module
    given: list[tuple[InputSlot, Tensor]]
    started: int
    returned: Any = None
    ended: int = -1
    results: list[tuple[OutputSlot, Tensor]] = field(default_factory=list)


class _Trace:
    """Records every call of every ModuleList's children, with a clock."""

    def __init__(self) -> None:
        self.calls: dict[str, list[_Call]] = {}
        self._open: dict[int, list[_Call]] = {}
        self._clock = 0

    def enter(self, container: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._clock += 1
        call = _Call(module, tensors_in(args, kwargs), self._clock)
        self.calls.setdefault(container, []).append(call)
        self._open.setdefault(id(module), []).append(call)

    def leave(self, module: nn.Module, output: Any) -> None:
        self._clock += 1
        call = self._open[id(module)].pop()
        call.returned, call.ended, call.results = output, self._clock, tensors_out(output)

    def __len__(self) -> int:
        return self._clock


@contextmanager
def _traced(model: nn.Module, *, past_hooks: bool) -> Iterator[_Trace]:
    trace = _Trace()
    with ExitStack() as stack:
        for path, container in model.named_modules(remove_duplicate=False):
            if isinstance(container, nn.ModuleList):
                children = {id(child): child for child in container}.values()
                stack.enter_context(
                    listening(
                        children,
                        lambda m, a, k, path=path: trace.enter(path, m, a, k),
                        lambda m, a, out: trace.leave(m, out),
                        past_hooks=past_hooks,
                    )
                )
        yield trace


@dataclass(frozen=True, eq=False)
class _Stack:
    """A candidate for the trunk: calls that run in sequence, with the slots that chain them.

    More than one pair of slots where the state has several parts (a reversible pair).
    """

    container: str
    calls: list[_Call]
    pairs: tuple[tuple[OutputSlot, InputSlot], ...]
    linked: bool

    @property
    def input_slot(self) -> InputSlot | JoinedInput:
        """Where a block takes the state."""
        slots = tuple(slot for _, slot in self.pairs)
        return slots[0] if len(slots) == 1 else JoinedInput(slots)

    @property
    def output_slot(self) -> OutputSlot | JoinedOutput:
        """Where a block returns the state."""
        slots = tuple(slot for slot, _ in self.pairs)
        return slots[0] if len(slots) == 1 else JoinedOutput(slots)

    @property
    def state(self) -> Tensor:
        """The state after the last call, as it left it."""
        return torch.cat([self._returned(slot) for slot, _ in self.pairs], -1)

    def _returned(self, slot: OutputSlot) -> Tensor:
        found = _pick(self.calls[-1].results, slot)
        assert found is not None
        return found


def find_trunks(
    model: nn.Module, run: Run, *, batch: int, pos: int, changed: Run | None = None
) -> tuple[Trunk, ...]:
    """Trace one forward, `run()`, on [batch, pos] ids and read the trunk off it.

    `changed()` runs the same with another last token: it tells the prompt's rows from others
    where a state has more rows than the prompt has tokens. Then several readings may come back,
    for a proof to choose from. Raises UnsupportedArchitectureError with the candidates seen
    where no ModuleList qualifies or the layout is not understood.
    """
    seen = ""
    for past_hooks in (False, True):
        with _traced(model, past_hooks=past_hooks) as trace:
            run()
        stacks = _candidates(trace)
        if stacks:
            break
        seen = seen or ", ".join(f"{path} ({len(calls)})" for path, calls in trace.calls.items())
    else:
        raise UnsupportedArchitectureError(
            f"{type(model).__name__}: no stack of blocks was found. Missing step: the trunk. "
            "Expected a ModuleList whose children run in sequence, the output of one being the "
            f"input of the next; ModuleLists that ran (calls): {seen or 'none'}."
        )
    for stack in stacks:
        layout = plain_layout(stack.state, batch=batch, pos=pos)
        if layout is not None and len(stack.pairs) > 1:
            layout = replace(layout, n_streams=len(stack.pairs))
        if layout is not None:
            return (_as_trunk(stack, layout, past_hooks=past_hooks),)
    first = stacks[0]
    layouts: tuple[Layout, ...] = ()
    if changed is not None:
        with _traced(model, past_hooks=past_hooks) as trace:
            changed()
        layouts = _layouts_by_change(first, trace, batch=batch, pos=pos)
    if not layouts:
        raise unknown_layout(first.container, tuple(first.state.shape), batch=batch, pos=pos)
    return tuple(_as_trunk(first, layout, past_hooks=past_hooks) for layout in layouts)


def _candidates(trace: _Trace) -> list[_Stack]:
    """Stacks from the likeliest on: chained, then loose, then of one call; late before early."""
    stacks = [s for path, calls in trace.calls.items() if (s := _as_stack(path, calls))]
    outer = [s for s in stacks if not any(_inside(s, other) for other in stacks)]

    def _rank(stack: _Stack) -> tuple[int, int]:
        # A stack of two and more calls shows its chain; a lone call shows nothing: it comes last.
        group = 2 if len(stack.calls) < 2 else 0 if stack.linked else 1
        return group, -stack.calls[-1].ended

    return sorted(outer, key=_rank)


def _layouts_by_change(stack: _Stack, trace: _Trace, *, batch: int, pos: int) -> tuple[Layout, ...]:
    calls = trace.calls.get(stack.container, [])
    slot = stack.pairs[0][1]
    before = _pick(stack.calls[0].given, slot)
    after = _pick(calls[0].given, slot) if calls else None
    if before is None or after is None:
        return ()
    return layouts_of_rows(before, after, batch=batch, pos=pos)


def _as_stack(container: str, calls: list[_Call]) -> _Stack | None:
    if any(call.ended < 0 for call in calls):
        return None
    in_sequence = all(a.ended < b.started for a, b in pairwise(calls))
    if not in_sequence:
        return None
    pairs = [
        (out_slot, in_slot)
        for out_slot, result in calls[0].results
        for in_slot, given in calls[-1].given
        if result.shape == given.shape and result.ndim >= 3
    ]
    chained = [pair for pair in pairs if _chains(calls, *pair)]
    if chained:
        return _Stack(container, calls, _parts(calls, chained), linked=True)
    loose = [pair for pair in pairs if _same_shapes(calls, *pair)]
    return _Stack(container, calls, (loose[0],), linked=False) if loose else None


def _parts(
    calls: list[_Call], chained: list[tuple[OutputSlot, InputSlot]]
) -> tuple[tuple[OutputSlot, InputSlot], ...]:
    """The first pair, and each other pair of the same shape that blocks also change."""
    first = chained[0]
    shape = _pick(calls[0].results, first[0])
    parts = [first]
    for out_slot, in_slot in chained[1:]:
        new = all(out_slot != o and in_slot != i for o, i in parts)
        result, given = _pick(calls[-1].results, out_slot), _pick(calls[-1].given, in_slot)
        if new and result is not None and given is not None and shape is not None:
            moved = result.shape == shape.shape and not torch.equal(result, given)
            if moved and len(calls) > 1:
                parts.append((out_slot, in_slot))
    return tuple(parts)


def _chains(calls: list[_Call], out_slot: OutputSlot, in_slot: InputSlot) -> bool:
    for before, after in pairwise(calls):
        result, given = _pick(before.results, out_slot), _pick(after.given, in_slot)
        if result is None or given is None or result.shape != given.shape:
            return False
        if result is not given and not torch.equal(result, given):
            return False
    return _same_shapes(calls, out_slot, in_slot)


def _same_shapes(calls: list[_Call], out_slot: OutputSlot, in_slot: InputSlot) -> bool:
    states = [_pick(call.results, out_slot) for call in calls]
    states += [_pick(call.given, in_slot) for call in calls]
    first = states[0]
    return first is not None and all(s is not None and s.shape == first.shape for s in states)


def _pick(slots: list[tuple[Any, Tensor]], wanted: Any) -> Tensor | None:
    return next((tensor for slot, tensor in slots if slot == wanted), None)


def _inside(stack: _Stack, other: _Stack) -> bool:
    """True where a call of `stack` happened within a call of `other`."""
    first = stack.calls[0]
    return stack is not other and any(
        call.started < first.started and first.ended < call.ended for call in other.calls
    )


def _as_trunk(stack: _Stack, layout: Layout, *, past_hooks: bool) -> Trunk:
    slot, state = stack.output_slot, stack.state
    placeholder = state.new_empty(0)
    return Trunk(
        container=stack.container,
        blocks=tuple(call.module for call in stack.calls),
        input_slot=stack.input_slot,
        output_slot=slot,
        output_forms=tuple(slot.alone(call.returned, placeholder) for call in stack.calls),
        layout=layout,
        d_model=state.numel() // _rows(layout, state),
        linked=stack.linked,
        past_hooks=past_hooks,
    )


def _rows(layout: Layout, state: Tensor) -> int:
    names = layout.axes.replace("(stream pos)", "rows").split()
    sizes = dict(zip(names, state.shape, strict=True))
    return sizes["batch"] * sizes.get("pos", sizes.get("rows", 0) // layout.n_streams)
