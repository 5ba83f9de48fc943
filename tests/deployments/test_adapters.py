"""LoRA adapters by PEFT: merged, unmerged, on the head, on the lookup, or refused."""

from typing import Any

import pytest
import torch

import lens
from lens.errors import UnsupportedModelStateError
from tests.checkpoint.tiny import BY_NAME
from tests.deployments.reading import exact, package

package("peft")
pytestmark = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


def _adapted(name: str, tied: bool, **options: Any) -> Any:
    import peft

    options.setdefault("target_modules", "all-linear")
    # init_lora_weights=False: an adapter that starts as the identity would hide a mistake.
    config = peft.LoraConfig(r=4, init_lora_weights=False, **options)
    return peft.get_peft_model(BY_NAME[name].build(tied=tied), config).eval()


@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
def test_an_unmerged_adapter_is_read_with_its_part(name: str, tied: bool) -> None:
    targets = {"llama": "all-linear", "bert": ["query"], "t5": ["q"]}[name]
    model = _adapted(name, tied, target_modules=targets)
    point = exact(model, run=model)
    assert point.readout.kind == "direct"
    with_adapter = point.logit_lens([5, 6, 7], source=[5] if point.seq2seq else None)
    with model.disable_adapter():
        without = point.logit_lens([5, 6, 7], source=[5] if point.seq2seq else None)
    assert (with_adapter.entropy_bits[-1] != without.entropy_bits[-1]).any()


def test_a_merged_adapter_is_read_as_the_merged_model(tied: bool) -> None:
    model = _adapted("llama", tied)
    model.merge_adapter()
    exact(model, run=model)
    exact(_adapted("llama", tied).merge_and_unload())


def test_a_head_saved_beside_the_adapter_unties_the_model_and_is_the_one_read(tied: bool) -> None:
    model = _adapted("llama", tied, modules_to_save=["lm_head"])
    saved = model.base_model.model.lm_head.modules_to_save["default"].weight
    with torch.no_grad():
        saved.add_(0.1 * torch.randn_like(saved))
    point = exact(model, run=model)
    assert point.W_U is saved
    assert not point.tie.is_tied


def test_an_adapter_on_the_head_is_read_by_replay(tied: bool) -> None:
    model = _adapted("llama", tied, target_modules=["q_proj", "lm_head"])
    point = exact(model, run=model)
    assert point.readout.kind == "replay"
    assert "joins 2 paths" in str(point.summary().why_not_direct)


def test_an_adapter_on_the_lookup_alone_is_told_beside_the_tie(tied: bool) -> None:
    model = _adapted("llama", tied, target_modules=["embed_tokens"])
    point = exact(model, run=model)
    layer = model.base_model.model.model.embed_tokens
    a, b = layer.lora_embedding_A["default"], layer.lora_embedding_B["default"]
    most = float((b @ a * layer.scaling["default"]).detach().abs().max())
    told = [sentence for sentence in point.tie.contradictions if "matrix in use" in sentence]
    assert len(told) == (1 if tied else 0)
    assert all(f"max |difference| {most:.3g}" in sentence for sentence in told)
    with pytest.raises(UnsupportedModelStateError, match="adapter acts on the lookup"):
        point.logit_lens([5, 6, 7], lens="input")
    # Switched off, or merged, there is one matrix in use, and it is the parameter.
    with model.disable_adapter():
        assert not any("in use" in one for one in lens.load(model).tie.contradictions)
    merged = _adapted("llama", tied, target_modules=["embed_tokens"])
    merged.merge_adapter()
    assert not any("in use" in one for one in lens.load(merged).tie.contradictions)


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_a_magnitude_beside_the_adapter_is_in_the_difference(target: str, tied: bool) -> None:
    model = _adapted("llama", tied, target_modules=[target], use_dora=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                parameter.mul_(1.5)
        lookup = model.get_input_embeddings()(torch.arange(160))
        head = model.get_output_embeddings()
        unembedding = head(torch.eye(64)).T
    most = float((lookup - unembedding).abs().max())
    told = [s for s in exact(model, run=model).tie.contradictions if "matrix in use" in s]
    assert len(told) == (1 if tied else 0)
    assert all(f"max |difference| {most:.3g}" in sentence for sentence in told)


def test_learned_tokens_before_the_prompt_are_refused(tied: bool) -> None:
    import peft

    config = peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    model = peft.get_peft_model(BY_NAME["llama"].build(tied=tied), config).eval()
    with pytest.raises(UnsupportedModelStateError, match="learned tokens before the prompt"):
        lens.load(model)
