"""Half precision and training settings: read as they are, and left as they were."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoint.tiny import BY_NAME
from tests.deployments.reading import exact

NAMES = ["llama", "gemma2", "cohere", "bart", "bert", "mamba"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_read_exactly(name: str, dtype: torch.dtype) -> None:
    point = exact(BY_NAME[name].build().to(dtype))
    assert point.readout.kind == "direct"
    # Mamba keeps its residual stream in float32 whatever its weights are.
    assert point.dtype == (torch.float32 if name == "mamba" else dtype)


def test_numbers_of_a_half_precision_model_are_of_full_precision() -> None:
    point = exact(BY_NAME["llama"].build().to(torch.bfloat16))
    predictions = point.logit_lens([5, 6, 7, 8])
    for numbers in (predictions.entropy_bits, predictions.kl_bits, predictions.top_logprob_bits):
        assert numbers.dtype in (np.float32, np.float64)
    inputs = point.inputs_of([[5, 6, 7, 8]])
    with torch.no_grad():
        logits = point.model(input_ids=inputs.ids).logits[0].double()
    entropy = torch.distributions.Categorical(logits=logits).entropy() / np.log(2)
    # Logits are bfloat16 in both; one may round the other way in a tile of another shape.
    np.testing.assert_allclose(predictions.entropy_bits[-1], entropy.numpy(), atol=5e-4)
    # Entropies in bfloat16 would be off by far more than that.
    rounded = entropy.to(torch.bfloat16).double().numpy()
    assert np.abs(rounded - entropy.numpy()).max() > 2e-3


@pytest.mark.parametrize("name", ["llama", "gpt2", "bart", "t5", "bert"])
def test_gradient_checkpointing_and_training_mode_change_nothing(name: str) -> None:
    model = BY_NAME[name].build()
    model.gradient_checkpointing_enable()
    model.train()

    def at_rest(**arguments: Any) -> Any:
        model.eval()
        try:
            return model(**arguments)
        finally:
            model.train()

    exact(model, run=at_rest)
    assert model.training
    assert model.is_gradient_checkpointing


def test_a_cache_that_the_config_asks_for_is_off_during_a_reading() -> None:
    model = BY_NAME["llama"].build()
    model.config.use_cache = True
    seen: list[Any] = []
    handle = model.register_forward_hook(lambda m, a, out: seen.append(out.past_key_values))
    exact(model)
    handle.remove()
    assert seen
    assert model.config.use_cache is True
    assert [cache for cache in seen if cache is None]
