"""A model in bfloat16, as most files hold it, is measured as its numbers in float32 are."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import lens
from lens.checkpoint.checkpoint import Checkpoint
from lens.errors import UnsupportedArchitectureError
from lens.measuring import attribution as attribution_module
from lens.measuring import frozen_norm as frozen_norm_module
from tests.checkpoint.test_exactness import checkpoint
from tests.checkpoint.tiny import BY_NAME
from tests.measuring.small import id_corpus

IDS = [5, 6, 7, 8, 9]
TEXTS = id_corpus(4, 16)
HALF = (torch.bfloat16, torch.float16)
FAMILIES = ("gpt2", "llama", "gemma2", "olmo2", "bloom", "bart", "t5", "mamba", "opt_project_out")


def in_both(name: str, half: torch.dtype) -> tuple[Checkpoint, Checkpoint]:
    """The same numbers, each of them one of half precision: computed in it, and in float32."""
    model = BY_NAME[name].build(tied=False)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms of a new model have gain 1 and bias 0, which any rounding keeps.
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.manual_seed(0)))
    model = model.to(half)
    other = BY_NAME[name].build(tied=False)
    other.load_state_dict(model.state_dict())
    return checkpoint(model), checkpoint(other.float())


def attributed(model: Checkpoint) -> Any:
    return lens.attribution(model, IDS, token=11, source=[5, 6, 7] if model.seq2seq else None)


@pytest.mark.parametrize("half", HALF, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_logit_is_taken_apart_as_in_float32(name: str, half: torch.dtype) -> None:
    model, exact = in_both(name, half)
    found, expected = attributed(model), attributed(exact)
    size = np.abs(expected.parts).max()
    assert found.logit == pytest.approx(expected.logit, abs=0.05 * size)
    if found.kinds == expected.kinds:
        np.testing.assert_allclose(found.parts, expected.parts, atol=0.05 * size)
    else:
        # Rounding can hide how a block adds up, so that it stays whole.
        assert "block" in found.kinds
    assert found.constant == pytest.approx(expected.constant, abs=0.05 * size)


def test_a_missing_part_is_seen_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = attribution_module.block_steps

    def without_the_last(*args: Any, **options: Any) -> Any:
        start, steps = whole(*args, **options)
        return start, steps[:-1]

    monkeypatch.setattr(attribution_module, "block_steps", without_the_last)
    for name in ("gpt2", "llama"):
        with pytest.raises(UnsupportedArchitectureError, match="miss the logit"):
            attributed(in_both(name, torch.bfloat16)[0])


MEASURED: dict[str, Callable[[Checkpoint], Any]] = {
    "norm bias": lambda m: lens.frequency(m, TEXTS, n_layers=3).rows(),
    "readout arms": lambda m: lens.readout_arms(m, TEXTS, alphas=()),
    "token energy": lambda m: lens.token_energy(m, TEXTS, positions=32).of_unembedding.estimate,
}


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "llama"])
def test_a_norms_gain_and_bias_are_found_in_half_precision(name: str) -> None:
    model, exact = in_both(name, torch.bfloat16)
    assert [a for a, _ in MEASURED["norm bias"](model)] == [
        a for a, _ in MEASURED["norm bias"](exact)
    ]
    found, expected = MEASURED["readout arms"](model), MEASURED["readout arms"](exact)
    assert found.absent == expected.absent
    assert ("norm bias zero" in found.absent) == (name == "llama")
    np.testing.assert_allclose(
        MEASURED["token energy"](model), MEASURED["token energy"](exact), rtol=0.01
    )


def test_tried_in_half_precision_a_norm_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = in_both("gpt2", torch.bfloat16)
    monkeypatch.setattr(frozen_norm_module, "precise_parts", lambda parts, dtype: tuple(parts))
    monkeypatch.setattr(frozen_norm_module, "in_more_than_half", lambda x: x)
    with pytest.raises(UnsupportedArchitectureError, match="hides it"):
        attributed(model)
    assert "norm bias zero" in MEASURED["readout arms"](model).absent
