"""A twin before its first step: the same trunk and W_E for every arm of a seed."""

import math
from typing import Any

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    PhiConfig,
    PreTrainedModel,
    StableLmConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from lens.study.arms import Arm
from lens.study.recipe import Recipe

INIT_STD = 0.02
OWN_U_SEED = 2**20
"""Added to a seed for the generator of an untied-own W_U, so that no later tensor shifts."""


def build(arm: Arm, recipe: Recipe, seed: int) -> PreTrainedModel:
    """The model of an arm at step 0, on the CPU in float32.

    Trunk and W_E depend on the seed alone, whatever the tie; a copied W_U makes the same function
    as the tied model's. The global random state stays as it was.
    """
    tied = _drawn(arm, recipe, seed, tied=True)
    if arm.lookup == "sqrt(d)":
        with torch.no_grad():
            _matrix(tied.get_input_embeddings()).mul_(1 / (INIT_STD * math.sqrt(recipe.d_model)))
    if arm.tied:
        return tied
    untied = _drawn(arm, recipe, seed, tied=False)
    untied.load_state_dict(tied.state_dict())
    if arm.start == "own":
        W_U = _matrix(untied.get_output_embeddings())
        generator = torch.Generator().manual_seed(OWN_U_SEED + seed)
        std = 1 / math.sqrt(recipe.d_model) if arm.lookup == "sqrt(d)" else INIT_STD
        with torch.no_grad():
            W_U.copy_(std * torch.randn(W_U.shape, generator=generator))
    return untied


def _drawn(arm: Arm, recipe: Recipe, seed: int, *, tied: bool) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config_of(arm, recipe, tied=tied), attn_implementation="sdpa", dtype=torch.float32
        )
    return model.train()


def config_of(arm: Arm, recipe: Recipe, *, tied: bool) -> Any:
    """The transformers configuration of an arm; no dropout, so that training draws nothing."""
    alike: dict[str, Any] = {
        "vocab_size": recipe.d_vocab,
        "tie_word_embeddings": tied,
        "initializer_range": INIT_STD,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "use_cache": False,
    }
    d_mlp = recipe.d_mlp
    if arm.matched:
        # An MLP of GPT-2 has 2 d_model d_mlp weights.
        d_mlp += round(recipe.d_vocab / (2 * recipe.n_layers))
    if arm.family == "gpt2":
        return GPT2Config(
            n_embd=recipe.d_model,
            n_layer=recipe.n_layers,
            n_head=recipe.n_heads,
            n_inner=d_mlp,
            n_positions=recipe.window_tokens,
            # The same curve as gelu_new, in one kernel.
            activation_function="gelu_pytorch_tanh",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **alike,
        )
    sizes: dict[str, Any] = {
        "hidden_size": recipe.d_model,
        "num_hidden_layers": recipe.n_layers,
        "num_attention_heads": recipe.n_heads,
        "num_key_value_heads": recipe.n_heads,
        "intermediate_size": d_mlp,
        "max_position_embeddings": recipe.window_tokens,
        "pad_token_id": None,
    }
    if arm.family == "granite":
        scale = math.sqrt(recipe.d_model) if arm.lookup == "sqrt(d)" else 1.0
        head = 1 / math.sqrt(recipe.d_model // recipe.n_heads)
        more: dict[str, Any] = {"embedding_multiplier": scale, "attention_multiplier": head}
        return GraniteConfig(**sizes, **alike, **more)
    classes = {"phi": PhiConfig, "stablelm": StableLmConfig, "llama": LlamaConfig}
    return classes[arm.family](**sizes, **alike)


def _matrix(module: Any) -> nn.Parameter:
    return module.weight


def matrices(model: PreTrainedModel) -> tuple[nn.Parameter, nn.Parameter]:
    """(W_E, W_U); the same parameter twice where the model is tied."""
    return _matrix(model.get_input_embeddings()), _matrix(model.get_output_embeddings())
