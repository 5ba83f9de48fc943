"""What PEFT's low-rank adapters add to the embedding and the unembedding as they are used."""

from typing import Any

import torch
from torch import Tensor


def added_by_adapters(model: Any, what: str) -> Tensor | None:
    """What active, unmerged adapters add to the "input" or "output" embeddings [d_vocab, d].

    None where none acts: the matrix in use is then the parameter itself.
    """
    module = _embeddings(model, what)
    delta_of = getattr(module, "get_delta_weight", None)
    if delta_of is None or module.merged or module.disable_adapters:
        return None
    active = [name for name in module.active_adapters if _holds(module, name)]
    if any(getattr(module, "use_dora", {}).get(name) for name in active):
        return _in_use(module, what) - module.weight.detach()
    with torch.no_grad():
        parts = [delta_of(name) for name in active]
    return torch.stack(parts).sum(0) if parts and not parts[0].is_meta else None


def wrapped_by_peft(model: Any, what: str) -> str | None:
    """The class of PEFT's that stands around the "input" or "output" embeddings, if any."""
    module = _embeddings(model, what)
    return type(module).__name__ if type(module).__module__.split(".")[0] == "peft" else None


def _in_use(module: Any, what: str) -> Tensor:
    """The matrix as it acts, where a magnitude of each row stands beside what is added (DoRA)."""
    weight = module.weight
    with torch.no_grad():
        if what == "input":
            return module(torch.arange(weight.shape[0], device=weight.device))
        eye = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
        return (module(eye) - module(torch.zeros_like(eye[:1]))).T


def _holds(module: Any, name: str) -> bool:
    held = {*getattr(module, "lora_A", ()), *getattr(module, "lora_embedding_A", ())}
    return name in held


def _embeddings(model: Any, what: str) -> Any:
    get = getattr(model, f"get_{what}_embeddings", None)
    return get() if get is not None else None
