"""Models that are in memory already, in and out of the wrappers of other libraries."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from lens.checkpoint.load import _resolve, load
from lens.checkpoint.memory import unwrap
from lens.errors import UnsupportedArchitectureError, UnsupportedModelStateError
from tests.checkpoint import tiny_checkpoints as tiny


@pytest.fixture(scope="module")
def bridge_class() -> Any:
    from transformer_lens.model_bridge import TransformerBridge

    return TransformerBridge


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    """One from files: transformer_lens opens it again."""
    tiny.tokenizer().save_pretrained(tmp_path)
    return AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)


def _bridge(bridge_class: Any, tokenizer: Any) -> Any:
    return bridge_class.boot_transformers("gpt2", hf_model=tiny.gpt2(), tokenizer=tokenizer)


def test_a_bridge_is_read_by_the_model_inside_it(bridge_class: Any, tokenizer: Any) -> None:
    alone = tiny.logits(tiny.gpt2())
    bridge = _bridge(bridge_class, tokenizer)
    checkpoint = load(bridge)
    assert checkpoint.model is bridge.original_model
    assert checkpoint.origin.format == "transformer_lens"
    assert checkpoint.tie.is_tied
    assert torch.allclose(tiny.logits(checkpoint.model), alone, rtol=0, atol=1e-5)
    assert checkpoint.tokenizer is not None


def test_a_bridge_in_compatibility_mode_is_read_unless_its_weights_were_processed(
    bridge_class: Any, tokenizer: Any
) -> None:
    bridge = _bridge(bridge_class, tokenizer)
    bridge.enable_compatibility_mode(no_processing=True)
    assert load(bridge).tie.is_tied
    bridge = _bridge(bridge_class, tokenizer)
    bridge.enable_compatibility_mode()
    with pytest.raises(UnsupportedModelStateError, match="were processed"):
        load(bridge)


def test_a_bridge_that_cannot_say_whether_it_was_processed_is_refused(
    bridge_class: Any, tokenizer: Any
) -> None:
    bridge = _bridge(bridge_class, tokenizer)
    del bridge._weights_processed
    with pytest.raises(UnsupportedModelStateError, match="were processed"):
        unwrap(bridge)


def test_the_wrapper_of_torch_compile_is_set_aside() -> None:
    model = tiny.gpt2()
    compiled = torch.compile(model, backend="eager")
    checkpoint = load(compiled)
    assert checkpoint.model is model
    assert any("torch.compile" in note for note in checkpoint.origin.notes)


def _compile_all(model: Any) -> None:
    model.compile(backend="eager")


def _compile_a_block(model: Any) -> None:
    model.transformer.h[1].compile(backend="eager")


def _replace_a_block(model: Any) -> None:
    model.transformer.h[0] = torch.compile(model.transformer.h[0], backend="eager")


def _compile_a_forward(model: Any) -> None:
    block = model.transformer.h[0]
    block.forward = torch.compile(block.forward, backend="eager")


@pytest.mark.parametrize(
    "compile_it", [_compile_all, _compile_a_block, _replace_a_block, _compile_a_forward]
)
def test_a_model_compiled_in_place_is_refused(compile_it: Any) -> None:
    model = tiny.gpt2()
    unwrap(model)
    compile_it(model)
    with pytest.raises(UnsupportedModelStateError, match="compiled in place"):
        load(model)


def test_a_model_that_is_spread_over_copies_is_refused() -> None:
    with pytest.raises(UnsupportedModelStateError, match=r"its \.module"):
        load(torch.nn.DataParallel(tiny.gpt2()))


def test_a_model_without_token_ids_is_refused() -> None:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    with pytest.raises(UnsupportedArchitectureError, match="token ids"):
        _resolve(ViTForImageClassification(config), tokenizer=tiny.tokenizer())


@pytest.mark.parametrize("source", [torch.nn.Linear(2, 2), 7, {"model": 1}, None])
def test_what_is_no_model_is_refused(source: Any) -> None:
    with pytest.raises(UnsupportedArchitectureError, match="no Hugging Face model"):
        load(source)


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_an_adapter_is_read_in_place() -> None:
    from peft import LoraConfig, PromptTuningConfig, get_peft_model

    adapted = get_peft_model(
        tiny.gpt2(), LoraConfig(target_modules=["c_attn"], init_lora_weights=False)
    ).eval()
    model, _, origin = _resolve(adapted)
    assert torch.equal(tiny.logits(model), tiny.logits(adapted))
    assert not torch.equal(tiny.logits(model), tiny.logits(tiny.gpt2()))
    assert any("PEFT" in note for note in origin.notes)
    prompted = get_peft_model(
        tiny.gpt2(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    with pytest.raises(UnsupportedModelStateError, match="before the prompt"):
        _resolve(prompted)
