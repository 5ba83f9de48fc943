"""Was a model changed after it was loaded, so that what was proved then holds no longer?

Numbers that change in place (training, `half`) are read as they are. But a head, a norm, a hook, an
adapter or a constant that was exchanged is not in a readout that was taken apart before.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lens.checkpoint.proof import Witness, same_numbers
from lens.checkpoint.readout import Readout
from lens.checkpoint.replay import ReplayReadout
from lens.checkpoint.trunk import Trunk

_PLAIN = (bool, int, float, str, type(None))
_PASSING = frozenset({"training"})
"""Attributes that say nothing about what a module computes in a reading."""

Marks = tuple[Any, ...]


def marks(model: Any, trunk: Trunk) -> Marks:
    """What tells a change of the model's tail and tables: identities, hooks and plain attributes.

    Of all modules but those of blocks and of an encoder, whose states are captured anew each time.
    """
    return tuple(_of_config(model)) + tuple(
        mark for module in _outside(model, trunk) for mark in _of_module(module, module is model)
    )


def is_still_read(replay: ReplayReadout, readout: Readout, witness: Witness) -> bool:
    """Whether the readout gives what the model makes of a state now, bit for bit."""
    try:
        own = replay.logits(witness.random_state, witness.inputs)
        given = readout.logits(witness.random_state)
    except (RuntimeError, IndexError, ValueError, TypeError):
        # A lookup or a head of another size does not even run.
        return False
    if given.shape != own.shape or own.shape[-1] != replay.d_vocab:
        return False
    own = own.to(given.device)
    # Rows that were masked on purpose have no probability.
    return same_numbers(torch.where(given.isneginf(), own, given), own)


def _outside(model: Any, trunk: Trunk) -> Iterator[nn.Module]:
    left_out = {id(block) for block in trunk.distinct_blocks}
    encoder = model.get_encoder() if hasattr(model, "get_encoder") else None
    if isinstance(encoder, nn.Module) and encoder is not model:
        left_out.add(id(encoder))
    waiting: list[nn.Module] = [model]
    seen: set[int] = set()
    while waiting:
        module = waiting.pop()
        if id(module) in seen or id(module) in left_out:
            continue
        seen.add(id(module))
        yield module
        waiting += [one for one in module._modules.values() if one is not None]


def _of_module(module: nn.Module, is_root: bool) -> Iterator[Any]:
    yield id(module)
    yield tuple(map(id, module._parameters.values()))
    yield tuple(map(id, module._buffers.values()))
    # A hook's number is never given twice.
    yield tuple(module._forward_hooks)
    # Edits and captures stand before the forward of the whole model.
    yield () if is_root else tuple(module._forward_pre_hooks)
    own = vars(module)
    yield id(own["forward"]) if "forward" in own else None
    yield tuple(
        (name, tuple(value) if isinstance(value, list) else value)
        for name, value in own.items()
        if name not in _PASSING and _is_plain(value)
    )


def _of_config(model: Any) -> Iterator[Any]:
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", lambda: None)()
    for one in (config, text):
        if one is not None:
            yield tuple((k, v) for k, v in vars(one).items() if isinstance(v, _PLAIN))


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(value) < 8 and all(isinstance(one, _PLAIN) for one in value)
    return isinstance(value, _PLAIN)
