import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lens.study.sweep as sweep
from lens.errors import ResultFileError, SelectionError
from lens.study.arms import PAIR, arm_of
from lens.study.building import build, matrices
from lens.study.sweep import (
    CELLS,
    Cell,
    read_sweep,
    reproduce_sweep,
    slopes,
    sweep_effects,
    sweep_recipe,
    sweep_table,
    targets_per_byte,
)
from tests.study.small import RECIPE, corpus

OPTIONS = {"tuning_steps": 2, "sample_positions": 32, "gradient_targets": 64, "last_documents": 3}
TINY = {c.name: c for c in (Cell(d_vocab=v, d_model=16, n_layers=2) for v in (280, 300, 320))}


@pytest.fixture
def tiny_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "CELLS", TINY)
    monkeypatch.setattr("lens.study.measured.TRANSLATOR_DOCUMENTS", 4)
    monkeypatch.setattr("lens.study.measured.GUESS_DOCUMENTS", 2)


def rows_where(difference: dict[str, float], seeds: int = 2) -> dict[str, list[dict[str, Any]]]:
    """Rows in which untied-copy differs from tied by so much in each cell, and seeds scatter."""

    def row(arm: str, seed: int, value: float) -> dict[str, Any]:
        same = {"texts": "t", "options": {}, "recipe": {}, "arm": {"name": arm}, "seed": seed}
        layers = [0.0, value, value, 0.0]
        branch = {"loss_bits": value, "reading_loss": layers, "not_there_yet": layers}
        return same | {"branches": [branch]}

    return {
        name: [
            row(arm, seed, 5.0 + seed + (value + 0.1 * (2 * seed - seeds + 1)) * (arm != "tied"))
            for seed in range(seeds)
            for arm in PAIR
        ]
        for name, value in difference.items()
    }


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_counts_what_its_model_has(name: str) -> None:
    cell = CELLS[name]
    recipe = cell.recipe(sweep_recipe())
    model = build(arm_of("tied"), recipe, 0)
    assert matrices(model)[0].numel() == cell.matrix_parameters
    blocks = model.get_submodule("transformer.h")
    counted = sum(p.numel() for p in blocks.parameters() if p.ndim == 2)
    assert counted == cell.block_parameters
    assert 2**cell.log2_share == pytest.approx(cell.matrix_parameters / counted)
    assert (recipe.trunk_rate, recipe.embedding_rate) == (5e-4, 8e-3)


def test_a_slope_that_is_there_is_found_and_none_where_there_is_none() -> None:
    found = slopes(
        sweep_effects(rows_where({n: 2 - 0.7 * c.log2_share for n, c in CELLS.items()}), "mean dG")
    )
    assert found.slope == pytest.approx([-0.7])
    assert found.half_width == pytest.approx([0.0], abs=1e-9)
    assert (found.n_cells, found.explained) == (9, pytest.approx(1.0))
    rng = np.random.default_rng(0)
    noise = {n: 2 + rng.normal() for n in CELLS}
    found = slopes(sweep_effects(rows_where(noise), "mean dG"))
    assert abs(found.slope[0]) < found.half_width[0]


def test_the_interval_of_a_slope_holds_it_nineteen_times_in_twenty() -> None:
    rng = np.random.default_rng(1)
    held, n = 0, 400
    for _ in range(n):
        values = {name: 0.3 * c.log2_share + rng.normal() for name, c in CELLS.items()}
        found = slopes(sweep_effects(rows_where(values, seeds=1), "held-out loss"))
        held += abs(found.slope[0] - 0.3) <= found.half_width[0]
    assert held / n == pytest.approx(0.95, abs=0.035)


def test_apart_tells_a_share_from_the_vocabulary_alone() -> None:
    share = {n: 0.5 * c.log2_share for n, c in CELLS.items()}
    found = slopes(sweep_effects(rows_where(share), "mean dG"), apart=True)
    assert found.slope == pytest.approx([0.5, -0.5])
    vocabulary = {n: 0.5 * np.log2(c.d_vocab) for n, c in CELLS.items()}
    found = slopes(sweep_effects(rows_where(vocabulary), "mean dG"), apart=True)
    assert found.slope == pytest.approx([0.5, 0.0], abs=1e-9)
    assert found.terms == ("log2 V", "log2(N / d)")


def test_too_few_cells_and_cells_alike_have_no_slope() -> None:
    names = list(CELLS)
    two = sweep_effects(rows_where(dict.fromkeys(names[:2], 1.0)), "mean dG")
    with pytest.raises(SelectionError, match="3 cells"):
        slopes(two)
    of_one_vocabulary = sweep_effects(rows_where(dict.fromkeys(names[:3], 1.0)), "mean dG")
    with pytest.raises(SelectionError, match="log2 V"):
        slopes(of_one_vocabulary, apart=True)


def test_a_cell_with_one_arm_has_no_effect() -> None:
    rows = rows_where(dict.fromkeys(CELLS, 1.0))
    name = next(iter(CELLS))
    rows[name] = [r for r in rows[name] if r["arm"]["name"] == "tied"]
    assert name not in sweep_effects(rows, "mean dG")
    assert len(sweep_effects(rows, "mean dG")) == len(CELLS) - 1


def test_a_sweep_is_trained_measured_written_and_not_run_again(
    tiny_cells: None, tmp_path: Path
) -> None:
    said: list[str] = []
    told = {"seeds": 1, "recipe": RECIPE, "measuring": OPTIONS, "progress": said.append}
    written = reproduce_sweep(corpus(), tmp_path / "runs", tmp_path / "results", **told)
    assert [p.relative_to(tmp_path / "results").as_posix() for p in written[:2]] == [
        "v280/d16-l2/tied-seed-0.json",
        "v280/d16-l2/untied-copy-seed-0.json",
    ]
    assert len(written) == 6
    assert any("v320-d16-l2" in line for line in said)
    gates = [json.loads(p.read_text()) for p in sorted((tmp_path / "results").glob("*/gate.json"))]
    assert len({gate["texts"] for gate in gates}) == 3
    rows = read_sweep(tmp_path / "results")
    assert list(rows) == list(TINY)
    for name, of_cell in rows.items():
        assert {row["recipe"]["d_vocab"] for row in of_cell} == {TINY[name].d_vocab}
    per_byte = targets_per_byte(tmp_path / "results")
    table = list(sweep_table(rows, per_byte))
    assert [line[0] for line in table] == ["cell", *TINY, "for each doubling"]
    own = rows["v280-d16-l2"]
    less = own[1]["branches"][-1]["loss_bits"] - own[0]["branches"][-1]["loss_bits"]
    assert table[1][3] == f"{less * per_byte[280]:+.3f}"
    # More tokens make fewer of them to a byte.
    assert per_byte[280] > per_byte[300] > per_byte[320] > 0
    # Nothing is trained twice; another seed is.
    assert reproduce_sweep(corpus(), tmp_path / "runs", tmp_path / "results", **told) == []
    more = told | {"seeds": 2, "cells": ["v300-d16-l2"]}
    written = reproduce_sweep(corpus(), tmp_path / "runs", tmp_path / "results", **more)
    assert [p.name for p in written] == ["tied-seed-1.json", "untied-copy-seed-1.json"]


def test_a_difference_in_bits_a_byte_is_that_of_the_cells_own_tokens() -> None:
    rows = rows_where(dict.fromkeys(CELLS, 1.0))
    rates = {512: 0.5, 2048: 0.25, 8192: 0.125}
    found = sweep_effects(rows, "held-out loss", rates)
    plain = sweep_effects(rows, "held-out loss")
    for name, one in found.items():
        rate = rates[CELLS[name].d_vocab]
        assert one.differences == pytest.approx(plain[name].differences * rate)
        assert one.half_width == pytest.approx(plain[name].half_width * rate)
    # What is the same in bits a token is none of the vocabulary's in bits a byte.
    assert slopes(found, apart=True).slope[0] < -0.05
    assert slopes(plain, apart=True).slope[0] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"held_out_targets": "x"}'])
def test_a_gate_without_its_lengths_is_refused(tmp_path: Path, text: str) -> None:
    assert targets_per_byte(tmp_path) == {}
    (tmp_path / "v512").mkdir()
    (tmp_path / "v512" / "gate.json").write_text(text)
    with pytest.raises(ResultFileError, match="how long its texts are"):
        targets_per_byte(tmp_path)


def test_an_unknown_cell_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SelectionError, match="v2048-d96-l6"):
        reproduce_sweep(corpus(), tmp_path, tmp_path, cells=["v1-d1-l1"])
    assert list(tmp_path.iterdir()) == []
