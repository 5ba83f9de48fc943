"""Tiny models in every form that `lens.load` takes, written where a test says."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

D_VOCAB = 40
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def perturb(model: Any) -> Any:
    """Every parameter off its initial value: at unit gain a doubled norm cannot be seen."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def gpt2(*, tied: bool = True) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=D_VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=32,
        bos_token_id=1, eos_token_id=1, tie_word_embeddings=tied,
    )  # fmt: skip
    return perturb(GPT2LMHeadModel(config))


def llama(*, tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=D_VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=32, tie_word_embeddings=tied,
    )  # fmt: skip
    return perturb(LlamaForCausalLM(config))


def bert() -> BertForMaskedLM:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=D_VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=32,
    )  # fmt: skip
    return perturb(BertForMaskedLM(config))


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, one token for each small letter and the space; no merges."""
    vocabulary = {"<unk>": 0, "<s>": 1, "Ġ": 2} | {c: i + 3 for i, c in enumerate(LETTERS)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>")


def logits(model: Any) -> torch.Tensor:
    """Of one fixed prompt."""
    with torch.no_grad():
        return model(torch.tensor([[3, 9, 4, 20]])).logits


def save(model: Any, folder: Path, *, with_tokenizer: bool = True) -> Path:
    model.save_pretrained(folder)
    if with_tokenizer:
        tokenizer().save_pretrained(folder)
    return folder


def edit_weights(folder: Path, change: Any) -> None:
    """Let `change(dict of tensors)` alter the safetensors file of a folder in place."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def write_gguf(path: Path, *, tied: bool = True, with_tokenizer: bool = True) -> Path:
    """A Llama of two layers as GGUF, float32 with one Q8_0 matrix, as llama.cpp would write it."""
    import gguf

    d, heads, ff = 32, 2, 64
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(32)
    writer.add_embedding_length(d)
    writer.add_block_count(2)
    writer.add_feed_forward_length(ff)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_rope_dimension_count(d // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(D_VOCAB)
    if with_tokenizer:
        _write_gguf_tokenizer(writer)
    rng = np.random.default_rng(3)

    def add(name: str, *shape: int) -> None:
        values = rng.normal(0.1, 0.3, shape).astype(np.float32)
        if name == "token_embd.weight":
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)

    add("token_embd.weight", D_VOCAB, d)
    add("output_norm.weight", d)
    if not tied:
        add("output.weight", D_VOCAB, d)
    for i in range(2):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{i}.{name}.weight", d, d)
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{i}.{name}.weight", d)
        for name in ("ffn_gate", "ffn_up"):
            add(f"blk.{i}.{name}.weight", ff, d)
        add(f"blk.{i}.ffn_down.weight", d, ff)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_gguf_tokenizer(writer: Any) -> None:
    tokens = ["<unk>", "<s>", "Ġ", *LETTERS]
    tokens += [f"<pad{i}>" for i in range(D_VOCAB - len(tokens) - 1)] + ["ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (D_VOCAB - 2))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(1)
