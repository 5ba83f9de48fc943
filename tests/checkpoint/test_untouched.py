"""What is the user's stays as it was: weights, hooks, forwards, flags; also after an error."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import lens
from lens.errors import ShapeError
from tests.checkpoint.test_exactness import checkpoint
from tests.checkpoint.tiny import BY_NAME

NAMES = ["gpt2", "llama", "albert", "t5", "opt_project_out", "mamba"]


def inventory(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that a reading could disturb."""
    return {
        "parameters": {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)},
        "values": {name: p.detach().clone() for name, p in model.named_parameters()},
        "grad": {name: p.requires_grad for name, p in model.named_parameters()},
        "training": [module.training for module in model.modules()],
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
            for m in model.modules()
        ],
        "own attributes": [sorted(vars(module)) for module in model.modules()],
        "attention": getattr(model.config, "_attn_implementation", None),
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    values, values_after = before.pop("values"), after.pop("values")
    assert before == after
    assert all(torch.equal(values[name], values_after[name]) for name in values)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_reading_leaves_the_model_as_it_was(name: str, training: bool) -> None:
    model = BY_NAME[name].build()
    model.train(training)
    before = inventory(model)
    point = checkpoint(model)
    source = [5, 6] if point.seq2seq else None
    point.logit_lens([4, 5, 6, 7], source=source)
    point.read(torch.randn(2, point.d_model))
    point.replay.logits(torch.randn(1, 3, point.d_model))
    assert_same(before, inventory(model))


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_bit_equal_before_during_and_after(name: str) -> None:
    model = BY_NAME[name].build()
    ids = torch.tensor([[4, 5, 6, 7]])
    extra = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}

    def logits() -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=ids, **extra).logits

    before = logits()
    point = checkpoint(model)
    during = logits()
    point.logit_lens([4, 5, 6, 7], source=[5, 6] if point.seq2seq else None)
    assert torch.equal(before, during)
    assert torch.equal(before, logits())


class _Interrupted(Exception):
    pass


def test_an_error_within_an_edit_leaves_no_hook_behind() -> None:
    model = BY_NAME["llama"].build()
    point = checkpoint(model)
    before = inventory(model)

    def fail(states: torch.Tensor) -> torch.Tensor:
        raise _Interrupted

    with pytest.raises(_Interrupted), point.edit(1, None, fail):
        point.logit_lens([4, 5, 6])
    assert_same(before, inventory(model))


def test_an_error_within_a_replay_restores_every_forward() -> None:
    model = BY_NAME["albert"].build()
    point = checkpoint(model)
    before = inventory(model)

    def fail(*_: Any) -> None:
        raise _Interrupted

    handle = model.predictions.register_forward_pre_hook(fail)
    with pytest.raises(_Interrupted):
        point.replay.logits(torch.randn(1, 3, point.d_model))
    handle.remove()
    assert_same(before, inventory(model))


def test_the_inventory_notices_a_hook_a_flag_and_a_weight() -> None:
    model = BY_NAME["llama"].build()
    for disturb in (
        lambda: model.model.norm.register_forward_hook(lambda m, a, out: None),
        lambda: model.model.norm.train(),
        lambda: model.lm_head.weight.data.add_(1e-3),
    ):
        before = inventory(model)
        disturb()
        with pytest.raises(AssertionError):
            assert_same(before, inventory(model))


def test_a_hook_of_the_users_acts_once_on_the_state_that_is_read() -> None:
    model = BY_NAME["llama"].build()
    point = checkpoint(model)
    last = model.model.layers[-1]
    calls = []

    def double(module: nn.Module, args: Any, out: Any) -> Any:
        calls.append(1)
        return out * 2

    handle = last.register_forward_hook(double)
    try:
        ids = torch.tensor([[4, 5, 6]])
        with torch.no_grad():
            truth = model(ids).logits
        inputs = point.inputs_of([[4, 5, 6]])
        state = point.capture(inputs, layers=[point.n_layers])[point.n_layers]
        seen = len(calls)
        assert torch.equal(point.replay.logits(state, inputs), truth)
        assert len(calls) == seen
    finally:
        handle.remove()


def test_global_state_is_left_alone() -> None:
    torch.manual_seed(11)
    model = BY_NAME["llama"].build()
    torch.manual_seed(12)
    expected = torch.get_rng_state()
    point = checkpoint(model)
    point.logit_lens([4, 5, 6])
    assert torch.equal(expected, torch.get_rng_state())
    assert torch.get_default_dtype() is torch.float32


def test_an_edit_of_another_shape_is_an_error() -> None:
    point = checkpoint(BY_NAME["llama"].build())
    with (
        pytest.raises(ShapeError, match=r"expected a tensor of shape \(1, 2, 64\)"),
        point.edit(1, [0, 1], lambda states: states[:, :1]),
    ):
        point.logit_lens([4, 5, 6])


def test_a_kind_of_attention_that_a_short_prompt_switches_off_comes_back() -> None:
    """BigBird takes full attention at the first short prompt, and would keep it for long ones."""
    config = transformers.BigBirdConfig(
        vocab_size=99,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=256,
        block_size=4,
        num_random_blocks=1,
        attention_type="block_sparse",
    )
    torch.manual_seed(0)
    model = transformers.BigBirdForMaskedLM(config).eval()
    ids = torch.randint(5, 99, (1, 128))
    before = [type(module) for module in model.modules()]
    with torch.no_grad():
        own = copy.deepcopy(model)(ids).logits[0].log_softmax(-1)
    point = lens.load(model)
    point.logit_lens([5, 6, 7])
    assert [type(module) for module in model.modules()] == before
    assert model.bert.attention_type == "block_sparse"
    found = point.logit_lens(ids[0].tolist(), layers=[-1])
    assert found.top_ids[-1, :, 0].tolist() == own.argmax(-1).tolist()
    bits = own.max(-1).values.numpy() / np.log(2)
    np.testing.assert_allclose(found.top_logprob_bits[-1, :, 0], bits, atol=1e-5)
