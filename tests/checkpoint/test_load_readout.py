"""A part of the readout that the files lack, or that the class would drop, is never overlooked."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertModel, GPT2LMHeadModel, GPT2Model

from lens.checkpoint.load import _resolve, load
from lens.errors import IncompleteCheckpointError
from tests.checkpoint import tiny_checkpoints as tiny

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def untied(tmp_path: Path) -> Path:
    return tiny.save(tiny.gpt2(tied=False), tmp_path / "untied")


def test_an_unembedding_that_is_not_in_the_files_is_refused(untied: Path) -> None:
    assert not load(untied).tie.is_tied
    tiny.edit_weights(untied, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(IncompleteCheckpointError, match=r"the unembedding \(lm_head\.weight\)"):
        _resolve(untied)


def test_an_embedding_that_is_not_in_the_files_is_refused(untied: Path) -> None:
    tiny.edit_weights(untied, lambda tensors: tensors.pop("transformer.wte.weight"))
    with pytest.raises(IncompleteCheckpointError, match=r"the embedding \(transformer\.wte"):
        _resolve(untied)


def test_a_block_that_is_not_in_the_files_is_refused(untied: Path) -> None:
    tiny.edit_weights(untied, lambda tensors: tensors.pop("transformer.h.1.ln_2.bias"))
    with pytest.raises(IncompleteCheckpointError, match=r"1 weights, first transformer\.h\.1"):
        _resolve(untied)


def test_a_bare_model_is_read_where_its_unembedding_is_its_embedding(tmp_path: Path) -> None:
    whole = tiny.gpt2(tied=True)
    whole.transformer.save_pretrained(tmp_path)
    model, _, origin = _resolve(tmp_path)
    assert isinstance(model, GPT2LMHeadModel)
    assert torch.equal(tiny.logits(model), tiny.logits(whole))
    assert any("GPT2Model; read as GPT2LMHeadModel" in note for note in origin.notes)


@pytest.mark.parametrize("whole", [tiny.gpt2(tied=False), tiny.bert()], ids=["gpt2", "bert"])
def test_a_bare_model_is_refused_where_its_head_would_be_random(whole: Any, tmp_path: Path) -> None:
    whole.base_model.save_pretrained(tmp_path)
    assert isinstance(whole.base_model, GPT2Model | BertModel)
    with pytest.raises(IncompleteCheckpointError, match="would be random"):
        _resolve(tmp_path)


def test_a_dropped_output_bias_is_attached_and_used(untied: Path) -> None:
    bias = torch.linspace(-1, 1, tiny.D_VOCAB)
    without = tiny.logits(_resolve(untied)[0])
    tiny.edit_weights(untied, lambda tensors: tensors.update({"lm_head.bias": bias}))
    checkpoint = load(untied)
    with_bias = tiny.logits(checkpoint.model)
    assert not torch.equal(with_bias, without)
    # The product and the sum may be fused: one rounding of float32 at this size, and no more.
    assert torch.allclose(with_bias, without + bias, rtol=0, atol=1e-5)
    assert torch.equal(checkpoint.b_U, bias)
    assert any("attached to the unembedding" in note for note in checkpoint.origin.notes)


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("lm_head.bias", (tiny.D_VOCAB - 1,)),  # not of the size that fits
        ("lm_head.scales", (tiny.D_VOCAB, 1)),
        ("final_logits_bias", (1, tiny.D_VOCAB)),
        ("transformer.ln_f.scale", (16,)),
        ("transformer.wte.bias", (16,)),
    ],
)
def test_any_other_dropped_part_of_the_readout_is_refused(
    untied: Path, key: str, shape: tuple[int, ...]
) -> None:
    tiny.edit_weights(untied, lambda tensors: tensors.update({key: torch.ones(shape)}))
    with pytest.raises(IncompleteCheckpointError, match=key):
        _resolve(untied)


@pytest.mark.parametrize(
    ("key", "shape"), [("value_head.weight", (1, 16)), ("transformer.h.0.adapter.bias", (16,))]
)
def test_a_dropped_tensor_outside_the_readout_is_told(
    untied: Path, key: str, shape: tuple[int, ...]
) -> None:
    before = tiny.logits(_resolve(untied)[0])
    tiny.edit_weights(untied, lambda tensors: tensors.update({key: torch.ones(shape)}))
    model, _, origin = _resolve(untied)
    assert torch.equal(tiny.logits(model), before)
    assert any(key in note and "no part of its readout" in note for note in origin.notes)


def test_the_output_bias_of_a_trained_model_is_found(models_folder: Path) -> None:
    model, tokenizer, origin = _resolve(models_folder / "opennmt-lm")
    assert any("lm_head.bias" in note for note in origin.notes)
    ids = torch.tensor([tokenizer("</s> I would like to thank the President .")["input_ids"]])
    with torch.no_grad():
        whole = model(ids).logits
        model.lm_head.bias.zero_()
        lesser = model(ids).logits
    loss = torch.nn.functional.cross_entropy
    assert loss(whole[0, :-1], ids[0, 1:]) < loss(lesser[0, :-1], ids[0, 1:])
