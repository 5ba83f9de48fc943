import time

import numpy as np
import pytest

from lens.errors import SelectionError
from lens.measuring.skill import area, marginal_bias_bits, skill
from lens.measuring.statistics import (
    bootstrap,
    holm,
    mean_interval,
    sign_flip,
    verdict,
)


def documents(seed: int, n: int = 60, layers: int = 5, spread: float = 1.0) -> tuple:
    """Sums and counts of documents whose means differ: positions of one are alike."""
    generator = np.random.default_rng(seed)
    counts = generator.integers(20, 60, n)
    means = 3.0 + spread * generator.standard_normal((n, layers))
    return means * counts[:, None], counts


def test_an_interval_covers_the_truth_as_often_as_it_says() -> None:
    hits = []
    for seed in range(150):
        sums, counts = documents(seed)
        found = mean_interval(sums, counts, n_resamples=400, seed=seed)
        hits.append((found.low <= 3.0) & (found.high >= 3.0))
    share = np.mean(hits)
    # 750 correlated trials near 0.95; the percentile bootstrap is a little short at 60 documents.
    assert 0.90 < share < 0.98


def test_a_document_without_a_position_changes_no_interval() -> None:
    sums, counts = documents(0, n=4)
    found = mean_interval(sums, counts, n_resamples=500)
    more = mean_interval(
        np.concatenate([sums, np.zeros((1, 5))]), np.append(counts, 0), n_resamples=500
    )
    assert more.n_documents == found.n_documents == 4
    np.testing.assert_array_equal(more.replicates, found.replicates)
    with pytest.raises(SelectionError, match="there are 1"):
        mean_interval(sums[:2], np.array([5, 0]))


def test_a_band_covers_all_layers_at_once_where_pointwise_intervals_do_not() -> None:
    band, pointwise = [], []
    for seed in range(150):
        sums, counts = documents(seed, layers=12)
        found = mean_interval(sums, counts, n_resamples=400, seed=seed)
        band.append(np.all((found.band_low <= 3.0) & (found.band_high >= 3.0)))
        pointwise.append(np.all((found.low <= 3.0) & (found.high >= 3.0)))
    assert np.mean(band) > 0.86
    assert np.mean(pointwise) < 0.75


def test_drawing_positions_in_place_of_documents_would_be_too_sure() -> None:
    sums, counts = documents(0, layers=1)
    by_document = mean_interval(sums, counts)
    rows = np.repeat(sums[:, 0] / counts, counts)[:, None]
    by_position = mean_interval(rows, np.ones(len(rows)))
    width = (by_document.high - by_document.low)[0]
    assert (by_position.high - by_position.low)[0] < 0.4 * width


def test_ten_thousand_resamples_take_less_than_five_seconds() -> None:
    sums, counts = documents(0, n=300, layers=64)
    began = time.process_time()
    found = mean_interval(sums, counts)
    assert time.process_time() - began < 5
    assert found.replicates.shape == (10_000, 64)


def test_the_same_seed_gives_the_same_interval() -> None:
    sums, counts = documents(0)
    a, b = (mean_interval(sums, counts, seed=3) for _ in range(2))
    assert np.array_equal(a.replicates, b.replicates)
    assert not np.array_equal(a.replicates, mean_interval(sums, counts, seed=4).replicates)


def test_one_document_gives_no_interval() -> None:
    with pytest.raises(SelectionError, match="needs two"):
        bootstrap(np.ones((1, 3)), lambda totals: totals)


def test_sign_flip_is_exact_and_has_its_floor() -> None:
    assert sign_flip(np.array([1.0, 2.0, 3.0, 4.0, 5.0])) == 2 / 2**5
    assert sign_flip(np.full(8, 0.3)) == 2 / 2**8
    assert sign_flip(np.array([1.0, -1.0])) == 1.0
    assert sign_flip(np.zeros(4)) == 1.0
    with pytest.raises(SelectionError, match="1 to 20"):
        sign_flip(np.ones(21))


def test_sign_flip_is_uniform_under_no_difference() -> None:
    generator = np.random.default_rng(0)
    p = np.array([sign_flip(generator.standard_normal(8)) for _ in range(600)])
    assert np.mean(p <= 0.05) == pytest.approx(0.047, abs=0.03)
    assert (
        np.mean([sign_flip(1 + 0.5 * generator.standard_normal(8)) <= 0.05 for _ in range(100)])
        > 0.9
    )


def test_holm_multiplies_and_keeps_the_order() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize(
    ("centre", "spread", "expected"),
    [
        (0.0, 0.01, "equivalent"),
        (0.02, 0.01, "equivalent"),
        (0.2, 0.01, "better"),
        (-0.2, 0.01, "worse"),
        (0.0, 0.2, "undecided"),
        (0.06, 0.05, "undecided"),
    ],
)
def test_the_verdict_needs_evidence_for_equivalence_too(
    centre: float, spread: float, expected: str
) -> None:
    replicates = centre + spread * np.random.default_rng(0).standard_normal(10_000)
    assert verdict(replicates) == expected
    opposite = {"better": "worse", "worse": "better"}.get(expected, expected)
    assert verdict(replicates, higher_is="worse") == opposite


def test_skill_is_one_at_the_output_and_zero_at_the_guess() -> None:
    assert skill(np.array([8.0, 4.0, 1.0, 0.0]), 4.0).tolist() == [-1.0, 0.0, 0.75, 1.0]
    assert np.isnan(skill(np.array([1.0]), 0.0)).all()


def test_the_area_leaves_layer_0_out_and_clips_what_has_no_bound() -> None:
    assert area(np.array([-50.0, 0.0, 0.5, 1.0])) == pytest.approx(0.5)
    assert area(np.array([1.0, -50.0, 1.0])) == pytest.approx(0.0)
    assert area(np.array([0.0, 0.7])) == pytest.approx(0.7)


def test_marginal_bias_is_the_divergence_of_the_means() -> None:
    units = 2**50
    sums = (np.array([[0.5, 0.5], [0.25, 0.75]]) * 8 * units).astype(np.int64)
    expected = 0.25 * np.log2(0.25 / 0.5) + 0.75 * np.log2(0.75 / 0.5)
    assert marginal_bias_bits(sums) == pytest.approx([expected])
