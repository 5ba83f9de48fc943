"""Blocks that norm the stream itself: each part passes the norms after it, their scales frozen."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lens.measuring.normed_stream as normed_stream
from lens.checkpoint.checkpoint import Checkpoint
from lens.checkpoint.inputs import forward_arguments
from lens.errors import UnsupportedArchitectureError
from tests.checkpoint.test_exactness import checkpoint
from tests.checkpoint.tiny import BY_NAME, Tiny
from tests.measuring.test_attribution import IDS, of

GPT = Tiny("gpt", "openai-gpt", "OpenAIGPTLMHeadModel", {**BY_NAME["gpt2"].config})
CROSSED = {"attention": "self_attn.out_proj", "cross-attention": "encoder_attn.out_proj"}
# By model, the last linear map of each part of a block.
WRITERS: dict[str, dict[str, str]] = {
    "bart": {**CROSSED, "mlp": "fc2"},
    "marian": {**CROSSED, "mlp": "fc2"},
    "opt_project_out": {"attention": "self_attn.out_proj", "mlp": "fc2"},
    "gpt": {"attention": "attn.c_proj", "mlp": "mlp.c_proj"},
}
MODELS = pytest.mark.parametrize("name", sorted(WRITERS))


def built(name: str, *, tied: bool | None = None) -> Checkpoint:
    tiny = GPT if name == "gpt" else BY_NAME[name]
    return checkpoint(tiny.build(tied=tied))


def frozen_scale(
    x: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 0
) -> Tensor:
    """A layer norm whose derivative does not see that the scale depends on the state."""
    centred = x - x.mean(-1, keepdim=True)
    made = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True).detach() + eps)
    made = made if weight is None else made * weight
    return made if bias is None else made + bias


def by_autograd(
    point: Checkpoint, name: str, token: int, position: int
) -> tuple[list[float], list[np.ndarray]]:
    """What each module wrote, times the logit's gradient at it, no part reading another; and the
    same by head of the self-attentions."""
    leaves: list[Tensor] = []
    activations: dict[int, tuple[nn.Module, Tensor]] = {}

    def leaf(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        activations[len(leaves)] = (module, args[0].detach().reshape(len(IDS), -1))
        leaves.append(output.detach().clone().requires_grad_())
        return leaves[-1]

    def start(module: nn.Module, args: Any) -> Any:
        leaves.append(args[0].detach().clone().requires_grad_())
        return (leaves[-1], *args[1:])

    blocks = point.trunk.blocks
    handles: list[Any] = [blocks[0].register_forward_pre_hook(start)]
    for block in blocks:
        for path in WRITERS[name].values():
            handles.append(block.get_submodule(path).register_forward_hook(leaf))
    inputs = point.inputs_of([IDS], source=[5, 6, 7] if point.seq2seq else None)
    arguments = forward_arguments(point.model, inputs, seq2seq=point.seq2seq)
    try:
        with torch.enable_grad():
            logit = point.model(**arguments).logits[0, position, token]
            gradients = torch.autograd.grad(logit, leaves)
    finally:
        for handle in handles:
            handle.remove()
    at = [g.reshape(len(IDS), -1)[position].double() for g in gradients]
    written = [t.detach().reshape(len(IDS), -1)[position].double() for t in leaves]
    parts = [float(g @ w) for g, w in zip(at, written, strict=True)]
    heads = []
    for i in range(1, len(leaves), len(WRITERS[name])):
        module, given = activations[i]
        matrix = module.weight.detach().double()  # type: ignore[union-attr,operator]
        columns = matrix if isinstance(module, nn.Linear) else matrix.T
        each = (at[i] @ columns) * given[position].double()
        heads.append(each.reshape(4, -1).sum(1).numpy())
    return parts, heads


@MODELS
@pytest.mark.parametrize("tied", [True, False])
def test_parts_and_constant_are_the_logit(name: str, tied: bool) -> None:
    point = built(name, tied=tied)
    kinds = ("embedding", *tuple(WRITERS[name]) * 3)
    inputs = point.inputs_of([IDS], source=[5, 6, 7] if point.seq2seq else None)
    arguments = forward_arguments(point.model, inputs, seq2seq=point.seq2seq)
    with torch.no_grad():
        logits = point.model(**arguments).logits[0]
    for token, position in ((11, -1), (40, 2)):
        found = of(point, token=token, position=position)
        assert found.kinds == kinds
        assert found.logit == pytest.approx(float(logits[position, token]), abs=1e-5)
        assert found.error < 2e-6
        # Each of them is needed.
        assert np.abs(found.parts).min() > 1e-5


@MODELS
def test_each_part_is_what_autograd_says_under_frozen_scales(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = built(name)
    found = of(point, token=11, position=2)
    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.functional, "layer_norm", frozen_scale)
        parts, heads = by_autograd(point, name, 11, 2)
    np.testing.assert_allclose(found.parts, parts, atol=1e-5)
    np.testing.assert_allclose(found.heads, heads, atol=1e-5)
    # With scales that see the state, the gradient is another: it is the freezing that is tested.
    parts, _ = by_autograd(point, name, 11, 2)
    assert np.abs(found.parts - parts).max() > 1e-3


@MODELS
def test_neurons_and_the_maps_bias_are_the_mlp(name: str) -> None:
    """The bias is what the MLP writes in excess of its neurons, in every block of the model."""
    point = built(name)
    with torch.no_grad():
        for block in point.trunk.blocks:
            block.get_submodule(WRITERS[name]["mlp"]).bias.zero_()  # type: ignore[union-attr,operator]
    found = of(point, token=11, top_neurons=10_000)
    for part, kind, layer in zip(found.parts, found.kinds, found.layers, strict=True):
        if kind == "mlp":
            assert found.neurons[found.neuron_layers == layer].sum() == pytest.approx(
                part, abs=1e-5
            )


def test_a_norm_frozen_at_another_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = normed_stream.frozen_norm

    def at_another_state(norm: Callable[[Tensor], Tensor], state: Tensor) -> Any:
        return whole(norm, 3 * state)

    monkeypatch.setattr(normed_stream, "frozen_norm", at_another_state)
    with pytest.raises(UnsupportedArchitectureError, match="miss the logit"):
        of(built("bart"), token=11)


class Squashed(nn.LayerNorm):
    """Bounds what it normed, so that no frozen scale makes it linear."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.tanh(super().forward(input))


class Doubled(nn.LayerNorm):
    """Norms twice the state that it was given: to a norm the same."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(2 * input)


@pytest.mark.parametrize(("norm_class", "split"), [(Squashed, False), (Doubled, True)])
def test_only_what_is_linear_at_a_frozen_scale_is_a_norm(
    norm_class: type[nn.LayerNorm], split: bool
) -> None:
    model = BY_NAME["bart"].build()
    layer = model.model.decoder.layers[1]
    old = layer.self_attn_layer_norm
    layer.self_attn_layer_norm = norm_class(old.normalized_shape)
    layer.self_attn_layer_norm.load_state_dict(old.state_dict())
    found = of(checkpoint(model), token=11)
    middle = ("attention", "cross-attention", "mlp") if split else ("block",)
    outer = ("attention", "cross-attention", "mlp")
    assert found.kinds == ("embedding", *outer, *middle, *outer)
    assert found.error < 1e-5
    assert np.isfinite(found.heads[1]).all() == split
    assert np.isfinite(found.heads[[0, 2]]).all()
