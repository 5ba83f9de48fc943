import json
import math
from pathlib import Path
from typing import Any

import pytest

from lens.errors import TrainingDivergedError
from lens.study.arms import arm_of
from lens.study.rates import FACTORS, FOUND, Tuned, read_rates, tune_rates, write_rates
from lens.study.recipe import Recipe
from tests.study.small import RECIPE, texts


def valley(
    monkeypatch: pytest.MonkeyPatch, trunk: float, embedding: float
) -> list[tuple[float, float]]:
    """In place of training a loss that is least at these factors; returns the points asked for."""
    asked: list[tuple[float, float]] = []

    def loss(_arm: Any, _texts: Any, recipe: Recipe, *_: Any) -> float:
        point = recipe.trunk_rate / RECIPE.trunk_rate, recipe.embedding_rate / RECIPE.embedding_rate
        asked.append(point)
        return abs(math.log(point[0] / trunk)) + abs(math.log(point[1] / embedding))

    monkeypatch.setattr("lens.study.rates._loss", loss)
    return asked


def tuned(folder: Path) -> Tuned:
    return tune_rates(arm_of("tied"), texts(), RECIPE, folder)


@pytest.mark.parametrize(("trunk", "embedding"), [(1.0, 2.0), (2.0, 1.0), (2.0, 2.0)])
def test_the_bottom_of_a_valley_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trunk: float, embedding: float
) -> None:
    valley(monkeypatch, trunk, embedding)
    found = tuned(tmp_path)
    assert (found.trunk, found.embedding, found.at_edge) == (trunk, embedding, ())
    assert json.loads((tmp_path / FOUND).read_text())["trunk"] == trunk


def test_a_search_comes_back_from_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    valley(monkeypatch, 1.0, 2.0)
    found = tuned(tmp_path)
    results = tmp_path / "results"
    assert read_rates(results) == []
    assert write_rates(found, results).name == "rates-tied.json"
    assert read_rates(results) == [found]


def test_a_best_rate_at_the_edge_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    valley(monkeypatch, FACTORS[0] / 8, FACTORS[-1] * 8)
    assert tuned(tmp_path).at_edge == ("trunk", "embedding")


def test_no_point_is_tried_twice_and_none_behind_a_rise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = valley(monkeypatch, 1.0, 1.0)
    tuned(tmp_path)
    assert len(asked) == len(set(asked))
    assert (4.0, 1.0) not in asked


def test_a_point_is_trained_on_a_quarter_and_kept(tmp_path: Path) -> None:
    first = tune_rates(arm_of("tied"), texts(), RECIPE, tmp_path, factors=(1.0, 2.0))
    assert all(0 < loss < 9 for *_, loss in first.losses)
    quarter = RECIPE.quarter(2.0, 1.0)
    assert quarter.trunk_rate == 2 * RECIPE.trunk_rate
    assert quarter.segments[-1].last <= RECIPE.segments[-1].last // 4 + 1
    kept = next(tmp_path.glob("trunk-1-embedding-1/loss.json"))
    kept.write_text('{"held_out_bits": 0.5}')
    again = tune_rates(arm_of("tied"), texts(), RECIPE, tmp_path, factors=(1.0, 2.0))
    assert (1.0, 1.0, 0.5) in again.losses


def test_a_point_that_diverged_is_the_end_of_a_rise_and_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tune() -> Tuned:
        return tune_rates(arm_of("tied"), texts(), RECIPE, tmp_path, factors=(1.0, 1e34, 1e35))

    found = tune()
    assert (found.trunk, found.embedding) == (1.0, 1.0)
    assert {(t, e) for t, e, loss in found.losses if math.isinf(loss)} == {(1e34, 1.0), (1.0, 1e34)}
    assert json.loads((tmp_path / FOUND).read_text())["losses"][-1] == [1e34, 1.0, None]
    monkeypatch.setattr("lens.study.rates.train", None)  # nothing is trained again
    assert tune() == found


def test_rates_of_which_none_holds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingDivergedError, match=r"every rate that was tried.*1e\+34, 1e\+35"):
        tune_rates(arm_of("tied"), texts(), RECIPE, tmp_path, factors=(1e34, 1e35))
