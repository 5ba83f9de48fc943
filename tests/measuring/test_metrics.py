"""Each measure against a closed form, an identity or a limit."""

import math

import numpy as np
import pytest

from lens.measuring import metrics


@pytest.fixture
def pair():
    """Logits of a model and of a lens, [cell, vocabulary]."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(6, 40)) * 3, rng.normal(size=(6, 40)) * 3


def binary(probability):
    """Logits of a distribution over two tokens."""
    return np.log(np.array([probability, 1 - probability]))


def test_a_uniform_distribution_has_log2_of_its_size():
    for size in (1, 2, 1000):
        assert metrics.entropy_bits(np.full(size, 7.0)) == pytest.approx(math.log2(size))
        assert metrics.lse_bits(np.full(size, 7.0)) == pytest.approx(
            7 / math.log(2) + math.log2(size)
        )


def test_a_constant_added_to_the_logits_changes_nothing_but_the_log_sum_exp(pair):
    final, lens = pair
    np.testing.assert_allclose(metrics.entropy_bits(lens + 500), metrics.entropy_bits(lens))
    np.testing.assert_allclose(metrics.kl_bits(final + 9, lens - 300), metrics.kl_bits(final, lens))
    moved = metrics.lse_bits(lens + 500) - metrics.lse_bits(lens)
    np.testing.assert_allclose(moved, 500 / math.log(2))


def test_kl_of_two_coins_has_its_closed_form():
    expected = 0.5 * math.log2(0.5 / 0.25) + 0.5 * math.log2(0.5 / 0.75)
    fair, bent = binary(0.5), binary(0.25)
    assert metrics.kl_bits(fair, bent) == pytest.approx(expected)
    reverse = 0.25 * math.log2(0.25 / 0.5) + 0.75 * math.log2(0.75 / 0.5)
    assert metrics.reverse_kl_bits(fair, bent) == pytest.approx(reverse)
    assert metrics.total_variation(fair, bent) == pytest.approx(0.25)
    assert reverse != pytest.approx(expected)


def test_divergences_are_zero_on_themselves_and_positive_elsewhere(pair):
    final, lens = pair
    for divergence in (
        metrics.kl_bits,
        metrics.reverse_kl_bits,
        metrics.js_bits,
        metrics.total_variation,
    ):
        assert np.array_equal(divergence(final, final), np.zeros(6))
        assert (divergence(final, lens) > 0).all()


def test_disjoint_distributions_are_one_bit_and_all_mass_apart():
    final, lens = np.array([0.0, -np.inf]), np.array([-np.inf, 0.0])
    assert metrics.js_bits(final, lens) == 1
    assert metrics.total_variation(final, lens) == 1
    assert metrics.kl_bits(final, lens) == np.inf


def test_js_is_the_mean_of_two_divergences_from_the_mixture(pair):
    final, lens = (np.exp2(metrics.logprob_bits(x)) for x in pair)
    middle = np.log((final + lens) / 2)
    expected = 0.5 * (metrics.kl_bits(pair[0], middle) + metrics.kl_bits(pair[1], middle))
    np.testing.assert_allclose(metrics.js_bits(*pair), expected)


def test_a_token_without_probability_counts_nothing(pair):
    final, lens = pair
    final, lens = final.copy(), lens.copy()
    final[:, 5], lens[:, 5] = -np.inf, -np.inf
    keep = np.arange(40) != 5
    np.testing.assert_allclose(metrics.entropy_bits(lens), metrics.entropy_bits(lens[:, keep]))
    np.testing.assert_allclose(
        metrics.kl_bits(final, lens), metrics.kl_bits(final[:, keep], lens[:, keep])
    )


def test_cross_entropy_is_entropy_plus_kl(pair):
    final, lens = pair
    p = np.exp2(metrics.logprob_bits(final))
    each = np.stack([metrics.cross_entropy_bits(lens, np.full(6, v)) for v in range(40)], -1)
    total = metrics.entropy_bits(final) + metrics.kl_bits(final, lens)
    np.testing.assert_allclose((p * each).sum(-1), total)


def test_perplexity_of_a_uniform_guess_is_the_vocabulary():
    bits = metrics.cross_entropy_bits(np.zeros((1, 50)), np.array([3]))
    assert metrics.perplexity(float(bits[0])) == pytest.approx(50)


def test_ranks_count_what_is_strictly_higher():
    logits = np.array([[3.0, 1.0, 3.0, 2.0, 1.0]])
    ranks = [int(metrics.rank(logits, np.array([v]))[0]) for v in range(5)]
    assert ranks == [0, 3, 0, 2, 3]
    assert [int(metrics.ties(logits, np.array([v]))[0]) for v in range(5)] == [1, 1, 1, 0, 1]
    assert metrics.reciprocal_rank(logits, np.array([0]))[0] == pytest.approx(1 / 1.5)
    assert metrics.top_ids(logits, 4).tolist() == [[0, 2, 3, 1]]


def test_a_tied_top_is_the_lower_id_in_every_measure():
    final, lens = np.array([[0.0, 5.0, 5.0]]), np.array([[9.0, 9.0, 1.0]])
    assert metrics.top_ids(final, 1)[0, 0] == 1
    assert not metrics.agreement(final, lens)[0]
    assert metrics.agreement(final, np.array([[0.0, 9.0, 9.0]]))[0]


def test_overlap_is_a_share_of_the_best():
    final, lens = np.array([[4.0, 3.0, 2.0, 1.0]]), np.array([[4.0, 1.0, 2.0, 3.0]])
    assert metrics.top_k_overlap(final, lens, 1)[0] == 1
    assert metrics.top_k_overlap(final, lens, 2)[0] == 0.5
    assert metrics.top_k_overlap(final, lens, 4)[0] == 1


def test_a_set_has_the_sum_of_its_probabilities(pair):
    _, lens = pair
    probability = np.exp2(metrics.logprob_bits(lens))
    expected = probability[:, [1, 7, 30]].sum(-1)
    np.testing.assert_allclose(np.exp2(metrics.set_logprob_bits(lens, (1, 7, 30))), expected)
    np.testing.assert_allclose(metrics.set_logprob_bits(lens, tuple(range(40))), 0, atol=1e-12)


def test_the_copy_split_is_the_whole_divergence(pair):
    final, lens = pair
    ids = np.arange(6)
    copied, rest = metrics.copy_split_bits(final, lens, ids)
    np.testing.assert_allclose(copied + rest, metrics.kl_bits(final, lens))
    assert (copied > 0).all()
    assert (rest > 0).all()
    p, q = metrics.self_copy_mass(final, ids), metrics.self_copy_mass(lens, ids)
    expected = p * np.log2(p / q) + (1 - p) * np.log2((1 - p) / (1 - q))
    np.testing.assert_allclose(copied, expected)


def test_what_is_left_beside_a_certain_token_is_not_lost():
    logits = np.array([[100.0, 0.0, 0.0]])
    left = metrics.rest_lse_bits(logits, np.array([0])) - metrics.lse_bits(logits)
    assert left[0] == pytest.approx(1 - 100 / math.log(2))
    assert 1 - metrics.self_copy_mass(logits, np.array([0]))[0] == 0  # the way that loses it


def test_brier_is_zero_for_certainty_two_for_a_certain_error():
    certain = np.array([[0.0, -np.inf]])
    assert metrics.brier(certain, np.array([0]))[0] == 0
    assert metrics.brier(certain, np.array([1]))[0] == 2
    assert metrics.brier(np.zeros((1, 4)), np.array([2]))[0] == pytest.approx(0.75)


def test_collision_mass_is_that_of_two_draws():
    assert metrics.collision_mass(np.zeros(8)) == pytest.approx(1 / 8)
    assert metrics.collision_mass(binary(0.3)) == pytest.approx(0.09 + 0.49)


def test_marginal_bias_is_at_most_the_mean_divergence(pair):
    final, lens = pair
    bias = metrics.marginal_bias_bits(final, lens)
    assert 0 < bias < metrics.kl_bits(final, lens).mean()
    mean = np.log(np.exp2(metrics.logprob_bits(final)).mean(0))
    other = np.log(np.exp2(metrics.logprob_bits(lens)).mean(0))
    assert bias == pytest.approx(float(metrics.kl_bits(mean, other)))


def test_marginal_bias_sees_a_constant_shift_and_no_permuted_reading(pair):
    final, _ = pair
    permuted = final[[1, 2, 3, 4, 5, 0]]
    assert metrics.marginal_bias_bits(final, permuted) == pytest.approx(0, abs=1e-12)
    assert metrics.kl_bits(final, permuted).mean() > 1
    shifted = final + np.linspace(0, 3, 40)
    assert metrics.marginal_bias_bits(final, shifted) > 0.01


def test_float32_logits_are_widened_first():
    logits = np.array([88.0, 88.0, -1e4], dtype=np.float32)
    assert metrics.entropy_bits(logits) == pytest.approx(1)
    assert metrics.logprob_bits(logits).dtype == np.float64
