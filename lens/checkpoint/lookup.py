"""The lookup of token ids: its scale, measured, and how many positions it takes."""

from typing import Any

import torch
from torch import Tensor, nn

from lens.checkpoint.proof import Proved


def context_length(model: Any) -> int | None:
    """Longest prompt that the position scheme takes: the config's number or the learned rows."""
    config = model.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    limits = [getattr(config, "max_position_embeddings", None)]
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and "position" in name.rsplit(".", 1)[-1]:
            # RoBERTa counts positions from padding_idx + 1, so that many rows are never reached.
            taken = 0 if module.padding_idx is None else module.padding_idx + 1
            limits.append(module.num_embeddings - taken)
    known = [n for n in limits if isinstance(n, int) and n > 0]
    return min(known, default=None)


def lookup_scale(proved: Proved, w_e: Tensor | None) -> float | None:
    """Two tokens at one position: what is added there cancels, what multiplies the lookup stays."""
    state = proved.witness.first_state
    if w_e is None or w_e.is_meta or w_e.shape[-1] != state.shape[-1]:
        return None
    ids = proved.witness.inputs.ids.to(w_e.device)
    rows = (w_e[ids[0]] - w_e[ids[1]]).detach().double().cpu()
    moved = (state[0] - state[1]).double().cpu()
    scale = float((rows * moved).sum() / (rows * rows).sum().clamp_min(1e-300))
    misfit = float((moved - scale * rows).norm() / moved.norm().clamp_min(1e-300))
    # bf16 rounds the factor and the product to 8 bits each.
    return scale if misfit < (1e-3 if state.dtype == torch.float32 else 2e-2) else None
