import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lens.errors import ResultFileError
from lens.study.arms import arm_of
from lens.study.gap import depth_by_entropy, measure_gap, read_gaps, write_gap
from lens.study.run import train
from lens.study.texts import study_texts
from tests.study.small import RECIPE, corpus, texts

FEW = {"positions": 48, "fit_positions": 48}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(arm_of("tied"), 0, texts(), RECIPE, tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def row(run: Path) -> dict[str, Any]:
    return measure_gap(run, texts(), **FEW)


def test_both_orders_begin_with_the_lens_and_have_as_many_terms(row: dict[str, Any]) -> None:
    assert row["layers"] == [0, 1]
    readout, other = row["orders"].values()
    assert sorted(readout["terms"]) == sorted(other["terms"])
    for place in range(2):
        assert readout["kl"][place][0] == other["kl"][place][0] > 0
        assert len(readout["kl"][place]) == len(readout["terms"]) + 1
        assert readout["temperature"][place][0] == 1.0
    assert readout["kl"][0][1] != other["kl"][0][1]


def test_depths_count_every_position_once(row: dict[str, Any]) -> None:
    totals = {kind: np.sum(counts) for kind, counts in row["depth"].items()}
    assert len(set(totals.values())) == 1
    mean, share = depth_by_entropy(row)
    assert share.sum() == pytest.approx(1.0)
    seen = ~np.isnan(mean)
    assert np.array_equal(seen, share > 0)
    assert ((mean[seen] >= 0) & (mean[seen] <= 1)).all()


def test_mean_depth_is_over_the_layers_of_those_that_settle() -> None:
    # Two bins: one at the embedding and one at the output; four that never settle.
    row = {"depth": {"top-1": [[1, 0, 1, 0], [0, 0, 0, 4]]}}
    mean, share = depth_by_entropy(row)
    assert mean[0] == 0.5
    assert np.isnan(mean[1])
    assert share.tolist() == pytest.approx([1 / 3, 2 / 3])


def test_a_file_comes_back_and_another_format_is_refused(
    run: Path, row: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lens.study.gap.measure_gap", lambda *_: row)
    path = write_gap(run, tmp_path, texts())
    assert path.name == "gap-tied-0.json"
    (found,) = read_gaps(tmp_path)
    assert found["orders"]["map first"]["kl"][0] == pytest.approx(
        row["orders"]["map first"]["kl"][0], rel=1e-5
    )
    assert found["depth"] == row["depth"]
    path.write_text(json.dumps(found | {"format": "other"}))
    with pytest.raises(ResultFileError, match="other"):
        read_gaps(tmp_path)


def test_an_unfinished_run_and_other_texts_are_refused(run: Path, tmp_path: Path) -> None:
    train(arm_of("tied"), 0, texts(), RECIPE, tmp_path / "r", stop_after=2)
    with pytest.raises(ResultFileError, match="finished"):
        measure_gap(tmp_path / "r", texts())
    other = study_texts(corpus().take(10), d_vocab=RECIPE.d_vocab)
    with pytest.raises(ResultFileError, match="other texts"):
        measure_gap(run, other)
