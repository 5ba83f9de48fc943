"""Accelerators that are not there: tensors that say they lie on one, and refuse to be mixed.

Memory and arithmetic are the CPU's. The rules are those of real devices: a tensor on one cannot be
seen by NumPy, meets no tensor of another but a single number of the CPU, and comes back by .cpu().
What these rules refuse fails on every GPU. What they allow is not proved for one, since none of its
kernels runs.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from inspect import getattr_static
from typing import Any, ClassVar

import accelerate
import pytest
import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lens.checkpoint import matrices, quantized, tail

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
CPU = torch.device("cpu")

_COPIES = {Tensor.copy_, Tensor.to, Tensor.type_as}
"""May be given tensors of two devices."""

_ANSWERS = {
    Tensor.device.__get__: lambda tensor: tensor.place,
    getattr_static(Tensor, "is_cuda").__get__: lambda tensor: True,
    getattr_static(Tensor, "is_cpu").__get__: lambda tensor: False,
    Tensor.get_device: lambda tensor: tensor.place.index,
}


class Pretended(Tensor):
    """A tensor that says it is at `place`."""

    place: ClassVar[torch.device]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied = put(here(self.detach()).clone(), self.place)
            if getattr(self, "_is_param", False):
                copied = nn.Parameter(copied, requires_grad=self.requires_grad)
            memo[id(self)] = copied
        return memo[id(self)]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _ANSWERS:
            return _ANSWERS[func](*args)
        if func in (Tensor.numpy, Tensor.__array__):
            raise TypeError(f"can't convert {args[0].place} device type tensor to numpy.")
        if func is torch.autograd.grad:
            return _gradients(args, kwargs)
        place = _common_place(func, args, kwargs)
        asked, args, kwargs = _on_the_cpu(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        return _put_all(result, asked or place)


class _First(Pretended):
    place = FIRST


class _Second(Pretended):
    place = SECOND


def place_of(tensor: Tensor) -> torch.device:
    """Where a tensor says it is."""
    return tensor.place if isinstance(tensor, Pretended) else CPU


def here(tensor: Tensor) -> Tensor:
    """The same memory, plain."""
    return tensor.as_subclass(Tensor) if isinstance(tensor, Pretended) else tensor


def put(tensor: Tensor, place: torch.device) -> Tensor:
    """The same memory, said to be at a place."""
    if place_of(tensor) == place:
        return tensor
    if place == CPU:
        return here(tensor)
    return tensor.as_subclass(_Second if place.index else _First)


def _put_all(result: Any, place: torch.device) -> Any:
    return tree_map_only(Tensor, lambda tensor: put(tensor, place), result)


def _common_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Where all arguments are, and the result. Raises RuntimeError as torch does, for a mixture."""
    if func is Tensor.__getitem__ or func is Tensor.__setitem__:
        return _indexed_place(*args)
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if func in _COPIES:
        return place_of(args[1] if func is Tensor.type_as else args[0])
    places = {place_of(x) for x in given if not _is_anywhere(x)}
    if len(places) > 1:
        name = getattr(func, "__name__", func)
        raise RuntimeError(f"Expected all tensors to be on the same device ({name}): {places}.")
    _refuse_generator(kwargs, *places)
    return places.pop() if places else CPU


def _gradients(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each gradient where its leaf is; what is pulled back, where the output is."""
    output, leaves, *force = args
    if {place_of(x) for x in force if x is not None} - {place_of(output)}:
        raise RuntimeError("Mismatch in device of grad_outputs and outputs.")
    with torch._C.DisableTorchFunctionSubclass():
        found = torch.autograd.grad(*args, **kwargs)
    return tuple(
        None if grad is None else put(grad, place_of(leaf))
        for grad, leaf in zip(found, leaves, strict=True)
    )


def _is_anywhere(tensor: Tensor) -> bool:
    """A number of the CPU serves every device, and vmap's own tensors do not say where they are."""
    if isinstance(tensor, Pretended):
        return False
    return tensor.ndim == 0 or is_batchedtensor(tensor)


def _indexed_place(tensor: Tensor, index: Any, *values: Any) -> torch.device:
    place = place_of(tensor)
    indices = [x for x in tree_leaves(index) if isinstance(x, Tensor)]
    if not {place_of(x) for x in indices} <= {CPU, place}:
        raise RuntimeError(f"indices should be either on cpu or on the indexed tensor's ({place})")
    for value in values:
        # A slice is copied to; chosen rows are put, which needs one device.
        if indices and isinstance(value, Tensor) and value.ndim and place_of(value) != place:
            raise RuntimeError(f"index_put_: expected values on {place}, not {place_of(value)}")
    return place


def _refuse_generator(kwargs: dict[str, Any], *places: torch.device) -> None:
    generator = kwargs.get("generator")
    if generator is not None and not {*places} <= {generator.device}:
        raise RuntimeError(f"Expected a generator of {places}, found one of {generator.device}.")


def _device_in(value: Any) -> torch.device | None:
    if isinstance(value, str) and value.split(":")[0] in ("cpu", "cuda"):
        value = torch.device(value)
    if not isinstance(value, torch.device) or value.type == "meta":
        return None
    return torch.device("cuda", value.index or 0) if value.type == "cuda" else value


def _on_the_cpu(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.device | None, tuple[Any, ...], dict[str, Any]]:
    """Where the result is asked to be, None where nothing is; and the same call for the CPU."""
    if func is Tensor.cpu:
        return CPU, args, kwargs
    if func is Tensor.to and len(args) > 1 and isinstance(args[1], Tensor):
        return place_of(args[1]), (args[0], args[1].dtype, *args[2:]), kwargs
    asked = [d for x in (*args[1:], *kwargs.values(), *args[:1]) if (d := _device_in(x))]
    args = tuple(CPU if _device_in(x) else x for x in args)
    kwargs = {name: CPU if _device_in(x) else x for name, x in kwargs.items()}
    return (asked[0] if asked else None), args, kwargs


class _Factories(TorchFunctionMode):
    """What makes or moves tensors while no argument is a Pretended one."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.device or any(
            isinstance(x, Pretended) for x in tree_leaves((args, kwargs))
        ):
            return func(*args, **kwargs)
        asked, args, kwargs = _on_the_cpu(func, args, kwargs)
        if asked is not None:
            _refuse_generator(kwargs, asked)
        result = func(*args, **kwargs)
        if asked is None or asked == CPU:
            return result
        if func is Tensor.to:
            return _put_all(result, asked)
        # A new tensor is a leaf.
        return put(result.detach(), asked).requires_grad_(result.requires_grad)


@contextmanager
def accelerators() -> Iterator[None]:
    """Within: FIRST and SECOND can be asked for, in every thread that a pool starts."""
    with pytest.MonkeyPatch.context() as patch, _Factories():
        patch.setattr(ThreadPoolExecutor, "submit", _submitting(ThreadPoolExecutor.submit))
        patch.setattr(torch.func, "vmap", _mapping(torch.func.vmap))
        for module in (quantized, matrices, tail):
            # A subclass of Tensor is otherwise taken for a quantised one.
            patch.setattr(module, "is_plain", _is_plain)
        yield


_was_plain = quantized.is_plain


def _is_plain(tensor: Tensor) -> bool:
    return isinstance(tensor, Pretended) or _was_plain(tensor)


def _submitting(submit: Callable[..., Any]) -> Callable[..., Any]:
    def submit_with_factories(pool: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        def run() -> Any:
            with _Factories():
                return function(*args, **kwargs)

        return submit(pool, run)

    return submit_with_factories


def _mapping(vmap: Callable[..., Any]) -> Callable[..., Any]:
    """`vmap` whose results are where its arguments are; by itself it makes plain tensors."""

    def pretended_vmap(function: Any, *options: Any, **named: Any) -> Any:
        mapped = vmap(function, *options, **named)

        def run(*args: Any) -> Any:
            places = {place_of(x) for x in args if isinstance(x, Tensor)}
            return _put_all(mapped(*args), places.pop())

        return run

    return pretended_vmap


def spread(model: Any) -> Any:
    """A model over both devices, with accelerate's hooks: the lookup and block 0 on FIRST.

    The unembedding is on SECOND, or on FIRST where it is tied to the lookup.
    """
    prefix = model.base_model_prefix
    places: dict[str, str | int | torch.device] = {}
    for name, part in getattr(model, prefix).named_children():
        if isinstance(part, nn.ModuleList):
            of_block = [FIRST, *[SECOND] * (len(part) - 1)]
            places |= {f"{prefix}.{name}.{i}": place for i, place in enumerate(of_block)}
        else:
            looks_up = isinstance(part, nn.Embedding)
            places[f"{prefix}.{name}"] = FIRST if looks_up else SECOND
    for name, _ in model.named_children():
        if name != prefix:
            places[name] = FIRST if model.config.tie_word_embeddings else SECOND
    return accelerate.dispatch_model(model, places, main_device=FIRST, force_hooks=True)


def move(model: nn.Module, place: torch.device = FIRST) -> Any:
    """A model's parameters and buffers put at a place, in place; ties stay ties."""
    moved: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in moved:
                there = put(parameter.detach(), place)
                moved[id(parameter)] = nn.Parameter(there, parameter.requires_grad)
            module.register_parameter(name, moved[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = put(buffer, place)
    return model
