"""Torch as it is when a process starts, whatever surrounds a call.

Inside of autocast, of inference mode or under another default device, the same operations give
other numbers, other devices or no gradient. What lens computes does not depend on them.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


@contextmanager
def plain_torch() -> Iterator[None]:
    """Within: no autocast, no inference mode, new tensors on the CPU. After: as it was."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        for device in ("cpu", _accelerator()):
            if device is not None and torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield


def in_plain_torch(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function, run within `plain_torch`."""

    @wraps(function)
    def _plain(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with plain_torch():
            return function(*args, **kwargs)

    return _plain


def _accelerator() -> str | None:
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type
