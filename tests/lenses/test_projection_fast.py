"""The fast mode: named tokens as exact as ever, sums over the vocabulary rough."""

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError

from lens.errors import SelectionError
from lens.measuring import metrics
from tests.lenses.reading import T, exact_logits, make_readout, make_states, read, tokens


@pytest.fixture
def states():
    return make_states()


def test_named_tokens_have_float32_logits_and_the_order_of_float32(states):
    readout = make_readout()
    exact, fast = read(readout, states), read(readout, states, mode="fast")
    lens = exact_logits(readout, states)
    assert np.array_equal(fast.top_ids, exact.top_ids)
    assert np.array_equal(fast.final_top_ids, exact.final_top_ids)
    for result, bound in ((exact, 1e-4), (fast, 1e-4)):
        lse = result.lse_bits[..., None]
        logits = (result.top_logprob_bits + lse) / metrics.NATS_TO_BITS
        expected = np.take_along_axis(lens, result.top_ids, -1)
        np.testing.assert_allclose(logits, expected, atol=bound)
    target = tokens(3).numpy()[:-1]
    logits = (fast.target_logprob_bits + fast.lse_bits)[:, :-1] / metrics.NATS_TO_BITS
    np.testing.assert_allclose(logits, lens[:, np.arange(T - 1), target], atol=1e-4)


def test_sums_are_near_but_not_exact(states):
    readout = make_readout()
    fast = read(readout, states, mode="fast")
    lens = exact_logits(readout, states)
    error = np.abs(fast.entropy_bits - metrics.entropy_bits(lens))
    assert error.max() < 0.5
    assert error.max() > 1e-3  # or the mark would be for nothing
    assert (fast.kl_bits[-1] == 0).all()


def test_a_bfloat16_weight_is_read_as_it_is(states):
    readout = make_readout(dtype=torch.bfloat16)
    fast = read(readout, states, mode="fast")
    assert np.array_equal(fast.top_ids, read(readout, states).top_ids)


def test_an_unknown_mode_is_refused(states):
    with pytest.raises((SelectionError, TypeCheckError), match="mode"):
        read(make_readout(), states, mode="faster")
