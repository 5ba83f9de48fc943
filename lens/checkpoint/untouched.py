"""Run modules of the user's and leave them as they were."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock, RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from lens.checkpoint.plain_torch import plain_torch

_LOCKS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_OF_LOCKS = Lock()


@contextmanager
def untouched(*roots: nn.Module) -> Iterator[None]:
    """`at_rest`, and one thread at a time: hooks and stubs on a module are another's too."""
    with ExitStack() as stack:
        for root in roots:
            with _OF_LOCKS:
                lock = _LOCKS.setdefault(root, RLock())
            stack.enter_context(lock)
        stack.enter_context(at_rest(*roots))
        yield


@contextmanager
def at_rest(*roots: nn.Module) -> Iterator[None]:
    """Within: eval mode and no gradient. After: every module's own training flag, even on error.

    And its kind of attention: BigBird takes full attention at the first short prompt, and keeps it.
    """
    modules = [module for root in roots for module in root.modules()]
    training = [module for module in modules if module.training]
    switched = [
        (m, m.attention_type, dict(m._modules))
        for m in modules
        if hasattr(type(m), "set_attention_type")
    ]
    for module in training:
        module.training = False
    try:
        with plain_torch(), torch.no_grad():
            yield
    finally:
        for module, kind, parts in switched:
            module.attention_type = kind
            module._modules.update(parts)
        for module in training:
            module.training = True
