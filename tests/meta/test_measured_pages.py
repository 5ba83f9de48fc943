"""What a page says in words is its script's own text: only the script writes the page."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SCRIPTS = sorted(
    path
    for path in DOCS.glob("*.py")
    if "PAGE.write_text(TEXT + note + made" in path.read_text(encoding="utf-8")
)


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def begins(page: str, text: str) -> bool:
    """Whether a page is a script's text, then the note that the script writes of itself."""
    return page.startswith(text) and page.removeprefix(text).startswith("Written by docs/")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_page_is_what_its_script_says(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A script finds what it imports in its own folder, as where it is run.
    monkeypatch.syspath_prepend(str(DOCS))
    script = loaded(path)
    page = script.PAGE.read_text(encoding="utf-8")
    assert begins(page, script.TEXT), f"run: python docs/{path.name}"
    # The twin: a page with another word, or a script with one sentence more.
    assert not begins(page.replace(" is ", " was ", 1), script.TEXT)
    assert not begins(page, script.TEXT + "More.\n")


def test_the_pages_on_real_models_are_among_them() -> None:
    named = {path.stem for path in SCRIPTS}
    assert {"attribution", "frequency", "geometry", "gradients", "tying"} <= named
