"""Carriers of word frequency that were planted are found, and zeroing them does what it must."""

from typing import Any

import numpy as np
import pytest
import torch

from lens.checkpoint.checkpoint import Checkpoint
from lens.checkpoint.surgery import reset_bias
from lens.errors import PromptError
from lens.measuring.frequency import CARRIERS, VARIANTS, Frequency, frequency
from lens.measuring.frozen_norm import norm_bias
from tests.checkpoint.test_exactness import checkpoint, own_logits, some_inputs
from tests.checkpoint.tiny import BY_NAME


def texts(seed: int = 0) -> list[list[int]]:
    """Independent tokens, id 3 the most frequent and ever rarer from there."""
    generator = np.random.default_rng(seed)
    return [(3 + np.minimum(generator.geometric(0.05, size=60), 150)).tolist() for _ in range(60)]


def log_unigram() -> torch.Tensor:
    counts = np.bincount(np.concatenate(texts()), minlength=160)
    return torch.from_numpy(np.log((counts + 0.5) / (counts.sum() + 80))).float()


def planted(name: str, where: str) -> Checkpoint:
    """A model whose logits hold the log frequency, kept in the bias or in the norm's bias."""
    model = BY_NAME[name].build(tied=False)
    head = model.get_output_embeddings()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        head.weight.copy_(0.01 * torch.randn(head.weight.shape, generator=generator))
        if where == "bias":
            head.bias.copy_(log_unigram())
        else:
            norm = model.transformer.ln_f
            norm.bias.copy_(torch.eye(64)[0])
            head.weight[:, 0] = log_unigram()
            norm.weight[0] = 0
    return checkpoint(model)


def correlation(found: Frequency, carrier: str) -> float:
    return float(found.correlations[CARRIERS.index(carrier)])


def kl(found: Frequency, variant: str, *, lens: bool = False) -> np.ndarray:
    table = found.lens_kl_bits if lens else found.marginal_kl_bits
    return table[VARIANTS.index(variant)]


@pytest.mark.parametrize(
    ("name", "where", "carrier", "variant"),
    [
        ("gptj", "bias", "output bias", "output bias zero"),
        ("gpt2", "norm", "norm bias", "norm bias zero"),
    ],
)
def test_a_planted_carrier_is_found_and_its_loss_costs_the_unigram(
    name: str, where: str, carrier: str, variant: str
) -> None:
    found = frequency(planted(name, where), texts())
    assert correlation(found, carrier) > 0.95
    whole, without = kl(found, "as it is"), kl(found, variant)
    assert (whole < 0.3).all()
    assert (without > whole + 0.5).all()
    assert kl(found, "as it is", lens=True)[-1] == pytest.approx(0, abs=1e-9)
    assert kl(found, variant, lens=True)[-1] > 0.5


def test_a_carrier_that_holds_no_frequency_is_not_taken_for_one() -> None:
    found = frequency(checkpoint(BY_NAME["gptj"].build()), texts())
    assert abs(correlation(found, "output bias")) < 0.3
    assert abs(correlation(found, "norm bias")) < 0.3


def test_what_a_model_has_not_is_not_made_up() -> None:
    found = frequency(checkpoint(BY_NAME["llama"].build()), texts())
    assert np.isnan(correlation(found, "output bias"))
    assert np.isnan(correlation(found, "norm bias"))
    assert np.isnan(kl(found, "output bias zero")).all()
    assert np.isfinite(kl(found, "mean direction out")).all()
    assert "none" in dict(found.rows())["output bias"]


def test_zeroing_the_bias_is_what_reset_bias_does() -> None:
    point = checkpoint(BY_NAME["gptj"].build())
    found, reset = frequency(point, texts()), frequency(reset_bias(point), texts())
    np.testing.assert_allclose(
        kl(found, "output bias zero"), kl(reset, "as it is"), rtol=1e-5, atol=1e-6
    )
    assert not np.allclose(kl(found, "as it is"), kl(reset, "as it is"), rtol=1e-3)


def test_the_norms_bias_is_what_the_norm_gives_without_a_state() -> None:
    point = checkpoint(BY_NAME["gpt2"].build())
    found = norm_bias(point.readout, torch.randn(64))  # type: ignore[arg-type]
    assert found is not None
    torch.testing.assert_close(found, point.model.transformer.ln_f.bias.detach())
    bert = checkpoint(BY_NAME["bert"].build())
    assert norm_bias(bert.readout, torch.randn(64)) is None  # type: ignore[arg-type]


def test_a_row_common_to_all_tokens_moves_no_probability() -> None:
    model = BY_NAME["gpt2"].build(tied=False)
    before = frequency(checkpoint(model), texts())
    with torch.no_grad():
        model.lm_head.weight.add_(torch.randn(64, generator=torch.Generator().manual_seed(1)))
    after = frequency(checkpoint(model), texts())
    np.testing.assert_allclose(kl(after, "as it is"), kl(before, "as it is"), rtol=1e-4, atol=1e-5)
    lengths = CARRIERS.index("W_U row length")
    assert after.correlations[lengths] != pytest.approx(before.correlations[lengths], abs=1e-3)


def test_the_counts_are_of_documents_that_are_not_scored() -> None:
    found = frequency(checkpoint(BY_NAME["gpt2"].build()), texts(), max_positions=100)
    assert found.n_positions == 100
    # A fifth of the 60 documents is scored; the other 48 give 59 targets each.
    assert found.n_counted == 48 * 59
    assert found.counted_on == "48 documents of list"


@pytest.mark.parametrize("name", ["gemma", "gemma3_text"])
def test_the_lookup_scale_is_not_in_the_matrix(name: str) -> None:
    """Its twin: baked into the one matrix, the states are the same and the logits grow by it."""
    tied = BY_NAME[name].build(tied=True)
    point = checkpoint(tied)
    assert point.lookup_scale == pytest.approx(8.0)
    inputs = some_inputs(point)
    state = point.capture(inputs, layers=[3])[3]
    twin: Any = BY_NAME[name].build(tied=True)
    lookup = twin.get_input_embeddings()
    with torch.no_grad():
        lookup.weight.mul_(8.0)

    def unscaled(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output / 8.0

    handle = lookup.register_forward_hook(unscaled)
    baked = checkpoint(twin)
    same_state = baked.capture(inputs, layers=[3])[3]
    torch.testing.assert_close(same_state, state, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(own_logits(baked, inputs), 8 * own_logits(point, inputs))
    assert not torch.allclose(own_logits(baked, inputs), own_logits(point, inputs), rtol=0.1)
    assert baked.lookup_scale == pytest.approx(1.0)
    handle.remove()


def test_a_corpus_too_small_is_refused() -> None:
    with pytest.raises(PromptError):
        frequency(checkpoint(BY_NAME["gpt2"].build()), [[3, 3, 3], [3, 3, 4]])
