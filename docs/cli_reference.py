"""Writes docs/cli.md from the help texts of the commands: python docs/cli_reference.py."""

import contextlib
import io
import os
from pathlib import Path

COMMANDS = (
    "",
    "demo",
    "inspect",
    "run",
    "measure",
    "compare",
    "report",
    "tune",
    "plan",
    "gradients",
    "geometry",
    "frequency",
    "attribution",
    "surgery-sweep",
    "tie",
    "untie",
    "twins",
    "twins train",
    "twins arms",
    "twins rates",
    "twins reproduce",
    "twins sweep",
    "twins domain",
    "twins continue",
)
PAGE = Path(__file__).with_name("cli.md")
COLUMNS = "100"

OPENING = """# The `lens` command

Each text below is what `lens COMMAND --help` prints.
"""


def page() -> str:
    """The whole page as Markdown."""
    os.environ.update(COLUMNS=COLUMNS, TERMINAL_WIDTH=COLUMNS, NO_COLOR="1")
    sections = [f"## lens {name}\n\n```text\n{help_of(name)}\n```\n" for name in COMMANDS]
    return "\n".join([OPENING, *sections]).replace("## lens \n", "## lens\n")


def help_of(command: str) -> str:
    """What `lens COMMAND --help` prints, without trailing blanks."""
    from lens.cli import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main([*command.split(), "--help"])
    return "\n".join(line.rstrip() for line in printed.getvalue().strip().split("\n"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
