"""Record what a model does to a state after its last block: module calls and tensor functions.

The recording is turned into the one path that leads from the state to the logits.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lens.errors import UnsupportedArchitectureError


@dataclass(eq=False)
class Event:
    """One call of a module or of a torch function, with its place in time."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    started: float
    ended: float = math.inf
    output: Any = None

    @property
    def is_module(self) -> bool:
        """True for a module call, False for a function."""
        return isinstance(self.target, nn.Module)

    @property
    def name(self) -> str:
        """The module's class or the function's name."""
        if self.is_module:
            return type(self.target).__name__
        return getattr(self.target, "__name__", str(self.target))

    def contains(self, other: "Event") -> bool:
        """True where the other call happened within this one."""
        return self.started < other.started and other.ended < self.ended

    def inputs(self) -> list[Tensor]:
        """Tensors among the arguments, each once."""
        return list({id(t): t for t in _tensors((self.args, self.kwargs))}.values())

    def outputs(self) -> list[Tensor]:
        """Tensors that came out."""
        return list(_tensors(self.output))


class Tape(TorchFunctionMode):
    """Records events from `begin(state)` on."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.state: Tensor | None = None
        self._open: list[Event] = []
        self._clock = 0.0

    def begin(self, state: Tensor) -> None:
        """Start recording: `state` has just left the last block."""
        self.state = state

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.state is None:
            return func(*args, **kwargs)
        event = Event(func, args, kwargs, self._tick())
        event.output = func(*args, **kwargs)
        if next(iter(_tensors(event.output)), None) is not None:
            event.ended = self._tick()
            self.events.append(event)
        return event.output

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module is called."""
        if self.state is not None:
            self._open.append(Event(module, args, kwargs, self._tick()))

    def leave(self, module: nn.Module, output: Any) -> None:
        """A module returns; calls that began before the recording are not events."""
        if self._open and self._open[-1].target is module:
            event = self._open.pop()
            event.output, event.ended = output, self._tick()
            self.events.append(event)

    def _tick(self) -> float:
        self._clock += 1
        return self._clock


@contextmanager
def recording(model: nn.Module) -> Iterator[Tape]:
    """A tape that hears every module and torch function of `model` within, and leaves nothing."""
    tape = Tape()
    handles = []
    try:
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(tape.enter, with_kwargs=True))
            handles.append(module.register_forward_hook(lambda m, a, out: tape.leave(m, out)))
        with tape:
            yield tape
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True, eq=False)
class TailPath:
    """The steps from the last block's state to the logits; `product` is the place of W_U's."""

    steps: tuple[tuple[Event, Tensor], ...]
    product: int


def tail_path(tape: Tape, logits: Tensor) -> TailPath:
    """The one path from the recorded state to `logits`: (event, its input from the path) pairs.

    Modules are whole steps, save those that hold the product with the vocabulary inside: these
    are opened. Raises UnsupportedArchitectureError naming the place where the path branches or
    is lost.
    """
    assert tape.state is not None
    tainted = _tainted(tape)
    product = _vocabulary_product(tape, logits, tainted)
    steps = _walk(tape, logits, tainted, product, until=None)
    return TailPath(tuple(steps), [event for event, _ in steps].index(product))


def path_after_product(tape: Tape, logits: Tensor) -> TailPath:
    """The path from the product with the vocabulary to `logits`; what comes before stays whole.

    Raises UnsupportedArchitectureError as `tail_path` does.
    """
    tainted = _tainted(tape)
    product = _vocabulary_product(tape, logits, tainted)
    return TailPath(tuple(_walk(tape, logits, tainted, product, until=product)), 0)


def _walk(
    tape: Tape, logits: Tensor, tainted: set[int], product: Event, *, until: Event | None
) -> list[tuple[Event, Tensor]]:
    steps: list[tuple[Event, Tensor]] = []
    at, before = logits, math.inf
    while at is not tape.state or _maker(tape.events, at, before) is not None:
        event = _maker(tape.events, at, before)
        if event is None:
            raise _lost(at, steps)
        if event.is_module and event.contains(product):
            before = event.ended
            continue
        sources = [t for t in event.inputs() if id(t) in tainted]
        if not sources and at is tape.state:
            break
        if len(sources) != 1:
            raise UnsupportedArchitectureError(
                f"The tail joins {len(sources)} paths at {event.name}; expected one path from the "
                "last block to the logits."
            )
        steps.append((event, sources[0]))
        if event is until:
            break
        at, before = sources[0], event.started
    steps.reverse()
    if not any(event is product for event, _ in steps):
        raise _lost(logits, steps)
    return steps


def _lost(at: Tensor, steps: list[tuple[Event, Tensor]]) -> UnsupportedArchitectureError:
    last = steps[-1][0].name if steps else "the logits"
    return UnsupportedArchitectureError(
        f"The tail cannot be followed back beyond {last}: a tensor of shape {tuple(at.shape)} "
        "comes from an operation that was not seen."
    )


def _maker(events: list[Event], tensor: Tensor, before: float) -> Event | None:
    """The latest event that ended before this moment and gave out this very tensor."""
    made = [e for e in events if e.ended < before and any(t is tensor for t in e.outputs())]
    return max(made, key=lambda e: e.ended, default=None)


def _tainted(tape: Tape) -> set[int]:
    """Ids of all tensors that depend on the state; the tape keeps them alive, so ids are unique."""
    tainted = {id(tape.state)}
    for event in sorted(tape.events, key=lambda e: e.ended):
        if any(id(t) in tainted for t in event.inputs()):
            tainted.update(id(t) for t in event.outputs())
    return tainted


def _vocabulary_product(tape: Tape, logits: Tensor, tainted: set[int]) -> Event:
    d_vocab = logits.shape[-1]
    products = [
        e
        for e in tape.events
        if e.target is torch.nn.functional.linear
        and e.output.shape[-1] == d_vocab
        and any(id(t) in tainted for t in e.inputs())
    ]
    if not products:
        raise UnsupportedArchitectureError(
            f"No product with a matrix of {d_vocab} rows was seen after the last block."
        )
    return products[-1]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


Part = Callable[[Tensor], Tensor]
