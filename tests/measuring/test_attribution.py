"""Parts and constant are the logit, and each part is what its module wrote."""

from typing import Any

import numpy as np
import pytest
import torch

import lens.measuring.attribution as module
import lens.measuring.block_parts as block_parts
from lens.checkpoint.checkpoint import Checkpoint
from lens.errors import SelectionError, UnsupportedArchitectureError
from lens.measuring.attribution import Attribution, attribution
from lens.measuring.frozen_norm import linear_logit
from tests.checkpoint.test_exactness import checkpoint
from tests.checkpoint.tiny import BY_NAME, TINY, Tiny

IDS = [5, 6, 7, 8, 9]
NOT_LINEAR = {"bert", "roberta", "albert"}
SPLIT = {
    "gpt2", "gpt_neo", "gptj", "codegen", "gpt_neox", "phi", "llama", "mistral", "qwen2", "qwen3",
    "gemma", "gemma2", "gemma3_text", "cohere", "granite", "olmo", "olmo2", "stablelm", "minicpm3",
    "nanochat", "opt", "bloom", "falcon", "mpt", "xglm", "ctrl",
}  # fmt: skip
POST_NORMED = {"gemma2", "gemma3_text", "olmo2"}
LINEAR = [tiny for tiny in TINY if tiny.name not in NOT_LINEAR]


def of(point: Checkpoint, **options: Any) -> Attribution:
    return attribution(point, IDS, source=[5, 6, 7] if point.seq2seq else None, **options)


def own_logit(point: Checkpoint, token: int, position: int = -1) -> float:
    inputs = point.inputs_of([IDS], source=[5, 6, 7] if point.seq2seq else None)
    last = point.capture(inputs, layers=[point.n_layers])[point.n_layers][0, position]
    if point.readout.unembedding.steps and "tanh" in point.readout.describe():  # type: ignore[attr-defined]
        prepared = point.readout.prepare(last[None])  # type: ignore[attr-defined]
        return float(prepared[0] @ point.W_U[token])
    return float(point.readout.logits(last[None])[0, token])


@pytest.mark.parametrize("tiny", LINEAR, ids=lambda tiny: tiny.name)
@pytest.mark.parametrize("tied", [True, False])
def test_parts_and_constant_are_the_logit(tiny: Tiny, tied: bool) -> None:
    point = checkpoint(tiny.build(tied=tied))
    for token, position in ((11, -1), (40, 2)):
        found = of(point, token=token, position=position)
        assert found.logit == pytest.approx(own_logit(point, token, position), abs=1e-5)
        assert found.error < 1e-4
        # Without any one part the sum is another number: each of them is needed.
        size = np.abs(found.parts).max()
        assert abs(found.parts.sum() - found.parts[0] + found.constant - found.logit) > 1e-6 * size


@pytest.mark.parametrize("name", sorted(SPLIT))
def test_blocks_are_split_into_attention_and_mlp(name: str) -> None:
    found = of(checkpoint(BY_NAME[name].build()), token=11)
    assert found.kinds == ("embedding", *("attention", "mlp") * 3)
    assert np.isfinite(found.last_mlp_share)
    assert np.isfinite(found.heads).all()


@pytest.mark.parametrize("name", sorted(POST_NORMED))
def test_heads_and_neurons_behind_a_norm_are_their_modules_parts(name: str) -> None:
    """The norm that follows a module is frozen at its position, like the final one."""
    point = checkpoint(BY_NAME[name].build())
    found = of(point, token=11, top_neurons=10_000)
    for block in range(3):
        attention, mlp = found.parts[1 + 2 * block], found.parts[2 + 2 * block]
        assert found.heads[block].sum() == pytest.approx(attention, abs=1e-5)
        assert found.neurons[found.neuron_layers == block].sum() == pytest.approx(mlp, abs=1e-5)
        assert np.abs(found.heads[block]).max() > 1e-3


def test_without_the_norms_scale_heads_are_not_their_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = block_parts.frozen_norm

    def at_another_state(norm: Any, state: torch.Tensor) -> Any:
        return whole(norm, 3 * state)

    monkeypatch.setattr(block_parts, "frozen_norm", at_another_state)
    found = of(checkpoint(BY_NAME["gemma2"].build()), token=11)
    assert abs(found.heads[0].sum() - found.parts[1]) > 1e-3 * abs(found.parts[1])


def test_an_encoder_decoder_that_adds_inside_its_modules_is_split() -> None:
    point = checkpoint(BY_NAME["t5"].build())
    found = of(point, token=11)
    assert found.kinds == ("embedding", *("attention", "cross-attention", "mlp") * 3)
    for block in range(3):
        attention = found.parts[1 + 3 * block]
        assert found.heads[block].sum() == pytest.approx(attention, abs=1e-5)
    assert {"all of cross-attention"} <= {label for label, _ in found.rows()}


@pytest.mark.parametrize("name", ["gpt2", "llama", "gptj", "falcon"])
def test_heads_and_the_maps_bias_are_the_attention(name: str) -> None:
    point = checkpoint(BY_NAME[name].build())
    found = of(point, token=11)
    bias = {"gpt2": "attn.c_proj.bias"}.get(name)
    for block, heads in enumerate(found.heads):
        part = next(
            p for p, k, layer in zip(found.parts, found.kinds, found.layers, strict=True)
            if k == "attention" and layer == block
        )  # fmt: skip
        rest = 0.0
        if bias:
            vector = point.trunk.blocks[block].get_parameter(bias).detach().double()
            inputs = point.inputs_of([IDS])
            state = point.capture(inputs, layers=[3])[3][0, -1]
            rest = float(linear_logit(point.readout, state, {11: 1.0}).direction @ vector)  # type: ignore[arg-type]
            assert abs(rest) > 1e-3
        assert heads.sum() + rest == pytest.approx(part, abs=1e-5)


def test_an_ablated_head_takes_what_it_was_said_to_write() -> None:
    """Under the frozen scale: the direct effect of a head of the last block, and no other."""
    point = checkpoint(BY_NAME["llama"].build())
    found = of(point, token=11)
    inputs = point.inputs_of([IDS])
    state = point.capture(inputs, layers=[3])[3][0, -1]
    linear = linear_logit(point.readout, state, {11: 1.0})  # type: ignore[arg-type]
    seen: list[torch.Tensor] = []
    projection = point.trunk.blocks[2].self_attn.o_proj  # type: ignore[union-attr]

    def silence(_: Any, args: Any) -> Any:
        changed = args[0].clone()
        changed[..., 16:32] = 0
        return (changed,)

    def mlp(_: Any, args: Any, output: torch.Tensor) -> None:
        seen.append(output[0, -1].detach())

    handles = [
        projection.register_forward_pre_hook(silence),  # type: ignore[union-attr,operator]
        point.trunk.blocks[2].mlp.register_forward_hook(mlp),  # type: ignore[union-attr,operator]
    ]
    without = point.capture(inputs, layers=[3])[3][0, -1]
    for handle in handles:
        handle.remove()
    point.trunk.blocks[2].mlp.register_forward_hook(mlp)  # type: ignore[union-attr,operator]
    point.capture(inputs, layers=[3])
    direct = (state - without).double() - (seen[1] - seen[0]).double()
    assert float(linear.direction @ direct) == pytest.approx(found.heads[2, 1], abs=1e-5)
    assert abs(found.heads[2, 1] - found.heads[2, 0]) > 1e-4


def test_all_neurons_and_the_maps_bias_are_the_mlp() -> None:
    found = of(checkpoint(BY_NAME["llama"].build()), token=11, top_neurons=10_000)
    for block in range(3):
        mlp = found.parts[2 + 2 * block]
        assert found.neurons[found.neuron_layers == block].sum() == pytest.approx(mlp, abs=1e-5)
    top = of(checkpoint(BY_NAME["llama"].build()), token=11, top_neurons=3)
    # A product's last bit depends on where its operands lie in memory: 64 roundings at most.
    np.testing.assert_allclose(top.neurons, found.neurons[:3], rtol=64 * 2.3e-16)


def test_a_difference_of_two_tokens_is_the_difference_of_their_parts() -> None:
    point = checkpoint(BY_NAME["gptj"].build())
    one, other, both = of(point, token=11), of(point, token=12), of(point, token=11, against=12)
    np.testing.assert_allclose(both.parts, one.parts - other.parts, atol=1e-6)
    assert both.constant == pytest.approx(one.constant - other.constant, abs=1e-6)
    assert both.logit == pytest.approx(one.logit - other.logit, abs=1e-5)


def test_the_frozen_scale_is_that_of_the_position() -> None:
    point = checkpoint(BY_NAME["llama"].build())
    inputs = point.inputs_of([IDS])
    state = point.capture(inputs, layers=[3])[3][0, -1]
    linear = linear_logit(point.readout, state, {11: 1.0})  # type: ignore[arg-type]
    truth = float(point.readout.logits(state[None])[0, 11])
    assert float(linear.direction @ state.double()) + linear.constant == pytest.approx(
        truth, abs=1e-5
    )
    other = linear_logit(point.readout, 3 * state, {11: 1.0})  # type: ignore[arg-type]
    assert float(other.direction @ state.double()) + other.constant != pytest.approx(
        truth, abs=1e-2
    )


def test_a_soft_cap_is_left_out_and_said() -> None:
    found = of(checkpoint(BY_NAME["gemma2"].build()), token=11)
    assert found.quantity == "logit before the soft-cap"
    assert of(checkpoint(BY_NAME["cohere"].build()), token=11).quantity == "logit"


@pytest.mark.parametrize("name", sorted(NOT_LINEAR))
def test_a_readout_that_is_not_linear_after_its_norm_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedArchitectureError, match="not linear after its norm"):
        of(checkpoint(BY_NAME[name].build()))


def test_parts_that_miss_the_logit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = module.block_steps

    def without_the_last(*args: Any, **options: Any) -> Any:
        start, steps = whole(*args, **options)
        return start, steps[:-1]

    monkeypatch.setattr(module, "block_steps", without_the_last)
    with pytest.raises(UnsupportedArchitectureError, match="miss the logit"):
        of(checkpoint(BY_NAME["gpt2"].build()), token=11)


def test_nothing_stays_on_the_model() -> None:
    point = checkpoint(BY_NAME["gpt2"].build())
    point.model.train()
    of(point)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in point.model.modules())
    assert all(m.training for m in point.model.modules())


def test_the_first_choice_is_the_default_and_bad_tokens_are_refused() -> None:
    point = checkpoint(BY_NAME["gpt2"].build())
    logits = [own_logit(point, token) for token in range(160)]
    assert of(point).token_id == int(np.argmax(logits))
    with pytest.raises(SelectionError):
        of(point, token=160)
    with pytest.raises(SelectionError, match="the same"):
        of(point, token=3, against=3)
    with pytest.raises(SelectionError):
        of(point, position=5)


def test_the_text_tells_the_largest_parts_and_the_last_mlp() -> None:
    rows = of(checkpoint(BY_NAME["llama"].build()), token=11).rows()
    labels = [label for label, _ in rows]
    assert {"logit", "all of attention", "constant", "last MLP's share"} <= set(labels)
    assert sum(label.startswith("head ") for label in labels) == 5
