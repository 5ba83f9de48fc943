"""Finds the code blocks of a Markdown page and runs the Python ones as a reader would."""

import ast
import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NOT_RUN = "<!-- not run -->"
PRINTS = "<!-- prints -->"

FENCE = re.compile(
    r"(?P<mark><!--[^\n]*-->)?\n*"
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<body>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
NUMBER = re.compile(r"\d+\.\d+")


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its text, the comment above it, and its place."""

    page: str
    line: int
    language: str
    body: str
    mark: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(path: Path) -> list[Block]:
    """Every fenced block of a page, in order."""
    text = path.read_text(encoding="utf-8")
    return [
        Block(
            page=path.name,
            line=text[: match.start("language")].count("\n") + 1,
            language=match["language"],
            body=match["body"],
            mark=match["mark"] or "",
        )
        for match in FENCE.finditer(text)
    ]


def run_page(path: Path) -> int:
    """Run a page's Python blocks in one namespace; gives how many ran.

    Raises AssertionError where a block marked as "prints" is not what the Python block before it
    printed (decimal numbers may differ by 0.02: other processors round otherwise).
    """
    space: dict[str, Any] = {"__name__": "__main__"}
    printed, count = "", 0
    for block in blocks(path):
        if block.language == "python" and block.mark != NOT_RUN:
            printed = output_of(block, space)
            count += 1
        elif block.mark == PRINTS:
            assert alike(block.body, printed), f"{block} is not what was printed:\n{printed}"
    return count


def output_of(block: Block, space: dict[str, Any]) -> str:
    """What a block prints in an interactive session: its prints, and its last expression."""
    tree = ast.parse(block.body, filename=str(block))
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, str(block), "exec"), space)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), str(block), "eval"), space)
            if value is not None:
                print(repr(value))
    return printed.getvalue()


def alike(shown: str, printed: str) -> bool:
    """The same text but for trailing blanks, decimal numbers within 0.02."""
    one, other = ("\n".join(map(str.rstrip, text.strip().split("\n"))) for text in (shown, printed))
    if NUMBER.sub("#", one) != NUMBER.sub("#", other):
        return False
    pairs = zip(NUMBER.findall(one), NUMBER.findall(other), strict=True)
    return all(abs(float(a) - float(b)) <= 0.02 for a, b in pairs)
