"""Reads the imports of a package tree and says which of them go against the order of the rooms."""

import ast
from collections.abc import Iterator
from pathlib import Path

ORDER = (
    "errors",
    "files",
    "shapes",
    "linear",
    "corpus",
    "checkpoint",
    "lenses",
    "measuring",
    "study",
    "show",
    "scale",
    "trust",
    "cli",
)
"""A module imports only from its own room and from rooms to its left."""

ENTRANCES = frozenset({"__init__", "__main__"})
"""lens/__init__.py and lens/__main__.py stand above all rooms."""

EXCEPTIONS = {
    "checkpoint.checkpoint": frozenset({"lenses"}),
    "lenses.predictions": frozenset({"show"}),
}
"""Thin methods: these may import to the right, inside a function or for the type checker alone."""


def breaches(package: Path) -> list[str]:
    """One sentence for each import that the order forbids; an empty list is a good tree."""
    found = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        if parts in {(name,) for name in ENTRANCES}:
            continue
        here = _room(parts[0])
        if here not in ORDER:
            found.append(f"{'.'.join(parts)}: the room {here!r} has no place in the order")
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for target, line, deferred in _imports(tree, package.name, parts):
            there = _room(target.split(".")[0]) if target else ""
            if there in ORDER and ORDER.index(there) <= ORDER.index(here):
                continue
            if deferred and there in EXCEPTIONS.get(".".join(parts), ()):
                continue
            if not target and here == "cli":
                continue
            found.append(f"{'.'.join(parts)}:{line} imports {target or 'the public names'}")
    return found


def _room(name: str) -> str:
    """cli_run.py and its like are of the room `cli`."""
    return "cli" if name.startswith("cli_") else name


def _imports(tree: ast.AST, package: str, here: tuple[str, ...]) -> Iterator[tuple[str, int, bool]]:
    """(name beneath the package, line, inside a function or TYPE_CHECKING) for each import."""
    pending: list[tuple[ast.AST, bool]] = [(tree, False)]
    while pending:
        node, deferred = pending.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == package:
                    yield alias.name.partition(".")[2], node.lineno, deferred
        elif isinstance(node, ast.ImportFrom):
            for name in _from(node, package, here):
                yield name, node.lineno, deferred
        functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
        inside = deferred or isinstance(node, functions) or _for_types_alone(node)
        pending.extend((child, inside) for child in ast.iter_child_nodes(node))


def _from(node: ast.ImportFrom, package: str, here: tuple[str, ...]) -> list[str]:
    module = node.module or ""
    if node.level:
        stem = here[: len(here) - node.level]
        module = ".".join([package, *stem, *filter(None, [module])])
    if module.split(".")[0] != package:
        return []
    beneath = module.partition(".")[2]
    # `from lens import errors` names a room; `from lens import load` names a public name.
    return [beneath] if beneath else [a.name if a.name in ORDER else "" for a in node.names]


def _for_types_alone(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )
