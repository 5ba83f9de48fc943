"""What the generic rule cannot know: fields of single model types that must fit together.

`_from` holds fields that stand already when the default config is made.
"""

from typing import Any

_MAMBA_HEADS = {"mamba_n_heads": 8, "mamba_d_head": 16}
_GEMMA3N = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "intermediate_size": [96] * 4,
    "activation_sparsity_pattern": [0.95, 0.0, 0.95, 0.0],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
}
_QWEN4_EXP = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "ngram_vocab_size_base": 97,
    "ple_layer_ids": [1],
    "eos_token_id": 2,
    "ple_embed_dim": 64,
}
_VIBEVOICE = {"num_filters": 4, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]}
_REFORMER = {
    "axial_pos_embds_dim": [16, 48],
    "axial_pos_shape": [8, 8],
    "local_attn_chunk_length": 16,
    "lsh_attn_chunk_length": 16,
}
_ASSISTANT = {
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}

OVERRIDES: dict[Any, dict[str, Any]] = {
    "bamba": {**_MAMBA_HEADS, "attn_layer_indices": [1]},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128},
    "granitemoehybrid": {
        **_MAMBA_HEADS,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
    },
    "deepseek_v2": {
        "topk_method": "group_limited_greedy",
        "topk_group": 1,
        "n_group": 1,
        "num_experts_per_tok": 2,
    },
    "longcat_flash": {"head_dim": 8},
    "mobilebert": {"intra_bottleneck_size": 32, "true_hidden_size": 32, "embedding_size": 64},
    "blt": {"encoder_hash_byte_group_vocab": 97},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "logit_scale": 0.25,
    },
    "dbrx": {"attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "rope_theta": 10000.0}},
    "dory": {
        "num_hidden_layers": 6,
        "n_input_layers": 2,
        "n_recurrent_layers": 2,
        "n_output_layers": 2,
        "layer_types": [
            "sliding_attention",
            "mlp",
            "full_attention",
            "mlp",
            "full_attention",
            "mlp",
        ],
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma3n_text": _GEMMA3N,
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    ("reformer", "causal"): {**_REFORMER, "is_decoder": True},
    "reformer": _REFORMER,
    "zamba2": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "mamba_headdim": 16,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
    },
    "zamba": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"],
    },
    "esm": {
        "vocab_size": 160,
        "pad_token_id": 1,
        "mask_token_id": 32,
        "position_embedding_type": "rotary",
    },
    "squeezebert": {"embedding_size": 64, "intermediate_groups": 4, "output_groups": 4},
    "granite_speech": {"encoder_config": {"context_size": 32, "max_pos_emb": 64}},
    "granite_speech_plus": {"encoder_config": {"context_size": 32, "max_pos_emb": 64}},
    "nemo_speechlm": {
        "audio_config": {
            "diarization_config": {
                "chunk_length": 16,
                "chunk_right_context": 4,
                "chunk_left_context": 4,
            }
        }
    },
    "vibevoice_asr": {
        "acoustic_tokenizer_chunk_size": 16,
        "acoustic_tokenizer_encoder_config": _VIBEVOICE,
        "semantic_tokenizer_encoder_config": _VIBEVOICE,
    },
    "dots3_note_text": {"head_dim": 24},
    "dots3_note": {
        "text_config": {"head_dim": 24},
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "gemma4_assistant": {
        "_from": {"text_config": {**_ASSISTANT, "num_kv_shared_layers": 30}},
        "text_config": {**_ASSISTANT, "num_kv_shared_layers": 3},
    },
    "gemma4_unified_assistant": {"text_config": {"num_kv_shared_layers": 3}},
    "qwen4_exp_text": _QWEN4_EXP,
    "qwen4_exp": {"text_config": _QWEN4_EXP},
}
