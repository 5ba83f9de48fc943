"""An arm is the model with that one thing changed, measured on the same documents."""

import numpy as np
import pytest
import torch

from lens.checkpoint.checkpoint import Checkpoint
from lens.checkpoint.origin import Origin
from lens.checkpoint.surgery import interpolate, reset_bias
from lens.errors import SelectionError, UnsupportedArchitectureError
from lens.measuring.measure import measure
from lens.measuring.readout_arms import readout_arms
from lens.measuring.statistics import mean_interval
from tests.checkpoint.tiny import BY_NAME
from tests.measuring.small import checkpoint, id_corpus

OPTIONS = {"window_tokens": 10}


def of(model: object) -> Checkpoint:
    return Checkpoint.from_model(model, tokenizer=None, origin=Origin(model_id="m", format="m"))  # type: ignore[arg-type]


def test_alpha_is_the_interpolation_on_a_copy() -> None:
    model = checkpoint("gpt2")
    found = readout_arms(model, id_corpus(5), alphas=[0.5, 1], **OPTIONS)
    plain = measure(model, id_corpus(5), **OPTIONS)
    for alpha in (0.5, 1):
        cut = measure(interpolate(model, alpha), id_corpus(5), **OPTIONS)
        arm = found[f"alpha {alpha:g}"]
        np.testing.assert_allclose(
            arm.profile.sums["kl_bits"], cut.sums["kl_bits"], rtol=1e-5, atol=1e-5
        )
        expected = cut.mean("kl_bits") - plain.mean("kl_bits")
        np.testing.assert_allclose(arm.differences["kl_bits"].estimate, expected, atol=1e-5)
        cost = cut.mean("nll_bits")[-1] - plain.mean("nll_bits")[-1]
        assert arm.cross_entropy_bits.estimate[0] == pytest.approx(cost, abs=1e-5)
        assert cost != 0


def test_the_output_bias_off_is_a_model_without_it() -> None:
    model = checkpoint("phi")
    found = readout_arms(model, id_corpus(5), **OPTIONS)
    cut = measure(reset_bias(model), id_corpus(5), **OPTIONS)
    np.testing.assert_allclose(
        found["output bias zero"].profile.sums["kl_bits"], cut.sums["kl_bits"], rtol=1e-4, atol=1e-4
    )


def test_the_norm_bias_off_is_a_model_without_it() -> None:
    model = BY_NAME["gpt2"].build(tied=True)
    found = readout_arms(of(model), id_corpus(5), **OPTIONS)
    with torch.no_grad():
        model.transformer.ln_f.bias.zero_()
    cut = measure(of(model), id_corpus(5), **OPTIONS)
    np.testing.assert_allclose(
        found["norm bias zero"].profile.sums["kl_bits"], cut.sums["kl_bits"], rtol=1e-4, atol=1e-4
    )
    assert found.absent == {
        "alpha": "W_U is W_E: there is no way between them",
        "output bias zero": "this model has none",
        "lookup scale 1": "the lookup is not scaled",
    }


def test_the_lookup_scale_off_is_a_model_without_it() -> None:
    model = BY_NAME["gemma3_text"].build(tied=True)
    found = readout_arms(of(model), id_corpus(5), **OPTIONS)
    assert [arm.name for arm in found.arms] == ["lookup scale 1"]
    model.model.embed_tokens.embed_scale.fill_(1.0)
    model.model.embed_tokens.scalar_embed_scale = 1.0
    cut = measure(of(model), id_corpus(5), **OPTIONS)
    np.testing.assert_allclose(
        found["lookup scale 1"].profile.sums["kl_bits"], cut.sums["kl_bits"], rtol=1e-3, atol=1e-3
    )
    assert abs(found["lookup scale 1"].cross_entropy_bits.estimate[0]) > 1e-4


def test_the_model_stays_as_it_was() -> None:
    model = checkpoint("gemma3_text")
    ids = model.inputs_of([list(range(3, 12))])
    before = model.capture(ids, layers=[0, model.n_layers])
    readout_arms(model, id_corpus(3), **OPTIONS)
    after = model.capture(ids, layers=[0, model.n_layers])
    assert all(torch.equal(before[layer], after[layer]) for layer in before)


def test_differences_are_paired_by_document() -> None:
    """The interval is that of the documents' own differences, not of two sides drawn apart."""
    model = checkpoint("gpt2")
    found = readout_arms(model, id_corpus(6), alphas=[1], **OPTIONS)
    arm, before = found["alpha 1"], found.unchanged
    paired = arm.differences["kl_bits"]
    assert np.all(paired.high[:-1] > paired.low[:-1])
    # The last layer's KL is 0 in both: no difference, no interval.
    assert paired.low[-1] == paired.estimate[-1] == paired.high[-1] == 0
    own = mean_interval(
        arm.profile.sums["kl_bits"] - before.sums["kl_bits"], before.counts["n"].astype(float)
    )
    np.testing.assert_allclose(paired.low, own.low)
    np.testing.assert_allclose(paired.high, own.high)
    frame = found.to_frame()
    assert len(frame) == 2 * (4 * 4 + 1)  # alpha and the norm's bias
    assert [label for label, _ in found.rows()][-2:] == ["alpha 1", "norm bias zero"]


def test_what_cannot_be_changed_is_refused() -> None:
    model = checkpoint("gpt2")
    with pytest.raises(SelectionError, match="above 0"):
        readout_arms(model, id_corpus(3), alphas=[0.0])
    with pytest.raises(SelectionError, match="no arm 'x'"):
        readout_arms(model, id_corpus(3), **OPTIONS)["x"]
    model.readout = model.replay
    with pytest.raises(UnsupportedArchitectureError, match="direct readout"):
        readout_arms(model, id_corpus(3))
