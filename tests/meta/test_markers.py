"""The default run leaves the slow tests out, and only them."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

@pytest.mark.slow
def test_slow(): pass

def test_quick(): pass
"""


@pytest.mark.parametrize(
    ("options", "kept"), [([], {"test_quick"}), (["-m", "slow"], {"test_slow"})]
)
def test_slow_tests_run_when_asked_for(tmp_path: Path, options: list[str], kept: set[str]) -> None:
    (tmp_path / "pyproject.toml").write_text(
        (Path(__file__).parents[2] / "pyproject.toml").read_text()
    )
    (tmp_path / "test_marked.py").write_text(TESTS)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "test_marked.py", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert {line.split("::")[1] for line in run.stdout.split("\n") if "::" in line} == kept
