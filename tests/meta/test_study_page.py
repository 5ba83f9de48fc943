import copy
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from lens.study.measured import read_rows

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script that fills docs/study.md."""
    path = ROOT / "docs" / "study_page.py"
    spec = importlib.util.spec_from_file_location("study_page", path)
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
    rows = copy.deepcopy(read_rows(script.ROWS))
    rows[0]["branches"][-1]["kl"][1] += 0.5
    assert script.filled(page, rows) != page
