"""A model that is changed after loading is read as it is now, or refused."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import nn

import lens
from lens.checkpoint import changes
from lens.checkpoint.checkpoint import Checkpoint
from lens.errors import ProvenanceError, UnsupportedModelStateError
from tests.checkpoint.test_exactness import checkpoint
from tests.checkpoint.tiny import BY_NAME

IDS = [5, 6, 7, 8, 9]


def own_entropy(model: Any) -> Any:
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0].double()
    return torch.distributions.Categorical(logits=logits).entropy().numpy() / np.log(2)


def assigned(model: Any) -> None:
    held = {k: 3 * v if "head" in k else v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(held, assign=True)


def tied_later(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def normed_otherwise(model: Any) -> None:
    model.model.norm = copy.deepcopy(model.model.norm)
    model.model.norm.weight.data.mul_(3)


def adapted(model: Any) -> None:
    config = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["lm_head"])
    peft.get_peft_model(model, config)


EXCHANGED: dict[str, Callable[[Any], Any]] = {
    "weights assigned": assigned,
    "vocabulary resized": lambda m: m.resize_token_embeddings(192),
    "vocabulary cut": lambda m: m.resize_token_embeddings(20),
    "tied later": tied_later,
    "a hook on the head": lambda m: m.lm_head.register_forward_hook(lambda *a: 3 * a[-1]),
    "another norm": normed_otherwise,
    "an adapter on the head": adapted,
    "the model's own forward": lambda m: m.register_forward_hook(
        lambda module, args, out: setattr(out, "logits", out.logits * 2)
    ),
}


@pytest.mark.parametrize("name", EXCHANGED)
def test_what_is_no_longer_the_models_own_is_refused(name: str) -> None:
    point = checkpoint(BY_NAME["llama"].build(tied=False))
    point.logit_lens(IDS)
    EXCHANGED[name](point.model)
    for read in (lambda: point.logit_lens(IDS), lambda: point.read(torch.ones(2, 64)), str):
        with pytest.raises(UnsupportedModelStateError, match="changed since it was loaded"):
            point.tie if read is str else read()  # type: ignore[call-arg]


def test_a_constant_of_the_config_is_seen() -> None:
    point = checkpoint(BY_NAME["gemma2"].build())
    point.model.config.final_logit_softcapping = 3.0
    with pytest.raises(UnsupportedModelStateError):
        point.logit_lens(IDS)


def test_an_adapter_that_is_switched_off_is_seen() -> None:
    config = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["lm_head"])
    model = peft.get_peft_model(BY_NAME["llama"].build(tied=False), config).eval()
    with model.disable_adapter():
        point = checkpoint(model)
        assert point.readout.kind == "direct"
        np.testing.assert_allclose(
            point.logit_lens(IDS).entropy_bits[-1], own_entropy(model), atol=1e-5
        )
    with pytest.raises(UnsupportedModelStateError):
        point.logit_lens(IDS)


KEPT: dict[str, Callable[[Any], Any]] = {
    "weights in place": lambda m: m.lm_head.weight.data.mul_(2),
    "a hook that looks": lambda m: m.lm_head.register_forward_hook(lambda *a: None),
    "a copy of the same norm": lambda m: setattr(m.model, "norm", m.model.norm),
    "a constant of no use here": lambda m: setattr(m.config, "final_logit_softcapping", 3.0),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_changes_nothing_is_read_as_it_is(name: str) -> None:
    point = checkpoint(BY_NAME["llama"].build(tied=False))
    KEPT[name](point.model)
    found = point.logit_lens(IDS)
    np.testing.assert_allclose(found.entropy_bits[-1], own_entropy(point.model), atol=1e-5)
    assert (found.kl_bits[-1] == 0).all()


def test_without_the_look_a_stale_readout_would_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    point = checkpoint(BY_NAME["llama"].build(tied=False))
    monkeypatch.setattr(changes, "marks", lambda *a: point._marks)
    assigned(point.model)
    found = point.logit_lens(IDS)
    assert np.abs(found.entropy_bits[-1] - own_entropy(point.model)).max() > 1e-3


def test_rows_that_were_masked_on_purpose_are_no_change() -> None:
    point = checkpoint(BY_NAME["llama"].build(tied=False))
    masked = copy.copy(point)
    masked.readout = point.readout.without([3])  # type: ignore[union-attr]
    point.model.lm_head.register_forward_hook(lambda *a: None)
    masked.require_as_loaded()
    point.model.lm_head.register_forward_hook(lambda *a: 3 * a[-1])
    with pytest.raises(UnsupportedModelStateError):
        masked.require_as_loaded()


def test_a_copy_of_a_checkpoint_is_read() -> None:
    point = checkpoint(BY_NAME["llama"].build())
    expected = point.logit_lens(IDS)
    for other in (copy.deepcopy(point), pickle.loads(pickle.dumps(point))):
        assert isinstance(other, Checkpoint)
        np.testing.assert_array_equal(other.logit_lens(IDS).kl_bits, expected.kl_bits)
        assert other.model_hash == point.model_hash
        assert other.tie.verdict == point.tie.verdict


def test_a_step_of_training_makes_another_model() -> None:
    point = checkpoint(BY_NAME["llama"].build())
    before, states = point.logit_lens(IDS), point.residual_states(IDS)
    assert point.model_hash == before.provenance.model_hash
    optimiser = torch.optim.SGD(point.model.parameters(), lr=1.0)
    point.model(torch.tensor([IDS]), labels=torch.tensor([IDS])).loss.backward()
    optimiser.step()
    after = point.logit_lens(IDS).provenance.model_hash
    assert after != before.provenance.model_hash
    assert after == checkpoint(point.model).model_hash
    with pytest.raises(ProvenanceError):
        point.read(states)


def test_a_buffer_counts_too() -> None:
    model = BY_NAME["llama"].build()
    model.lm_head.register_buffer("kept", torch.zeros(3))
    point = checkpoint(model)
    before = point.model_hash
    model.lm_head.kept.add_(1)
    assert point.model_hash != before
    assert isinstance(model.lm_head, nn.Module)


def test_the_tie_is_read_anew_where_only_the_lookup_was_exchanged() -> None:
    point = checkpoint(BY_NAME["llama"].build(tied=False))
    assert point.tie.verdict == "untied"
    point.model.model.embed_tokens.weight = point.model.lm_head.weight
    assert point.tie.verdict == lens.load(point.model).tie.verdict == "shared parameter"
