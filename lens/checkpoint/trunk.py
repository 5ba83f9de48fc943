"""The blocks of a model, found by structure in one traced forward: calls, state slots, layout.

A residual stack is a ModuleList whose children run one after another, the state that one returns
being the state that the next receives. No model name and no config key takes part.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from lens.checkpoint.slots import InputSlot, OutputSlot, tensors_in, tensors_out
from lens.errors import UnsupportedArchitectureError


@dataclass(frozen=True)
class Layout:
    """Order of a state's axes in the model, e.g. "batch pos d" or "batch pos stream d"."""

    axes: str
    n_streams: int = 1

    def canonical(self, state: Tensor) -> Float[Tensor, "batch pos d_model"]:
        """The state as [batch, pos, d_model]; several streams lie side by side in d_model."""
        return rearrange(state, f"{self.axes} -> batch pos {self._width}")

    def native(self, state: Float[Tensor, "batch pos d_model"]) -> Tensor:
        """The state in the model's own order of axes."""
        if "stream" in self.axes:
            return rearrange(
                state, f"batch pos {self._width} -> {self.axes}", stream=self.n_streams
            ).contiguous()
        return rearrange(state, f"batch pos d -> {self.axes}").contiguous()

    @property
    def _width(self) -> str:
        return "(stream d)" if "stream" in self.axes else "d"


@dataclass(frozen=True, eq=False)
class Trunk:
    """The blocks in the order in which they are called, and where the state sits.

    A block that is called several times (ALBERT) stands in `blocks` several times. `container` is
    the path of the ModuleList, `templates` one output of each call with the state's slot alone.
    `linked` is False where something acts on the state between blocks, so that a block's output
    is not quite the next one's input.
    """

    container: str
    blocks: tuple[nn.Module, ...]
    input_slot: InputSlot
    output_slot: OutputSlot
    output_forms: tuple[Any, ...]
    layout: Layout
    d_model: int
    linked: bool

    @property
    def n_layers(self) -> int:
        """Number of block calls; residual states have indices 0 .. n_layers."""
        return len(self.blocks)

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
def _traced(model: nn.Module) -> Iterator[_Trace]:
    trace = _Trace()
    handles = []
    try:
        for path, container in model.named_modules(remove_duplicate=False):
            if not isinstance(container, nn.ModuleList):
                continue
            for child in {id(child): child for child in container}.values():
                handles.append(
                    child.register_forward_pre_hook(
                        lambda m, a, k, path=path: trace.enter(path, m, a, k), with_kwargs=True
                    )
                )
                handles.append(child.register_forward_hook(lambda m, a, o: trace.leave(m, o)))
        yield trace
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True, eq=False)
class _Stack:
    """A candidate for the trunk: calls that run in sequence, with the slots that chain them."""

    container: str
    calls: list[_Call]
    input_slot: InputSlot
    output_slot: OutputSlot
    linked: bool


def find_trunk(model: nn.Module, run: Any, *, batch: int, pos: int) -> Trunk:
    """Trace one forward, `run()`, on [batch, pos] ids and read the trunk off it.

    Raises UnsupportedArchitectureError with the candidates seen where no ModuleList qualifies or
    the layout of the state is not understood.
    """
    with _traced(model) as trace:
        run()
    stacks = [s for path, calls in trace.calls.items() if (s := _as_stack(path, calls))]
    outer = [s for s in stacks if not any(_inside(s, other) for other in stacks)]
    # A stack of two and more calls shows its chain; a lone call shows nothing, so it comes last.
    chained = [s for s in outer if len(s.calls) > 1 and s.linked]
    loose = [s for s in outer if len(s.calls) > 1]
    for group in (chained, loose, outer):
        if group:
            return _as_trunk(max(group, key=lambda s: s.calls[-1].ended), batch=batch, pos=pos)
    seen = ", ".join(f"{path} ({len(calls)} calls)" for path, calls in trace.calls.items())
    raise UnsupportedArchitectureError(
        f"{type(model).__name__}: no stack of blocks was found. Missing step: the trunk. Expected "
        "a ModuleList whose children run in sequence, the output of one being the input of the "
        f"next; ModuleLists that ran: {seen or 'none'}."
    )


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
    for out_slot, in_slot in pairs:
        if _chains(calls, out_slot, in_slot):
            return _Stack(container, calls, in_slot, out_slot, linked=True)
    for out_slot, in_slot in pairs:
        if _same_shapes(calls, out_slot, in_slot):
            return _Stack(container, calls, in_slot, out_slot, linked=False)
    return None


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


def _as_trunk(stack: _Stack, *, batch: int, pos: int) -> Trunk:
    state = _pick(stack.calls[-1].results, stack.output_slot)
    assert state is not None
    layout = _layout(state, batch=batch, pos=pos, container=stack.container)
    slot = stack.output_slot
    placeholder = state.new_empty(0)
    return Trunk(
        container=stack.container,
        blocks=tuple(call.module for call in stack.calls),
        input_slot=stack.input_slot,
        output_slot=slot,
        output_forms=tuple(slot.alone(call.returned, placeholder) for call in stack.calls),
        layout=layout,
        d_model=layout.canonical(state).shape[-1],
        linked=stack.linked,
    )


def _layout(state: Tensor, *, batch: int, pos: int, container: str) -> Layout:
    shape = tuple(state.shape)
    if shape[:2] == (batch, pos) and len(shape) == 3:
        return Layout("batch pos d")
    if shape[:2] == (pos, batch) and len(shape) == 3:
        return Layout("pos batch d")
    if shape[:2] == (batch, pos) and len(shape) == 4:
        return Layout("batch pos stream d", shape[2])
    if shape[1:3] == (batch, pos) and len(shape) == 4:
        return Layout("stream batch pos d", shape[0])
    raise UnsupportedArchitectureError(
        f"The blocks of {container} carry a state of shape {shape} for ids of shape "
        f"{(batch, pos)}. Missing step: the layout. Expected the axes batch, pos and d_model, "
        "with at most one axis of streams: this model pads, merges or extends its positions."
    )
