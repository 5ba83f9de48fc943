from pathlib import Path

import pytest
from import_order import EXCEPTIONS, breaches

PACKAGE = Path(__file__).parents[2] / "lens"


def test_no_module_imports_from_a_room_to_its_right() -> None:
    assert breaches(PACKAGE) == []


def test_every_listed_exception_is_a_module_that_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {name for name in EXCEPTIONS if (PACKAGE / f"{name.replace('.', '/')}.py").exists()}
    monkeypatch.setattr("import_order.EXCEPTIONS", {})
    assert {line.split(":")[0] for line in breaches(PACKAGE)} == modules


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("checkpoint/a.py", "from lens.show.heatmap import heatmap"),
        ("checkpoint/a.py", "import lens.lenses.logit"),
        ("checkpoint/a.py", "def f():\n    from lens.lenses.logit import x"),
        ("checkpoint/checkpoint.py", "from lens.lenses.logit import x"),
        ("checkpoint/checkpoint.py", "def f():\n    from lens.show.heatmap import x"),
        ("errors.py", "from lens import shapes"),
        ("show/a.py", "from lens import load"),
        ("show/a.py", "import lens"),
        ("show/a.py", "from ..scale import x"),
        ("lenses/a.py", "from .. import load"),
        ("lenses/a.py", "class A:\n    import lens.cli_run"),
        ("new_room.py", "import os"),
    ],
)
def test_a_tree_with_a_forbidden_import_is_refused(
    tmp_path: Path, module: str, source: str
) -> None:
    path = tmp_path / "lens" / module
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert len(breaches(tmp_path / "lens")) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("show/a.py", "from lens.errors import LensError\nfrom ..lenses import predictions"),
        ("checkpoint/checkpoint.py", "def f():\n    from lens.lenses.logit import x"),
        ("checkpoint/checkpoint.py", "if TYPE_CHECKING:\n    from lens.lenses.logit import x"),
        ("cli_run.py", "from lens import load\nfrom lens.cli import app"),
        ("__init__.py", "from lens.cli import x"),
    ],
)
def test_a_tree_in_order_passes(tmp_path: Path, module: str, source: str) -> None:
    path = tmp_path / "lens" / module
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert breaches(tmp_path / "lens") == []
