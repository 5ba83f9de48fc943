import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script that writes docs/cli.md."""
    # Set first, so that what the script sets is taken back.
    for name in ("COLUMNS", "TERMINAL_WIDTH", "NO_COLOR"):
        monkeypatch.setenv(name, "100")
    path = ROOT / "docs" / "cli_reference.py"
    spec = importlib.util.spec_from_file_location("cli_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_the_command_is_what_help_prints(reference: ModuleType) -> None:
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), (
        "run: python docs/cli_reference.py"
    )


def test_every_command_stands_on_the_page(reference: ModuleType) -> None:
    listed = re.findall(r"^  (\w\S*)  ", reference.help_of("").split("Commands:")[1], re.MULTILINE)
    assert set(listed) == {name for name in reference.COMMANDS if name and " " not in name}
    beneath = re.findall(
        r"^  (\w\S*)  ", reference.help_of("twins").split("Commands:")[1], re.MULTILINE
    )
    assert {f"twins {name}" for name in beneath} == {n for n in reference.COMMANDS if " " in n}


def test_a_stale_page_is_seen(reference: ModuleType) -> None:
    stale = reference.PAGE.read_text(encoding="utf-8").replace("--top-k", "--top-n")
    assert stale != reference.page()
