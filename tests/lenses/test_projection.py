"""The projection against its float64 definitions, from the same states."""

import dataclasses

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError

from lens.checkpoint.readout import Step
from lens.errors import SelectionError, ShapeError
from tests.lenses.reading import (
    SOFT_CAP,
    L,
    T,
    V,
    assert_equals_oracle,
    exact_logits,
    make_readout,
    make_replay,
    make_states,
    read,
)


@pytest.fixture(autouse=True, params=["fused", "torch"])
def path(request, monkeypatch):
    """Every law holds for the fused kernels and for torch alone."""
    if request.param == "torch":
        monkeypatch.setattr("lens.lenses.reduction.has_numba", lambda: False)
    return request.param


@pytest.fixture
def states():
    return make_states()


@pytest.mark.parametrize("steps", [(), SOFT_CAP, (Step("mul", 0.0625),), (Step("div", 8.0),)])
@pytest.mark.parametrize("bias", [True, False])
def test_every_number_equals_its_definition(states, steps, bias):
    readout = make_readout(steps=steps, bias=bias)
    lens = exact_logits(readout, states)
    assert_equals_oracle(read(readout, states), lens, lens[-1])


def test_the_oracle_rejects_a_missing_soft_cap(states):
    lens = exact_logits(make_readout(steps=SOFT_CAP), states)
    with pytest.raises(AssertionError):
        assert_equals_oracle(read(make_readout(), states), lens, lens[-1])


def test_a_replay_reads_the_same(states):
    direct = make_readout(steps=SOFT_CAP)
    lens = exact_logits(direct, states)
    assert_equals_oracle(read(make_replay(direct), states), lens, lens[-1])
    budget = 3 * 2 * 4 * V
    chunked = read(make_replay(direct), states, memory_budget_bytes=budget)
    assert_equals_oracle(chunked, lens, lens[-1])


@pytest.mark.parametrize(
    "kinds", [("direct", "direct"), ("direct", "replay"), ("replay", "direct")]
)
def test_kl_is_against_the_models_own_output(states, kinds):
    ours, theirs = make_readout(seed=4), make_readout(seed=5, bias=False)
    wrap = {"direct": lambda r: r, "replay": make_replay}
    result = read(wrap[kinds[0]](ours), states, final_readout=wrap[kinds[1]](theirs))
    final = exact_logits(theirs, states[-1])
    assert_equals_oracle(result, exact_logits(ours, states), final)


def test_final_states_that_are_no_layer_still_stand_as_the_reference(states):
    readout = make_readout()
    result = read(readout, states[:-1], final_states=states[-1])
    lens = exact_logits(readout, states)
    assert_equals_oracle(result, lens[:-1], lens[-1])


def test_the_final_rows_have_no_divergence_from_themselves(states):
    result = read(make_readout(), states)
    assert (result.kl_bits[-1] == 0).all()
    assert (result.reverse_kl_bits[-1] == 0).all()
    assert (result.final_top_rank[-1] == 0).all()
    assert np.array_equal(result.top_ids[-1, :, 0], result.final_top_ids)
    assert (result.kl_bits[:-1] > 0).all()


def test_one_equal_position_has_no_divergence_and_its_neighbours_do(states):
    states[1, 3] = states[-1, 3]
    result = read(make_readout(), states)
    assert result.kl_bits[1, 3] == 0
    assert result.kl_bits[1, 4] > 0.1


def test_a_missing_logit_counts_as_no_probability(states):
    readout = make_readout()
    readout.unembedding.bias[100:900] = -torch.inf
    lens = exact_logits(readout, states)
    assert_equals_oracle(read(readout, states), lens, lens[-1])


def test_a_token_that_the_lens_excludes_but_the_model_expects_makes_kl_infinite(states):
    ours, theirs = make_readout(), make_readout()
    ours.unembedding.bias[100:900] = -torch.inf
    result = read(ours, states, final_readout=theirs)
    assert (result.kl_bits == np.inf).all()
    assert np.isfinite(result.reverse_kl_bits).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_an_unreadable_row_says_so_and_leaves_the_others(states, bad):
    readout = make_readout()
    whole = read(readout, states)
    states[2, 4] = bad
    result = read(readout, states, final_states=states[-1])
    assert np.isnan(result.entropy_bits[2, 4])
    assert np.isnan(result.kl_bits[2, 4])
    assert (result.top_ids[2, 4] == -1).all()
    assert result.target_rank[2, 4] == -1
    keep = np.ones((L, T), dtype=bool)
    keep[2, 4] = False
    for field in dataclasses.fields(result):
        ours, theirs = getattr(result, field.name), getattr(whole, field.name)
        if ours.shape[:2] == keep.shape:
            np.testing.assert_array_equal(ours[keep], theirs[keep])


def test_equal_logits_go_to_the_lower_id_across_blocks_and_tiles(states):
    readout = make_readout(bias=False)
    weight = readout.unembedding.weight
    for copy in (1, 64, 70, 1030, 1499):
        weight[copy] = weight[0]
    result = read(readout, states, top_k=9)
    # One product gives equal rows equal logits, so the ties are exact.
    for cell in result.top_ids.reshape(-1, 9):
        places = [i for i in cell.tolist() if i in (0, 1, 64, 70, 1030, 1499)]
        assert places == [0, 1, 64, 70, 1030, 1499][: len(places)]
    assert (result.top_ids == 0).any()


def test_a_budget_changes_rounding_alone(states):
    readout = make_readout()
    small = read(readout, states, memory_budget_bytes=2**17)
    lens = exact_logits(readout, states)
    assert_equals_oracle(small, lens, lens[-1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_weight_is_widened_not_rounded_again(states, dtype):
    readout = make_readout(dtype=dtype)
    lens = exact_logits(readout, states)
    assert_equals_oracle(read(readout, states), lens, lens[-1])


def test_what_does_not_fit_is_refused_by_name(states):
    readout = make_readout()
    with pytest.raises(SelectionError, match="target_ids holds"):
        read(readout, states, target_ids=torch.full((T,), V))
    with pytest.raises(SelectionError, match="top_k is 0"):
        read(readout, states, top_k=0)
    with pytest.raises(SelectionError, match="set 0 is empty"):
        read(readout, states, sets=((),))
    with pytest.raises((ShapeError, TypeCheckError)):
        read(readout, states, final_states=states[-1, :-1])
    with pytest.raises(ShapeError, match="one vocabulary"):
        read(readout, states, final_readout=make_readout(d_vocab=V - 1))
