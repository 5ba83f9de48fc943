"""Run modules of the user's and leave them as they were."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def untouched(*roots: nn.Module) -> Iterator[None]:
    """Within: eval mode and no gradient. After: every module's own training flag, even on error."""
    training = [module for root in roots for module in root.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
