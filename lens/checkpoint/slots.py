"""Where the residual state sits in what a block is given and in what it returns."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lens.errors import CaptureError


@dataclass(frozen=True)
class InputSlot:
    """A positional argument (by index) or a keyword argument (by name) of a block's forward."""

    key: int | str

    def get(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The value in this slot."""
        if isinstance(self.key, int):
            if self.key < len(args):
                return args[self.key]
        elif self.key in kwargs:
            return kwargs[self.key]
        raise CaptureError(
            f"A block was called without its {self.key!r} argument, where the residual state was "
            "found when the model was loaded. Load the model again."
        )

    def put(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], value: Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same arguments with another value in this slot."""
        if isinstance(self.key, int):
            return (*args[: self.key], value, *args[self.key + 1 :]), kwargs
        return args, {**kwargs, self.key: value}


@dataclass(frozen=True)
class OutputSlot:
    """The whole output (key None), an index of a tuple or list, or a key of a mapping."""

    key: int | str | None

    def get(self, output: Any) -> Any:
        """The value in this slot."""
        if self.key is None:
            return output
        return output[self.key]

    def put(self, output: Any, value: Tensor) -> Any:
        """The same output with another value in this slot; the container's type is kept."""
        if self.key is None:
            return value
        if isinstance(output, tuple) and not hasattr(output, "_fields"):
            items = list(output)
            items[int(self.key)] = value
            return tuple(items)
        if isinstance(output, list):
            items = list(output)
            items[int(self.key)] = value
            return items
        if isinstance(output, tuple):
            named: Any = output
            return named._replace(**{named._fields[int(self.key)]: value})
        return type(output)(**{**dict(output), str(self.key): value})

    def alone(self, output: Any, value: Tensor) -> Any:
        """An output of the same form that holds nothing but the state."""
        if self.key is None:
            return value
        return _only(output, {self.key: value})


@dataclass(frozen=True)
class JoinedInput:
    """Several arguments that carry the state side by side (Reformer's reversible pair)."""

    parts: tuple[InputSlot, ...]

    def get(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The parts joined along their last axis."""
        return torch.cat([part.get(args, kwargs) for part in self.parts], -1)

    def put(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], value: Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same arguments with the parts of another value."""
        for part, piece in zip(self.parts, value.chunk(len(self.parts), -1), strict=True):
            args, kwargs = part.put(args, kwargs, piece)
        return args, kwargs


@dataclass(frozen=True)
class JoinedOutput:
    """Several values of an output that carry the state together, side by side."""

    parts: tuple[OutputSlot, ...]

    def get(self, output: Any) -> Tensor:
        """The parts joined along their last axis."""
        return torch.cat([part.get(output) for part in self.parts], -1)

    def put(self, output: Any, value: Tensor) -> Any:
        """The same output with the parts of another value."""
        for part, piece in zip(self.parts, value.chunk(len(self.parts), -1), strict=True):
            output = part.put(output, piece)
        return output

    def alone(self, output: Any, value: Tensor) -> Any:
        """An output of the same form that holds nothing but the parts."""
        return _only(output, {part.key: value for part in self.parts})


def _only(output: Any, values: dict[Any, Tensor]) -> Any:
    """An output of this form with these values and None elsewhere: nothing of a probe stays."""
    if isinstance(output, dict):
        return type(output)(**{str(name): values.get(name) for name in output})
    items = [values.get(place) for place in range(len(output))]
    if hasattr(output, "_fields"):
        return type(output)(*items)
    return type(output)(items)


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[InputSlot, Tensor]]:
    """Every floating-point tensor among a call's arguments, with its slot."""
    found = [(InputSlot(i), value) for i, value in enumerate(args)]
    found += [(InputSlot(name), value) for name, value in kwargs.items()]
    return [(slot, v) for slot, v in found if isinstance(v, Tensor) and v.is_floating_point()]


def tensors_out(output: Any) -> list[tuple[OutputSlot, Tensor]]:
    """Every floating-point tensor at the top of a call's output, with its slot."""
    if isinstance(output, Tensor):
        found: list[tuple[OutputSlot, Any]] = [(OutputSlot(None), output)]
    elif isinstance(output, tuple | list):
        found = [(OutputSlot(i), value) for i, value in enumerate(output)]
    elif isinstance(output, dict):
        found = [(OutputSlot(name), value) for name, value in output.items()]
    else:
        found = []
    return [(slot, v) for slot, v in found if isinstance(v, Tensor) and v.is_floating_point()]
