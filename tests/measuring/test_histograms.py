import numpy as np
import pytest

from lens.measuring import histograms
from lens.measuring.calibration import N_EQUAL_BINS, calibration
from lens.measuring.depth import KINDS, depth_counts, settled


def kls(seed: int = 0, count: int = 4000) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(0.5, 1.5, (2, count))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_a_quantile_is_within_the_stated_error(share: float) -> None:
    values = kls()
    found = histograms.quantile(histograms.kl_bins(values), share)
    exact = np.quantile(values, share, axis=1, method="inverted_cdf")
    assert np.all(np.abs(found / exact - 1) <= histograms.KL_BIN_ERROR + 1e-12)
    assert histograms.KL_BIN_ERROR < 0.0053


def test_a_trimmed_mean_is_within_the_stated_error() -> None:
    values = np.sort(kls(), axis=1)
    exact = values[:, 200:-200].mean(axis=1)
    found = histograms.trimmed_mean(histograms.kl_bins(values))
    assert np.all(np.abs(found / exact - 1) <= histograms.KL_BIN_ERROR)
    assert np.all(np.abs(values.mean(axis=1) / exact - 1) > 0.05)  # trimming did something


def test_zero_and_huge_values_have_bins_and_nan_has_none() -> None:
    counts = histograms.kl_bins(np.array([[0.0, 1e-9, 1e9, np.inf, np.nan]]))
    assert counts.sum() == 4
    assert counts[0, 0] == 2
    assert counts[0, -1] == 2
    at = histograms.confidence_place(np.array([[0.2, np.nan, 1.0]]))
    assert at[0, 1] == histograms.NO_BIN
    for amounts in (None, np.ones((1, 3), dtype=np.int64)):
        binned = histograms.binned(at, amounts)
        assert binned.sum() == 2
        assert binned[0, -1] == binned[0, at[0, 0]] == 1
    assert np.isnan(histograms.quantile(np.zeros((1, histograms.N_BINS), dtype=np.int64), 0.5))


def test_histograms_add_up_in_any_order() -> None:
    values = kls()
    whole = histograms.kl_bins(values)
    parts = [histograms.kl_bins(values[:, i::7]) for i in range(7)]
    assert np.array_equal(sum(parts[::-1]), whole)


def fine(probability: np.ndarray, correct: np.ndarray, final: np.ndarray) -> dict[str, np.ndarray]:
    at = histograms.confidence_place(probability)
    units = histograms.in_units(probability)
    return {
        "count": histograms.binned(at),
        "scored": histograms.binned(at),
        "correct": histograms.binned(at, correct.astype(np.int64)),
        "confidence_units": histograms.binned(at, units),
        "scored_units": histograms.binned(at, units),
        "final_units": histograms.binned(at, histograms.in_units(final)),
    }


def test_a_calibrated_lens_has_no_error_and_an_overconfident_one_its_excess() -> None:
    generator = np.random.default_rng(0)
    right = generator.uniform(0.2, 0.9, (1, 100_000))
    correct = generator.random(right.shape) < right
    good = calibration(**fine(right, correct, right))
    # 15 bins of 6,667: each accuracy is off by about 0.006.
    assert good.ece[0] < 0.01
    assert good.gap_to_final[0] < 1e-9
    bad = calibration(**fine(right + 0.1, correct, right))
    assert bad.ece[0] == pytest.approx(0.1, abs=0.01)
    assert bad.gap_to_final[0] == pytest.approx(0.1, abs=1e-9)


def test_the_bins_have_about_equal_mass() -> None:
    values = np.random.default_rng(0).beta(0.5, 3.0, (1, 50_000))
    found = calibration(**fine(values, values > 2, values))
    assert found.count.shape == (1, N_EQUAL_BINS)
    assert found.count.sum() == values.size
    assert np.all(np.abs(found.count / (values.size / N_EQUAL_BINS) - 1) < 0.15)


def test_the_sure_and_the_impossible_fall_into_the_outer_bins() -> None:
    at = histograms.confidence_place(np.array([[0.0, 1.0]]))
    assert at.tolist() == [[0, histograms.N_BINS - 1]]


def test_a_depth_is_the_first_layer_from_which_it_stays() -> None:
    reached = np.array([[1, 0, 1], [0, 0, 1], [1, 0, 1], [1, 0, 1]], dtype=bool)
    assert settled(reached).tolist() == [2, 4, 0]


def test_depths_are_counted_by_entropy_and_kind() -> None:
    agreement = np.array([[False, True], [True, True]])
    kl = np.array([[3.0, 0.7], [0.0, 0.0]])
    counts = depth_counts(agreement, kl, np.array([0.1, 5.0]))
    assert counts.sum(axis=(1, 2)).tolist() == [2] * len(KINDS)
    assert counts[KINDS.index("top-1"), 0].tolist() == [0, 1, 0]
    assert counts[KINDS.index("top-1"), 4].tolist() == [1, 0, 0]
    assert counts[KINDS.index("0.5 bit"), 4].tolist() == [0, 1, 0]
    assert counts[KINDS.index("1 bit"), 4].tolist() == [1, 0, 0]
