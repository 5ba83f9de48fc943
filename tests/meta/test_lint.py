import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

UNTIDY = "import os\n\ndef  f( a ):\n    return a\n"
UNTYPED = "def f(a: int) -> str:\n    return a\n"


def tool(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    "command",
    [("ruff", "check", "--no-cache"), ("ruff", "format", "--check", "--no-cache"), ("pyright",)],
    ids=" ".join,
)
def test_the_sources_are_clean(command: tuple[str, ...]) -> None:
    run = tool(*command)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(
    ("command", "source", "complaint"),
    [
        (("ruff", "check", "--no-cache", "--config", "pyproject.toml"), UNTIDY, "F401"),
        (
            ("ruff", "format", "--check", "--config", "pyproject.toml"),
            UNTIDY,
            "would be reformatted",
        ),
        (("pyright",), UNTYPED, "reportReturnType"),
    ],
    ids=["check", "format", "pyright"],
)
def test_a_source_that_is_not_clean_is_refused(
    tmp_path: Path, command: tuple[str, ...], source: str, complaint: str
) -> None:
    path = tmp_path / "bad.py"
    path.write_text(source)
    run = tool(*command, str(path))
    assert run.returncode != 0
    assert complaint in run.stdout
