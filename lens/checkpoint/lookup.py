"""The lookup of token ids: its scale, measured, and how many positions it takes."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lens.checkpoint.listening import listening
from lens.checkpoint.proof import Proved


def context_length(model: Any, run: Callable[[], Any]) -> int | None:
    """Longest prompt that the position scheme takes: the config's number or the learned rows.

    Of the embeddings of positions those count that `run`, a forward on text, looks up, and not the
    encoder's: a tower for images has positions of its own.
    """
    encoder = _encoder_of(model)
    aside = set() if encoder is None else set(encoder.modules())
    config = model.config
    config = config.get_text_config(decoder=True) if encoder is not None else _of_text(config)
    learned = {m: n for m, n in _learned_rows(model).items() if m not in aside}
    return _least(config, learned, run)


def source_length(model: Any, run: Callable[[], Any]) -> int | None:
    """Longest text that the encoder of an encoder-decoder takes, None where nothing limits it."""
    encoder = _encoder_of(model)
    if encoder is None:
        return None
    return _least(getattr(encoder, "config", None), _learned_rows(encoder), run)


def _least(config: Any, learned: dict[nn.Module, int], run: Callable[[], Any]) -> int | None:
    told = [getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len")]
    if len({*learned.values(), *told[:1]}) > 1:
        heard = _called(learned, run)
        learned = {m: n for m, n in learned.items() if m in heard}
    known = [n for n in (*told, *learned.values()) if isinstance(n, int) and n > 0]
    return min(known, default=None)


def _learned_rows(model: nn.Module) -> dict[nn.Module, int]:
    """Embeddings of positions, and for how many positions each has rows."""
    found: dict[nn.Module, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and "position" in name.rsplit(".", 1)[-1]:
            # RoBERTa counts positions from padding_idx + 1, so that many rows are never reached.
            taken = 0 if module.padding_idx is None else module.padding_idx + 1
            found[module] = module.num_embeddings - taken
    return found


def _called(modules: Iterable[nn.Module], run: Callable[[], Any]) -> set[nn.Module]:
    heard: set[nn.Module] = set()

    def _hear(module: nn.Module, *_: Any) -> None:
        heard.add(module)

    with listening(modules, _hear, lambda *_: None, past_hooks=True):
        run()
    return heard


def _encoder_of(model: Any) -> Any:
    if not getattr(model.config, "is_encoder_decoder", False):
        return None
    return model.get_encoder() if hasattr(model, "get_encoder") else None


def _of_text(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


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
