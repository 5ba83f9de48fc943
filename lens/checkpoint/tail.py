"""Compose a direct readout from the recorded tail of a model: its own modules and steps."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lens.checkpoint.quantized import is_plain
from lens.checkpoint.readout import DirectReadout, Step, Unembedding
from lens.checkpoint.tape import Event, TailPath
from lens.errors import UnsupportedArchitectureError

# Names of torch functions and tensor methods, by what they do to one operand and a constant.
_ELEMENTWISE: dict[str, str] = {
    **dict.fromkeys(("mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply"), "mul"),
    **dict.fromkeys(("div", "div_", "__truediv__", "__itruediv__", "true_divide"), "div"),
    **dict.fromkeys(("add", "add_", "__add__", "__radd__", "__iadd__"), "add"),
    **dict.fromkeys(("sub", "sub_", "__sub__", "__isub__", "subtract"), "sub"),
    **dict.fromkeys(("tanh", "tanh_"), "tanh"),
}
_CASTS = frozenset({"to", "float", "half", "bfloat16", "double", "type", "type_as"})
_IDENTITIES = frozenset(
    {"contiguous", "dropout", "clone", "detach", "__getitem__", "view", "reshape", "to"}
)
# These move or cut whole rows. Here a state is [batch, pos, d_model] whatever its order in the
# model, and rows that are not the prompt's are gone: so they change nothing, or the proof says no.
_ROW_MOVES = frozenset({"transpose", "permute", "movedim", "swapaxes", "transpose_", "__getitem__"})
# Functions that treat every row alike; row by row they give what they give on a batch.
_ROWWISE = frozenset(
    {"layer_norm", "rms_norm", "gelu", "relu", "silu", "linear", "softsign", "sigmoid", "pow"}
)


@dataclass(frozen=True, eq=False)
class ModulePart:
    """A module of the model as one step; `slot` is the place of the state among its arguments."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    slot: int | str

    def __call__(self, rows: Tensor) -> Tensor:
        """The part's result on rows [..., d]."""
        return _called(self.module, self.args, self.kwargs, self.slot, rows)

    @property
    def name(self) -> str:
        """The module's class."""
        return type(self.module).__name__


@dataclass(frozen=True, eq=False)
class FunctionPart:
    """A row-wise torch function as one step."""

    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    slot: int | str

    def __call__(self, rows: Tensor) -> Tensor:
        """The part's result on rows [..., d]."""
        return _called(self.function, self.args, self.kwargs, self.slot, rows)

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.__name__


@dataclass(frozen=True, eq=False)
class StepPart:
    """An elementwise step on the state."""

    step: Step

    def __call__(self, rows: Tensor) -> Tensor:
        """The part's result on rows [..., d]."""
        return self.step.apply(rows)

    @property
    def name(self) -> str:
        """The step in words."""
        return str(self.step)


@dataclass(frozen=True, eq=False)
class OwnTail:
    """The model's own tail, up to the product with `weight`, as one step: `run` is the replay.

    For tails that no list of steps describes (streams that are joined, masks). Each row passes
    as a prompt of one token, so nothing but the row itself can act on it.
    """

    run: Callable[[Tensor], Any]
    weight: Tensor
    name: str = "the model's own tail"

    def __call__(self, rows: Tensor) -> Tensor:
        """What enters the product [..., d_unembed], for rows [..., d_model]."""
        with _ProductInput(self.weight) as seen, suppress(_ProductReachedError):
            self.run(rearrange(rows.reshape(-1, rows.shape[-1]), "row d -> row 1 d"))
        if seen.found is None:
            raise UnsupportedArchitectureError("The product with the vocabulary was not reached.")
        return seen.found.reshape(*rows.shape[:-1], -1)


class _ProductReachedError(Exception):
    """Ends a replay once the product with the vocabulary begins."""


class _ProductInput(TorchFunctionMode):
    """Stops at the product with one matrix and keeps what enters it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight, self.found = weight, None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear:
            names = ("input", "weight", "bias")
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            if given["weight"] is self.weight:
                self.found = given["input"]
                raise _ProductReachedError
        return func(*args, **kwargs)


def direct_from_tail(path: TailPath, model: nn.Module, *, d_model: int) -> DirectReadout:
    """A DirectReadout made of the path's steps, still to be proved.

    Raises UnsupportedArchitectureError naming the step that cannot be repeated row by row.
    """
    preparation = [
        part
        for event, source in path.steps[: path.product]
        if (part := _preparation_part(event, source)) is not None
    ]
    modules = tuple(part.module for part in preparation if isinstance(part, ModulePart))
    return DirectReadout(
        preparation=tuple(preparation),
        unembedding=_from_product_on(path, model),
        d_model=d_model,
        modules=modules,
    )


def direct_behind_own_tail(
    path: TailPath, model: nn.Module, run: Callable[[Tensor], Any], *, d_model: int
) -> DirectReadout:
    """A DirectReadout whose preparation is the model's own tail (`run`), still to be proved.

    Raises UnsupportedArchitectureError where what follows the product is not elementwise.
    """
    unembedding = _from_product_on(path, model)
    return DirectReadout(
        preparation=(OwnTail(run, unembedding.weight),), unembedding=unembedding, d_model=d_model
    )


def _from_product_on(path: TailPath, model: nn.Module) -> Unembedding:
    product, source = path.steps[path.product]
    unembedding = _unembedding(product, source, model)
    steps = [
        step
        for event, source in path.steps[path.product + 1 :]
        if (step := _logit_step(event, source)) is not None
    ]
    return Unembedding(unembedding.weight, unembedding.bias, tuple(steps))


def _unembedding(event: Event, source: Tensor, model: nn.Module) -> Unembedding:
    names = ("input", "weight", "bias")
    given = {**dict(zip(names, event.args, strict=False)), **event.kwargs}
    weight, bias = given["weight"], given.get("bias")
    if given["input"] is not source:
        raise UnsupportedArchitectureError("The state enters the vocabulary product as its matrix.")
    if not is_plain(weight) or weight.is_meta or not weight.is_floating_point():
        raise UnsupportedArchitectureError(
            f"The unembedding is a {type(weight).__name__} on {weight.device}; a plain matrix of "
            "floating-point numbers in memory is needed to multiply by parts of it."
        )
    held = [p for p in model.parameters() if is_plain(p) and not p.is_meta]
    if not any(weight is p or weight.data_ptr() == p.data_ptr() for p in held):
        raise UnsupportedArchitectureError(
            "The unembedding is made or brought in anew for each forward (offloaded, or computed "
            "from others); no parameter in memory holds it."
        )
    return Unembedding(weight, bias)


def _preparation_part(event: Event, source: Tensor) -> Any:
    if event.is_module:
        slot = _slot(event, source)
        others = [t for t in event.inputs() if t is not source]
        if others:
            raise UnsupportedArchitectureError(
                f"{event.name} takes {len(others)} more tensors beside the state; expected none."
            )
        if event.output is source:
            return None
        return ModulePart(event.target, event.args, event.kwargs, slot)
    if _is_identity(event, source) or event.name in _ROW_MOVES:
        return None
    step = _elementwise(event, source, width=source.shape[-1])
    if step is not None:
        return StepPart(step)
    if event.name in _ROWWISE and event.args and event.args[0] is source:
        return FunctionPart(event.target, event.args, event.kwargs, 0)
    raise UnsupportedArchitectureError(
        f"The step {event.name} between the last block and the unembedding is not known to act "
        "row by row."
    )


def _logit_step(event: Event, source: Tensor) -> Step | None:
    if _is_identity(event, source):
        return None
    step = None if event.is_module else _elementwise(event, source, width=source.shape[-1])
    if step is None:
        raise UnsupportedArchitectureError(
            f"The step {event.name} after the unembedding is not elementwise with a constant."
        )
    return step


def _is_identity(event: Event, source: Tensor) -> bool:
    """True where the event passed its input on, value for value (a full slice, dropout at rest)."""
    out = event.output
    if not isinstance(out, Tensor):
        return False
    if event.is_module or event.name in _IDENTITIES or event.name in _CASTS:
        same = out is source or (
            out.shape == source.shape
            and out.dtype == source.dtype
            and torch.equal(out.to(source.device), source)
        )
        return same and (event.is_module is False or not list(event.target.parameters()))
    return False


def _elementwise(event: Event, source: Tensor, *, width: int) -> Step | None:
    if event.name in _CASTS and isinstance(event.output, Tensor):
        return Step("cast", event.output.dtype)
    kind = _ELEMENTWISE.get(event.name)
    if kind is None or len(event.args) > 2 or event.kwargs:
        return None
    if kind == "tanh":
        return Step("tanh")
    if len(event.args) != 2:
        return None
    other = event.args[1] if event.args[0] is source else event.args[0]
    if kind in ("div", "sub") and event.args[0] is not source:
        return None
    if isinstance(other, bool) or not isinstance(other, int | float | Tensor):
        return None
    if isinstance(other, Tensor) and other.numel() not in (1, width):
        return None
    if isinstance(other, Tensor) and other.ndim > 0:
        if other.shape[-1] != other.numel():
            return None
        # A learned scale of one number acts as a number.
        other = other.reshape(-1) if other.numel() == width else other.reshape(())
    return Step(kind, other)  # type: ignore[arg-type]


def _slot(event: Event, source: Tensor) -> int | str:
    for place, value in enumerate(event.args):
        if value is source:
            return place
    for name, value in event.kwargs.items():
        if value is source:
            return name
    raise UnsupportedArchitectureError(
        f"{event.name} takes the state inside another argument; expected it as an argument."
    )


def _called(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], slot: Any, x: Tensor
) -> Tensor:
    if isinstance(slot, int):
        args = (*args[:slot], x, *args[slot + 1 :])
    else:
        kwargs = {**kwargs, slot: x}
    return target(*args, **kwargs)
