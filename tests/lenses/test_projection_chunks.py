"""Cutting the work up changes no number, and keeps memory and threads as promised."""

import dataclasses

import numpy as np
import pytest
import torch

from lens.errors import SelectionError
from lens.lenses import chunks, projection
from lens.lenses.guess import guess_final_top
from lens.lenses.tiles import DirectRows
from tests.lenses.reading import D, L, V, exact_logits, make_readout, make_replay, make_states, read

BUDGET = 1_500_000
"""Bytes: about 140 rows a chunk, so a few chunks for the states here."""


def assert_same_bits(a, b):
    for field in dataclasses.fields(a):
        np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name), field.name)


@pytest.fixture
def states():
    return make_states(n_positions=150)


@pytest.mark.parametrize("workers", [2, 3, 8])
@pytest.mark.parametrize("path", ["fused", "torch"])
def test_the_number_of_workers_changes_no_bit(states, workers, path, monkeypatch):
    monkeypatch.setattr("lens.lenses.reduction.has_numba", lambda: path == "fused")
    readout = make_readout()
    one = read(readout, states, workers=1, memory_budget_bytes=BUDGET)
    source = chunks.Source(readout, states, readout, states[-1])
    assert len(chunks.plan(source, memory_budget_bytes=BUDGET)) >= 4
    assert_same_bits(one, read(readout, states, workers=workers, memory_budget_bytes=BUDGET))
    with pytest.raises(AssertionError):
        assert_same_bits(one, read(readout, states + 1e-6, memory_budget_bytes=BUDGET))


def test_an_error_in_a_worker_reaches_the_caller(states, monkeypatch):
    def fail(self, first):
        raise ZeroDivisionError

    monkeypatch.setattr(DirectRows, "tile", fail)
    with pytest.raises(ZeroDivisionError):
        read(make_readout(), states, workers=2, memory_budget_bytes=BUDGET)


def test_the_threads_of_torch_are_as_before(states, monkeypatch):
    seen = []
    tile = DirectRows.tile

    def watch(self, first):
        seen.append(torch.get_num_threads())
        return tile(self, first)

    monkeypatch.setattr(DirectRows, "tile", watch)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        read(make_readout(), states, memory_budget_bytes=BUDGET)
        assert torch.get_num_threads() == 2
        assert set(seen) == {1}
        monkeypatch.setattr(DirectRows, "chosen", lambda self, ids: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            read(make_readout(), states)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_failed_allocation_halves_the_chunk_and_goes_on(states, monkeypatch):
    readout = make_readout()
    made = []
    build = DirectRows.__init__

    def scarce(self, unembedding, *, max_rows, **options):
        made.append(max_rows)
        if max_rows > 100:
            raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate")
        build(self, unembedding, max_rows=max_rows, **options)

    whole = read(readout, states)
    monkeypatch.setattr(projection, "guess_final_top", lambda *_, **__: torch.zeros(150).long())
    monkeypatch.setattr(DirectRows, "__init__", scarce)
    halved = read(readout, states, workers=1)
    assert max(made) > 100
    assert min(made) <= 100
    np.testing.assert_array_equal(halved.top_ids, whole.top_ids)
    np.testing.assert_allclose(halved.kl_bits, whole.kl_bits, rtol=1e-5, atol=1e-5)
    assert np.isfinite(halved.entropy_bits).all()


def test_another_error_is_not_taken_for_a_lack_of_memory(states, monkeypatch):
    def broken(self, *prepared):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(DirectRows, "load", broken)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        read(make_readout(), states)


def test_memory_that_never_suffices_is_an_error(states, monkeypatch):
    def none(self, unembedding, **options):
        raise MemoryError

    monkeypatch.setattr(projection, "guess_final_top", lambda *_, **__: torch.zeros(150).long())
    monkeypatch.setattr(DirectRows, "__init__", none)
    with pytest.raises(MemoryError):
        read(make_readout(), states)


@pytest.mark.parametrize("budget", [200_000, 1_000_000, 4_000_000])
def test_buffers_keep_to_the_budget(states, budget, monkeypatch):
    held = []
    empty = DirectRows._empty

    def count(self, *shape, dtype=torch.float32):
        held.append(torch.Size(shape).numel() * dtype.itemsize)
        return empty(self, *shape, dtype=dtype)

    monkeypatch.setattr(DirectRows, "_empty", count)
    monkeypatch.setattr(projection, "guess_final_top", lambda *_, **__: torch.zeros(150).long())
    read(make_readout(), states, workers=2, memory_budget_bytes=budget)
    assert 0 < sum(held) <= budget


def test_a_budget_without_room_for_a_row_is_refused(states):
    with pytest.raises(SelectionError, match="holds not one row"):
        read(make_readout(), states, memory_budget_bytes=100)
    with pytest.raises(SelectionError, match="give at least 1"):
        read(make_readout(), states, workers=0)


def test_only_the_asked_rows_are_multiplied(states, monkeypatch):
    """Layers x positions once, and the final rows once more for the guess; nothing besides."""
    rows = []
    tile = DirectRows.tile

    def count(self, first):
        if first == 0:
            rows.append(self.n_rows)
        return tile(self, first)

    monkeypatch.setattr(DirectRows, "tile", count)
    read(make_readout(), states)
    assert sum(rows) == L * 150 + 150
    rows.clear()
    read(make_readout(), states[-1:])  # nothing but the final rows: no guess is needed
    assert sum(rows) == 150


def test_a_replay_is_run_once_for_each_layer_and_once_for_the_final_rows(states):
    calls = []
    replay = make_replay(make_readout())
    logits = replay.logits
    replay.logits = lambda states, inputs=None: (
        calls.append((states.shape, inputs)) or logits(states)
    )
    read(replay, states, replay_inputs="inputs")
    assert calls == [((1, 150, D), "inputs")] * (L + 1)
    calls.clear()
    # In pieces the inputs no longer fit, so they are not handed on.
    read(replay, states, replay_inputs="inputs", memory_budget_bytes=40 * 2 * 2 * 4 * V)
    assert {inputs for _, inputs in calls} == {None}
    assert max(shape[1] for shape, _ in calls) <= 40


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("path", ["fused", "torch"])
def test_the_guess_is_right_in_either_width(states, narrow, path, monkeypatch):
    monkeypatch.setattr("lens.lenses.reduction.has_numba", lambda: path == "fused")
    monkeypatch.setattr("lens.lenses.guess.multiplies_bfloat16", lambda: narrow)
    readout = make_readout()
    source = chunks.Source(readout, states, readout, states[0])
    exact = exact_logits(readout, states[0])
    assert np.array_equal(guess_final_top(source).numpy(), exact.argmax(-1))
    assert np.array_equal(guess_final_top(source, max_rows=40).numpy(), exact.argmax(-1))
    rounded = readout.prepare(states[0]).bfloat16() @ readout.unembedding.weight.bfloat16().T
    assert (rounded.float().numpy().argmax(-1) != exact.argmax(-1)).any()  # without a second look


def test_a_wrong_guess_of_the_final_top_is_found_and_counted_again(states, monkeypatch):
    readout = make_readout()
    right = read(readout, states)
    monkeypatch.setattr(projection, "guess_final_top", lambda *_, **__: torch.zeros(150).long())
    assert_same_bits(right, read(readout, states))
    top = exact_logits(readout, states[-1]).argmax(-1)
    assert (top != 0).any()
    assert np.array_equal(right.final_top_ids, top)


@pytest.mark.parametrize("n_positions", [150, 128, 73, 11])
@pytest.mark.parametrize("rows", [33, 14, 9])
def test_two_workers_get_as_many_chunks(n_positions, rows, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_ROWS", rows)
    readout, states = make_readout(), make_states(n_positions=n_positions)
    source = chunks.Source(readout, states, readout, states[-1])
    cells = chunks.plan(source, memory_budget_bytes=None)
    sizes = [each.positions.stop - each.positions.start for each in cells]
    assert sum(sizes) == n_positions
    assert len(cells) % 2 == 0 or set(sizes) == {1}
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    assert len(cells) > 1
    assert max(sizes) * states.shape[0] <= rows
