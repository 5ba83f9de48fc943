"""A default config of any architecture made tiny, by the names of its fields alone."""

import re
from typing import Any

D_VOCAB, D_MODEL, N_LAYERS = 160, 64, 3

# First match wins. Numbers fit together: 4 heads of 16 make 64, two experts of four are chosen.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"vocab_size|vocab_size_", D_VOCAB),
    (r"num_labels", 2),
    (r"max_2d_position|max_position|n_positions|n_ctx|max_seq_len|_positions$", 64),
    (r"context_length|model_max_length|max_pos_emb", 64),
    (r"experts_per_tok|moe_k$|moe_topk|num_selected_experts", 2),
    (r"^n_group$|topk_group|num_expert_group|^n_groups$|mamba_n_groups|mamba_ngroups", 1),
    (r"n_shared_experts|num_shared_experts", 1),
    (r"num_.*experts$|n_routed_experts|moe_num_experts|zero_expert_num", 4),
    (r"qk_rope_head_dim", 8),
    (r"qk_head_dim", 24),
    (r"(head_dim|dim_head|d_head|headdim|d_kv|kv_channels|head_size|mamba_d_head)$", 16),
    (r"num_key_value_heads$|kv_heads$|num_query_groups", 2),
    (r"linear_num_key_heads", 2),
    (r"heads?$", 4),
    (r"rank$", 16),
    (
        r"intermediate_size|ffn_(hidden|dim)|ffn$|d_ff|^dff$|dim_ff|mlp_dim|^d_inner$|feed_forward_size|^n_inner$",
        96,
    ),
    (r"hidden_size|d_model|n_embd|^dim$|emb(ed)?_(dim|size)$|embedding_(size|dim)$", D_MODEL),
    (r"word_embed_proj_dim|hidden_dim$|lru_width|prediction_head_size|d_latents", D_MODEL),
    (r"state(_size|_dim)?$|d_state$", 8),
    (r"rotary_dim", 8),
    (r"chunk_size|window|local_attention|chunk_length|block_size", 8),
    (r"index_topk", 4),
    (r"image_size|crop_size", 32),
    (r"patch_size", 8),
    (r"num_mel_bins|feature_size|input_feat_size", 16),
)
_LAYERS = re.compile(
    r"(^|_)(n_layers?|(num_)?(hidden_|encoder_|decoder_)?layers|depth|num_blocks)$"
)
_OWN_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_blocks", "depth")
_NOT_LAYERS = frozenset({"num_kv_shared_layers", "max_window_layers"})
# Scales and caps that are 1 or too wide to be seen at this size.
_SCALES: dict[str, float] = {
    "final_logit_softcapping": 0.5,
    "logits_soft_cap": 0.5,
    "output_logit_soft_cap": 0.5,
    "logits_scaling": 8.0,
    "logit_scale": 0.25,
    "lm_head_multiplier": 0.25,
    "logits_mup_width_multiplier": 4.0,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "dim_model_base": 16,
}
_SKIP = frozenset({"model_type", "transformers_version", "architectures", "dtype", "_name_or_path"})
_TOKENS = {"pad": 0, "bos": 1, "eos": 2, "decoder_start": 2, "sep": 3, "cls": 4, "mask": 5}


def shrunk(default: dict[str, Any]) -> dict[str, Any]:
    """The fields of a default config (as `to_dict` gives them) that must change to be tiny."""
    kept = _kept_layers(default)
    small: dict[str, Any] = {}
    for name, value in default.items():
        if name in _SKIP:
            continue
        new = _field(name, value, kept, default)
        if new is not value:
            small[name] = new
    return small


def _field(name: str, value: Any, kept: tuple[int, ...], beside: dict[str, Any]) -> Any:
    if name == "per_layer_config" and value:
        at = {old: new for new, old in enumerate(kept)}
        return {f"{at[int(k)]:02d}": shrunk(v) for k, v in value.items() if int(k) in at}
    if isinstance(value, dict) and "model_type" in value:
        return {**value, **shrunk(value)}
    if name.endswith(("token_id", "token_index")) and isinstance(value, int | list):
        return _token(name)
    if name in _SCALES and not isinstance(value, bool):
        return _SCALES[name]
    n_old = _n_layers(beside)
    if isinstance(value, list | tuple) and n_old is not None and len(value) == n_old:
        small = [value[i] for i in kept]
        return [_size(name, v) if type(v) is int and v > 2 else v for v in small]
    if type(value) is int and value > 2:
        if name.endswith("key_value_heads") and value == beside.get("num_attention_heads"):
            return 4
        if _LAYERS.search(name) and name not in _NOT_LAYERS:
            return len(kept) if name in _OWN_LAYERS else min(N_LAYERS, value)
        rope = beside.get("qk_rope_head_dim")
        if name == "head_dim" and value == rope:
            return _size("qk_rope_head_dim", value)
        return _size(name, value)
    return value


def _size(name: str, value: int) -> int:
    for pattern, size in _SIZES:
        if re.search(pattern, name):
            return size if size != value else value
    return value


def _token(name: str) -> int:
    stem = name.removesuffix("_id").removesuffix("_index").removesuffix("_token")
    if stem in _TOKENS:
        return _TOKENS[stem]
    # Other special tokens (image, audio, ...) lie apart from each other at the vocabulary's end.
    return D_VOCAB - 1 - sum(map(ord, stem)) % 20


def _n_layers(config: dict[str, Any]) -> int | None:
    return next((config[name] for name in _OWN_LAYERS if type(config.get(name)) is int), None)


def _kept_layers(config: dict[str, Any]) -> tuple[int, ...]:
    """Old indices of the layers that stay: one of each kind, in order, and at least N_LAYERS."""
    n_old = _n_layers(config)
    if n_old is None:
        return tuple(range(N_LAYERS))
    aligned = [
        v for v in config.values() if isinstance(v, list | tuple) and len(v) == n_old > N_LAYERS
    ]
    special = config.get("per_layer_config") or {}
    kinds: dict[str, int] = {}
    for index in range(n_old):
        kind = repr(([column[index] for column in aligned], special.get(f"{index:02d}")))
        kinds.setdefault(kind, index)
    kept = list(kinds.values())[:6]
    more = (i for i in range(n_old) if i not in kept)
    kept += [next(more) for _ in range(min(N_LAYERS, n_old) - len(kept))]
    return tuple(sorted(kept))
