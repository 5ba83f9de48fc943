"""Eight-bit weights by torchao: read through the quantised product itself."""

import pytest
import torch

from lens.checkpoint.quantized import dequantized, is_plain, plain_parts
from tests.checkpoint.tiny import BY_NAME
from tests.deployments.reading import exact, package

package("torchao")


def _quantize(model: torch.nn.Module, *, head: bool) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    def chosen(module: torch.nn.Module, name: str) -> bool:
        return isinstance(module, torch.nn.Linear) and (head or name != "lm_head")

    quantize_(model, Int8WeightOnlyConfig(), filter_fn=chosen)


@pytest.mark.parametrize("name", ["llama", "bert", "bart"])
def test_int8_weights_are_read_exactly(name: str) -> None:
    model = BY_NAME[name].build()
    _quantize(model, head=True)
    point = exact(model)
    assert point.readout.kind == "replay"
    assert "Int8Tensor" in str(point.summary().why_not_direct)
    assert not point.tie.is_tied


def test_a_head_left_in_full_precision_is_read_directly() -> None:
    model = BY_NAME["llama"].build(tied=False)
    _quantize(model, head=False)
    assert exact(model).readout.kind == "direct"


def test_other_integers_are_another_model() -> None:
    first, second = BY_NAME["llama"].build(), BY_NAME["llama"].build()
    with torch.no_grad():
        second.lm_head.weight.add_(0.01 * torch.randn_like(second.lm_head.weight))
    _quantize(first, head=True)
    _quantize(second, head=True)
    assert exact(first).model_hash != exact(second).model_hash


def test_a_quantised_weight_is_told_from_a_plain_one_and_taken_apart() -> None:
    model = BY_NAME["llama"].build(tied=False)
    before = model.lm_head.weight.detach().clone()
    assert is_plain(model.lm_head.weight)
    assert plain_parts(model.lm_head.weight) == (model.lm_head.weight,)
    _quantize(model, head=True)
    weight = model.lm_head.weight
    assert not is_plain(weight)
    assert torch.int8 in {part.dtype for part in plain_parts(weight)}
    values = dequantized(weight)
    assert values is not None
    # Half a step of 1/127 of the row's largest value.
    step = before.abs().amax(1, keepdim=True) / 127
    assert ((values - before).abs() <= 0.51 * step).all()
