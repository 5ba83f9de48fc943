"""The parts of a readout in float32, for a model that computes in half precision.

What a part does to a state is found by trying it. In bfloat16 each try is rounded to three digits,
which hides a norm's gain and bias; the same module on the same weights in float32 shows them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lens.checkpoint.readout import Step
from lens.checkpoint.tail import FunctionPart, ModulePart, StepPart

Part = Callable[[Tensor], Tensor]

HALF = (torch.bfloat16, torch.float16)


def in_more_than_half(x: Tensor) -> Tensor:
    """The same numbers, in float32 where they are in half precision."""
    return x.float() if x.dtype in HALF else x


def precise_parts(parts: Sequence[Part | nn.Module], dtype: torch.dtype) -> tuple[Part, ...]:
    """The parts as they are, or for a state of half precision in float32, without casts.

    A part that is more than a module, a function or a number stays in the model's own precision.
    """
    if dtype not in HALF and not any(_is_cast(p) and p.step.value in HALF for p in parts):  # type: ignore[union-attr]
        return tuple(parts)
    return tuple(_precise(p, dtype) for p in parts if not _is_cast(p))


def _is_cast(part: Any) -> bool:
    return isinstance(part, StepPart) and part.step.kind == "cast"


def _precise(part: Any, dtype: torch.dtype) -> Part:
    if isinstance(part, nn.Module):
        part = ModulePart(part, (None,), {}, 0)
    if isinstance(part, ModulePart) and not any(p.is_meta for p in part.module.parameters()):
        part = _with_raised_weights(part)
    if isinstance(part, FunctionPart):
        kwargs = {name: _raised(value) for name, value in part.kwargs.items()}
        return FunctionPart(part.function, tuple(map(_raised, part.args)), kwargs, part.slot)
    if isinstance(part, StepPart):
        return StepPart(Step(part.step.kind, _raised(part.step.value)))
    return lambda x: part(x.to(dtype)).float()


def _with_raised_weights(part: ModulePart) -> FunctionPart:
    """The module called with float32 copies of its weights; its own stay as they are."""
    module = part.module
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    weights = {name: _raised(value) for name, value in held.items()}

    def raised(*args: Any, **kwargs: Any) -> Tensor:
        return functional_call(module, weights, args, kwargs)

    return FunctionPart(raised, part.args, part.kwargs, part.slot)


def _raised(value: Any) -> Any:
    return in_more_than_half(value.detach()) if isinstance(value, Tensor) else value
