import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lens.errors import ResultFileError, SelectionError
from lens.study.arms import arm_of
from lens.study.effects import at_equal_loss, effect
from lens.study.measured import measure_run, read_rows, write_row
from lens.study.run import train
from lens.study.texts import study_texts
from lens.study.twins import reproduce_study
from tests.study.small import RECIPE, corpus, texts

OPTIONS = {"tuning_steps": 2, "sample_positions": 32, "gradient_targets": 64}


@pytest.fixture(scope="module", autouse=True)
def few_documents() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lens.study.measured.TRANSLATOR_DOCUMENTS", 4)
        patch.setattr("lens.study.measured.GUESS_DOCUMENTS", 2)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    return train(arm_of("untied-own"), 0, texts(), RECIPE, folder)


@pytest.fixture(scope="module")
def row(run: Path) -> dict[str, Any]:
    return measure_run(run, texts(), **OPTIONS)


def test_a_run_gives_a_row_for_each_branch_whose_parts_add_up(row: dict[str, Any]) -> None:
    assert [b["at"] for b in row["branches"]] == list(RECIPE.branch_at)
    for branch in row["branches"]:
        assert branch["kl"][-1] == branch["reading_loss"][-1] == branch["not_there_yet"][-1] == 0.0
        assert branch["usefulness"][-1] == 0.0
        parts = np.add(branch["reading_loss"], branch["not_there_yet"])
        assert parts == pytest.approx(np.array(branch["kl"]))
        assert np.all(np.array(branch["kl"][:-1]) > 0)
        assert branch["tie"].startswith("untied")
        written = branch["written"]
        assert sum(v for k, v in written.items() if k != "last mlp") == pytest.approx(1.0)
        assert 0 < branch["gradients"]["adam_output_share"] < 1
    late = row["branches"][-1]
    assert late["tokens"] == 11 * 64
    assert late["n_documents"] == len(texts().held_out)


def test_the_loss_of_a_row_is_the_model_s_own(run: Path, row: dict[str, Any]) -> None:
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    from lens.study.held_out import held_out_loss_bits

    model = AutoModelForCausalLM.from_pretrained(run / "branch-00008")
    own = held_out_loss_bits(model, texts(), window_tokens=RECIPE.window_tokens)
    assert row["branches"][-1]["loss_bits"] == pytest.approx(own, abs=1e-6)
    # Position 0 of each window is left out of the lens' means.
    assert row["branches"][-1]["held_out_bits"] == pytest.approx(own, abs=0.15)
    assert row["branches"][-1]["held_out_bits"] != pytest.approx(own, abs=1e-6)


def test_a_branch_is_not_measured_twice_and_other_options_measure_it_again(
    run: Path, row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr("lens.study.measured.measure_checkpoint", refuse)
    assert measure_run(run, texts(), **OPTIONS) == row
    with pytest.raises(AssertionError, match="again"):
        measure_run(run, texts(), **{**OPTIONS, "tuning_steps": 5})


def test_a_part_that_a_row_lacks_is_added_and_the_rest_stays(
    run: Path, row: dict[str, Any]
) -> None:
    path = run / "branch-00008" / "measured.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in whole.items() if k != "written"} | {"kl": [1.0]}))
    again = measure_run(run, texts(), **OPTIONS)["branches"][-1]
    assert again["written"] == pytest.approx(whole["written"])
    assert again["kl"] == [1.0]
    path.write_text(json.dumps(whole))


def test_rows_come_back_from_disk(row: dict[str, Any], tmp_path: Path) -> None:
    path = write_row(row, tmp_path)
    (found,) = read_rows(tmp_path)
    assert path.name == "untied-own-seed-0.json"
    assert found["branches"][-1]["kl"] == pytest.approx(row["branches"][-1]["kl"], rel=1e-5)
    path.write_text("{")
    with pytest.raises(ResultFileError, match="JSON"):
        read_rows(tmp_path)
    path.write_text(json.dumps(found | {"format": "other"}))
    with pytest.raises(ResultFileError, match="other"):
        read_rows(tmp_path)


def test_an_unfinished_run_or_other_texts_are_refused(run: Path, tmp_path: Path) -> None:
    train(arm_of("tied"), 0, texts(), RECIPE, tmp_path / "r", stop_after=2)
    with pytest.raises(ResultFileError, match="finished"):
        measure_run(tmp_path / "r", texts())
    other = study_texts(corpus().take(10), d_vocab=RECIPE.d_vocab)
    with pytest.raises(ResultFileError, match="other texts"):
        measure_run(run, other)


def test_a_row_of_the_study_is_trained_measured_and_written(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    (path,) = reproduce_study(
        corpus(),
        tmp_path / "runs",
        tmp_path / "results",
        rows=["tied-seed-1"],
        recipe=RECIPE,
        measuring=OPTIONS,
        progress=said.append,
    )
    assert path == tmp_path / "results" / "tied-seed-1.json"
    assert not (tmp_path / "runs" / "tied-seed-1" / "branch-00004" / "model.safetensors").exists()
    assert (tmp_path / "runs" / "tied-seed-1" / "branch-00008" / "model.safetensors").exists()
    assert any("measured" in line for line in said)
    gate = json.loads((tmp_path / "results" / "gate.json").read_text())
    assert gate["texts"] == json.loads(path.read_text())["texts"] == texts().hash
    assert gate["bits"]["trigram"] < gate["bits"]["bigram"]
    with pytest.raises(SelectionError, match="no row"):
        reproduce_study(corpus(), tmp_path, tmp_path, rows=["tide"], recipe=RECIPE)


def made(arm: str, seed: int, kls: list[list[float]], losses: list[float]) -> dict[str, Any]:
    branches = [
        {"kl": kl, "reading_loss": kl, "loss_bits": loss}
        for kl, loss in zip(kls, losses, strict=True)
    ]
    return {
        "arm": {"name": arm},
        "seed": seed,
        "texts": "t",
        "options": {},
        "recipe": {"trunk_rate": 1.0},
        "branches": branches,
    }


def pair(difference: float, seed: int) -> list[dict[str, Any]]:
    base = [9.0 + seed, 5.0, 3.0, 0.0]
    other = [base[0], base[1] + difference, base[2] + difference, 0.0]
    return [made("tied", seed, [base], [6.0]), made("untied-copy", seed, [other], [6.0])]


def test_an_effect_is_signed_and_paired_by_seed() -> None:
    rows = [r for seed in range(5) for r in pair(-0.5 - 0.01 * seed, seed)]
    found = effect(rows, "untied-copy", "tied", "reading loss G")
    assert found.seeds == (0, 1, 2, 3, 4)
    assert found.mean == pytest.approx([0.0, -0.52, -0.52, 0.0])
    # Layer 0 differs from seed to seed by whole bits, and not at all within one.
    assert found.half_width[0] == 0.0
    assert found.half_width[1] == pytest.approx(2.776 * 0.0158114 / 5**0.5, rel=1e-3)
    assert found.p[1] == 2 / 2**5
    turned = effect(rows, "tied", "untied-copy", "reading loss G")
    assert turned.mean == pytest.approx(-found.mean)
    mean = effect(rows, "untied-copy", "tied", "mean dG")
    assert mean.mean == pytest.approx([-0.52])


def test_what_is_no_effect_has_no_small_p() -> None:
    rows = [r for seed in range(8) for r in pair(0.3 * (-1) ** seed, seed)]
    found = effect(rows, "untied-copy", "tied", "mean dG")
    assert found.mean == pytest.approx([0.0])
    assert found.p[0] > 0.5


def test_arms_that_differ_only_in_loss_agree_at_equal_loss() -> None:
    def run_of(arm: str, seed: int, losses: list[float]) -> dict[str, Any]:
        return made(arm, seed, [[2 * x, x, x / 2, 0.0] for x in losses], losses)

    rows = [
        run_of(arm, seed, losses)
        for seed in range(2)
        for arm, losses in (("tied", [9.0, 7.0, 5.0]), ("untied-copy", [8.0, 6.0, 4.0]))
    ]
    assert effect(rows, "untied-copy", "tied", "KL").mean[0] == pytest.approx(-2.0)
    points, found = at_equal_loss(rows, "untied-copy", "tied", "KL")
    assert (points.min(), points.max()) == (5.0, 8.0)
    assert np.abs(found).max() < 1e-12


def test_equal_loss_is_told_of_branches_with_the_same_documents() -> None:
    """A last branch on other documents reads 10 bits worse, in both arms: none of it is used."""
    rows = []
    for arm, losses in (("tied", [9.0, 7.0, 5.0, 3.0]), ("untied-copy", [8.0, 6.0, 4.0, 2.0])):
        curves = [[2 * x, x, x / 2, 0.0] for x in losses[:-1]] + [[10.0 * losses[0]] * 4]
        row = made(arm, 0, curves, losses)
        for branch in row["branches"]:
            branch["n_documents"] = 24
        row["branches"][-1]["n_documents"] = 200
        rows.append(row)
    points, found = at_equal_loss(rows, "untied-copy", "tied", "KL")
    assert (points.min(), points.max()) == (5.0, 8.0)
    assert np.abs(found).max() < 1e-12
    for row in rows:
        row["branches"][-1]["n_documents"] = 24
    points, found = at_equal_loss(rows, "untied-copy", "tied", "KL")
    assert points.min() == 3.0
    assert np.abs(found).max() > 1


def test_runs_that_are_not_alike_are_not_compared() -> None:
    rows = pair(1.0, 0)
    for key in ("texts", "options", "recipe"):
        other = [rows[0], rows[1] | {key: "others"}]
        with pytest.raises(SelectionError, match=key):
            effect(other, "untied-copy", "tied", "KL")
        with pytest.raises(SelectionError, match=key):
            at_equal_loss(other, "untied-copy", "tied", "KL")
    with pytest.raises(SelectionError, match="No seed"):
        effect(rows, "untied-own", "tied", "KL")
    with pytest.raises(SelectionError, match="reading loss G"):
        effect(rows, "untied-copy", "tied", "G")
    apart = [rows[0], made("untied-copy", 0, [[1.0, 1.0, 1.0, 0.0]], [2.0])]
    with pytest.raises(SelectionError, match="range"):
        at_equal_loss(apart, "untied-copy", "tied", "KL")
