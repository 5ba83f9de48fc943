import copy
import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lens.study.measured import read_rows

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script that fills docs/study.md."""
    return loaded("study_page")


@pytest.fixture(scope="module")
def swept() -> ModuleType:
    """The script that fills the size sweep."""
    return loaded("study_sweep")


@pytest.fixture(scope="module")
def real() -> ModuleType:
    """The script that fills the section of real models."""
    return loaded("study_real")


def loaded(name: str) -> ModuleType:
    if str(ROOT / "docs") not in sys.path:
        sys.path.append(str(ROOT / "docs"))  # the scripts import one another
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_number_of_the_study_comes_from_its_rows(script: ModuleType) -> None:
    page = script.PAGE.read_text(encoding="utf-8")
    assert script.filled(page, read_rows(script.ROWS)) == page, "run: python docs/study_page.py"


def test_another_row_makes_another_page(script: ModuleType) -> None:
    page = script.PAGE.read_text(encoding="utf-8")
    for arm, layer in (("tied", 1), ("mixed-1-0", 0)):
        rows = copy.deepcopy(read_rows(script.ROWS))
        row = next(row for row in rows if row["arm"]["name"] == arm)
        row["branches"][-1]["kl"][layer] += 0.5
        assert script.filled(page, rows) != page


def test_every_number_of_the_size_sweep_comes_from_its_rows(swept: ModuleType) -> None:
    page = swept.PAGE.read_text(encoding="utf-8")
    rows = swept.read_sweep(swept.ROWS)
    assert swept.filled(page, rows) == page, "run: python docs/study_sweep.py"
    other = copy.deepcopy(rows)
    other["v512-d48-l4"][0]["branches"][-1]["loss_bits"] += 0.5
    assert swept.filled(page, other) != page


def test_every_number_of_the_real_models_comes_from_their_rows(real: ModuleType) -> None:
    page = real.PAGE.read_text(encoding="utf-8")
    assert real.filled(page, real.read_real()) == page, "run: python docs/study_real.py page"


def test_another_point_of_a_real_model_makes_another_page(real: ModuleType) -> None:
    page = real.PAGE.read_text(encoding="utf-8")
    rows = copy.deepcopy(real.read_real())
    first = next(iter(rows.values()))
    next(iter(first["arms"].values()))["points"][-1]["moved"] = {"W": 0.5}
    assert real.filled(page, rows) != page
    assert real.filled(page, {}) != page


def made(arm: str, seed: int, value: float) -> dict[str, Any]:
    """A row whose numbers are all this value, but for what no table reads."""
    layers = [value] * 3
    branch = {"kl": layers, "reading_loss": layers, "not_there_yet": layers, "copy_rate": layers}
    branch |= {"loss_bits": value, "copy_bits": layers, "geometry": {"row cosine": [value]}}
    same = {"texts": "t", "options": {}, "recipe": {}}
    return same | {"arm": {"name": arm}, "seed": seed, "branches": [branch]}


def test_a_dose_is_told_for_seeds_that_have_every_one(script: ModuleType) -> None:
    tables = importlib.import_module("study_tables")
    rows = [made(name, seed, 10 * k) for k, name in tables.DOSED.items() for seed in (0, 1)]
    lines = tables.dose(rows).splitlines()
    assert [line.split(" | ")[1] for line in lines[-5:]] == [
        "0.000", "2.500", "5.000", "7.500", "10.000"
    ]  # fmt: skip
    assert "Seeds: 2." in tables.dose(rows)
    assert "Seeds: 1." in tables.dose(rows[:-1])
    assert tables.dose([r for r in rows if not r["arm"]["name"].startswith("mixed")]) == ""


def test_the_interaction_is_the_difference_of_two_effects(script: ModuleType) -> None:
    tables = importlib.import_module("study_tables")
    values = {"granite-tied": 5.0, "granite-untied-copy": 3.0}
    values |= {"scaled-tied": 9.0, "scaled-untied-copy": 2.0}
    rows = [made(name, 0, value) for name, value in values.items()]
    assert "| d mean G | -2.000 | -7.000 | -5.000 |" in tables.scale(rows)
    assert tables.scale(rows[:-1]) == ""


def test_a_condition_is_told_where_both_arms_have_a_seed(script: ModuleType) -> None:
    tables = importlib.import_module("study_tables")
    values = {"decayed-tied": 5.0, "decayed-untied-copy": 3.0, "tied-matched": 4.0}
    rows = [made(name, 0, value) for name, value in values.items()]
    assert "| 1 | -2.000 | -2.000 | -2.000 | -2.000 |" in tables.conditions(rows)
    assert "tied-matched" not in tables.conditions(rows)
    rows += [made("decayed-tied", 1, 5.0), made("decayed-untied-copy", 1, 4.0)]
    # Mean -1.5, SD 0.707: Student's 12.706 over the root of two.
    assert "| 2 | -1.500 (6.353) |" in tables.conditions(rows)
    assert tables.conditions(rows[:1]) == ""


def test_a_text_of_another_kind_is_told_with_its_ngrams(script: ModuleType, tmp_path: Path) -> None:
    tables = importlib.import_module("study_tables")
    assert tables.domains(tmp_path) == ""
    beside = {
        "format": "lens-study-domain-1",
        "domain": {"name": "letters", "documents": 7},
        "ngram_bits": {"bigram": 8.5, "trigram": 8.25},
    }
    for arm, value in (("tied", 5.0), ("untied-copy", 3.0)):
        (tmp_path / f"domain-letters-{arm}-0.json").write_text(
            json.dumps(made(arm, 0, value) | beside)
        )
    line = tables.domains(tmp_path).splitlines()[-1]
    assert line == (
        "| letters | 7 | 8.500 | 8.250 | 5.000 | 3.000 | 5.000 | 3.000 | 1 "
        "| -2.000 | -2.000 | -2.000 | -2.000 |"
    )


def test_a_further_arm_stands_beside_core_arms_of_its_own_seeds(script: ModuleType) -> None:
    rows = [made("tied", seed, 5.0 + seed) for seed in range(3)]
    rows += [made("mixed-1-0", 0, 4.0), made("scaled-tied", 0, 3.0), made("scaled-tied", 1, 3.5)]
    table = [line for line in script.further(rows).splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[:3] for line in table[1:]] == [
        ["| tied", "0", "5.000"],
        ["| mixed-1-0", "0", "4.000"],
        ["| tied", "0, 1", "5.500"],
        ["| scaled-tied", "0, 1", "3.250"],
    ]
    assert script.further(rows[:3]) == ""


def test_a_table_of_equal_loss_has_its_half_widths(script: ModuleType) -> None:
    def trained(arm: str, seed: int, worse: float) -> dict[str, Any]:
        row = made(arm, seed, 0.0)
        branches = [made(arm, seed, loss + worse)["branches"][0] for loss in (3.0, 2.0, 1.0)]
        for number, branch in enumerate(branches):
            branch |= {"n_documents": 24, "tokens": 100 * (number + 1), "loss_bits": 3.0 - number}
        return row | {"branches": branches}

    rows = [trained("tied", seed, 0.0) for seed in (0, 1)]
    rows += [trained("untied-copy", seed, 1.0 + seed) for seed in (0, 1)]
    told = script.equal_loss(rows, "constraint", "untied-copy", "tied")
    # Differences 1 and 2: mean 1.5, and Student's 12.706 x 0.7071 over the root of two.
    assert "| mean dG | +1.500 (6.353) |" in told
    assert "| tokens, tied | 100 | 150 | 200 | 250 | 300 |" in told


def test_a_change_at_half_is_told_for_seeds_that_have_all_four_arms(script: ModuleType) -> None:
    tables = importlib.import_module("study_tables")
    rows = [made(name, seed, 1.0 + seed) for name in tables.CHANGED for seed in (0, 1)]
    for row in rows:
        row["branches"] = [row["branches"][0] | {"at": at} for at in (4, 8)]
    told = tables.changes(rows[:-1])
    assert "After 4 steps" in told
    assert "| tied, untied at half | 1.000 | 1.000 |" in told
    assert "Seeds: 1." in told
    assert "| tied, untied at half | 1.500 | 1.500 |" in tables.changes(rows)
    assert tables.changes(rows[2:]) == ""


def test_the_short_answer_takes_its_words_from_the_rows(script: ModuleType) -> None:
    def short(tied: list[float], untied: list[float]) -> str:
        rows = [made("tied", seed, value) for seed, value in enumerate(tied)]
        return script.answer(rows + [made("untied-copy", s, v) for s, v in enumerate(untied)])

    better = short([5.0, 5.0, 5.0], [3.0, 2.0, 5.5])
    assert "In 3 pairs" in better
    assert "reads **better**" in better
    # Differences -2, -3 and 0.5: mean -1.5, SD 1.803, Student's 4.303 over the root of three.
    assert "differs by -1.50 [-5.98, +2.98] bits" in better
    assert "with that sign in 2 pairs of 3" in better
    assert "| KL(final ‖ lens), untied | 3.50 | 3.50 | 3.50 |" in better
    assert "hardly" not in better
    assert "reads **worse**" in short([5.0, 5.0], [6.0, 7.0])
    assert "differs by +0.010 [+0.010, +0.010] bits: these twins" in short([5.0] * 2, [5.01] * 2)
    assert script.answer([made("tied", 0, 5.0)]) == ""


def test_a_start_of_its_own_is_told_for_each_class_that_has_it(script: ModuleType) -> None:
    tables = importlib.import_module("study_tables")
    values = {"untied-copy": 5.0, "untied-own": 4.0, "scaled-untied-copy": 3.0}
    rows = [made(name, 0, value) for name, value in values.items()]
    assert tables.starts(rows) == ""
    rows += [made("scaled-untied-own", 0, 3.5)]
    assert [line for line in tables.starts(rows).splitlines() if line.startswith("| G")] == [
        "| GPT-2 | 1 | -1.000 | -1.000 | -1.000 | -1.000 |",
        "| Granite, sqrt(d) at the lookup | 1 | +0.500 | +0.500 | +0.500 | +0.500 |",
    ]
