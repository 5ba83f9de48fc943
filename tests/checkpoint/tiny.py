"""Tiny random models of many architectures, with no norm, bias, scale or cap at a trivial value."""

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

D_VOCAB, D_MODEL, N_LAYERS = 160, 64, 3

_CAUSAL = {
    "vocab_size": D_VOCAB,
    "hidden_size": D_MODEL,
    "intermediate_size": 96,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_CAUSAL, "num_key_value_heads": 2, "head_dim": 16}
_SEQ2SEQ = {
    "vocab_size": D_VOCAB,
    "d_model": D_MODEL,
    "encoder_layers": 2,
    "decoder_layers": N_LAYERS,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
_T5 = {
    "vocab_size": D_VOCAB,
    "d_model": D_MODEL,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_decoder_layers": N_LAYERS,
    "num_heads": 4,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}


@dataclass(frozen=True)
class Tiny:
    """One architecture at a toy size; `steps` are what its direct readout must consist of."""

    name: str
    model_type: str
    model_class: str
    config: dict[str, Any] = field(default_factory=dict)
    steps: str | None = None

    def build(self, *, tied: bool | None = None) -> Any:
        """A random model, perturbed; `tied` overrides the config's default."""
        options = dict(self.config)
        if tied is not None:
            options["tie_word_embeddings"] = tied
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(self.model_type, **options)
        model = getattr(transformers, self.model_class)(config).eval()
        perturb(model)
        return model


def perturb(model: torch.nn.Module, *, seed: int = 1) -> None:
    """Move every gain and bias off its trivial value: at unit gain a doubled norm is invisible."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(0.2 * noise)
            elif float(parameter.float().std()) < 0.05:
                parameter.add_(0.05 * noise)
        for name, buffer in model.named_buffers():
            if "final_logits_bias" in name:
                buffer.add_(torch.randn(buffer.shape, generator=generator))


def _llama_like(name: str, model_class: str, steps: str, **more: Any) -> Tiny:
    return Tiny(name, name, model_class, {**_GROUPED, **more}, steps)


TINY: tuple[Tiny, ...] = (
    Tiny("gpt2", "gpt2", "GPT2LMHeadModel", _CAUSAL, "LayerNorm -> W_U"),
    Tiny(
        "gpt_neo",
        "gpt_neo",
        "GPTNeoForCausalLM",
        {**_CAUSAL, "attention_types": [[["global", "local", "global"], 1]]},
        "LayerNorm -> W_U",
    ),
    Tiny("gptj", "gptj", "GPTJForCausalLM", {**_CAUSAL, "rotary_dim": 8}, "LayerNorm -> W_U + b_U"),
    Tiny(
        "codegen",
        "codegen",
        "CodeGenForCausalLM",
        {**_CAUSAL, "rotary_dim": 8, "n_positions": 64, "n_ctx": 64},
        "LayerNorm -> W_U + b_U",
    ),
    Tiny("gpt_neox", "gpt_neox", "GPTNeoXForCausalLM", _CAUSAL, "LayerNorm -> W_U"),
    Tiny("phi", "phi", "PhiForCausalLM", _CAUSAL, "LayerNorm -> W_U + b_U"),
    _llama_like("llama", "LlamaForCausalLM", "LlamaRMSNorm -> W_U"),
    _llama_like("mistral", "MistralForCausalLM", "MistralRMSNorm -> W_U"),
    _llama_like("qwen2", "Qwen2ForCausalLM", "Qwen2RMSNorm -> W_U"),
    _llama_like("qwen3", "Qwen3ForCausalLM", "Qwen3RMSNorm -> W_U"),
    _llama_like("gemma", "GemmaForCausalLM", "GemmaRMSNorm -> W_U"),
    _llama_like(
        "gemma2",
        "Gemma2ForCausalLM",
        "Gemma2RMSNorm -> W_U -> div 0.5 -> tanh -> mul 0.5",
        final_logit_softcapping=0.5,
    ),
    _llama_like("gemma3_text", "Gemma3ForCausalLM", "Gemma3RMSNorm -> W_U"),
    _llama_like(
        "cohere", "CohereForCausalLM", "CohereLayerNorm -> W_U -> mul 0.25", logit_scale=0.25
    ),
    _llama_like(
        "granite",
        "GraniteForCausalLM",
        "GraniteRMSNorm -> W_U -> div 8",
        logits_scaling=8.0,
        embedding_multiplier=12.0,
    ),
    _llama_like("olmo", "OlmoForCausalLM", "OlmoLayerNorm -> W_U"),
    _llama_like("olmo2", "Olmo2ForCausalLM", "Olmo2RMSNorm -> W_U"),
    _llama_like("stablelm", "StableLmForCausalLM", "LayerNorm -> W_U"),
    Tiny(
        "minicpm3",
        "minicpm3",
        "MiniCPM3ForCausalLM",
        {
            **_CAUSAL,
            "num_key_value_heads": 4,
            "dim_model_base": 16,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
        },
        "MiniCPM3RMSNorm -> div 4 -> W_U",
    ),
    _llama_like(
        "nanochat",
        "NanoChatForCausalLM",
        "NanoChatRMSNorm -> W_U -> div 0.5 -> tanh -> mul 0.5",
        final_logit_softcapping=0.5,
    ),
    Tiny(
        "opt", "opt", "OPTForCausalLM", {**_CAUSAL, "word_embed_proj_dim": D_MODEL, "ffn_dim": 96}
    ),
    Tiny(
        "opt_project_out",
        "opt",
        "OPTForCausalLM",
        {
            **_CAUSAL,
            "word_embed_proj_dim": 32,
            "ffn_dim": 96,
            "do_layer_norm_before": False,
        },
        "Linear -> W_U",
    ),
    Tiny(
        "opt_without_final_norm",
        "opt",
        "OPTForCausalLM",
        {
            **_CAUSAL,
            "word_embed_proj_dim": D_MODEL,
            "ffn_dim": 96,
            "_remove_final_layer_norm": True,
        },
        "W_U",
    ),
    Tiny("bloom", "bloom", "BloomForCausalLM", _CAUSAL, "LayerNorm -> W_U"),
    Tiny("falcon", "falcon", "FalconForCausalLM", _CAUSAL, "LayerNorm -> W_U"),
    Tiny(
        "mpt",
        "mpt",
        "MptForCausalLM",
        {
            "vocab_size": D_VOCAB,
            "d_model": D_MODEL,
            "n_layers": N_LAYERS,
            "n_heads": 4,
            "max_seq_len": 64,
            "logit_scale": 0.3,
        },
        "LayerNorm -> W_U",
    ),
    Tiny("mamba", "mamba", "MambaForCausalLM", _CAUSAL, "MambaRMSNorm -> W_U"),
    Tiny(
        "rwkv",
        "rwkv",
        "RwkvForCausalLM",
        {**_CAUSAL, "attention_hidden_size": D_MODEL, "context_length": 64},
        "LayerNorm -> W_U",
    ),
    Tiny("xglm", "xglm", "XGLMForCausalLM", {**_CAUSAL, "ffn_dim": 96}, "LayerNorm -> W_U"),
    Tiny("ctrl", "ctrl", "CTRLLMHeadModel", {**_CAUSAL, "dff": 96}, "LayerNorm -> W_U + b_U"),
    Tiny("bert", "bert", "BertForMaskedLM", _CAUSAL, "BertPredictionHeadTransform -> W_U + b_U"),
    Tiny("roberta", "roberta", "RobertaForMaskedLM", _CAUSAL),
    Tiny("albert", "albert", "AlbertForMaskedLM", {**_CAUSAL, "embedding_size": 32}),
    Tiny("t5", "t5", "T5ForConditionalGeneration", _T5),
    Tiny(
        "bart",
        "bart",
        "BartForConditionalGeneration",
        _SEQ2SEQ,
        f"W_U -> add [{D_VOCAB}]",
    ),
    Tiny("marian", "marian", "MarianMTModel", _SEQ2SEQ, f"W_U -> add [{D_VOCAB}]"),
)

BY_NAME = {tiny.name: tiny for tiny in TINY}
