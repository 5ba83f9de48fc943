"""Errors of the command: one line on standard error, and the exit code that goes with it."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand

from lens.errors import LensError

BROKEN_PIPE = 141
"""128 + SIGPIPE, as a shell reports a tool whose reader went away."""

INTERRUPTED = 130
"""128 + SIGINT."""


class Command(TyperCommand):
    """A command whose errors are one line; with --debug the traceback stands before it."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an error becomes exit code 1."""
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, typer.TyperException, BrokenPipeError):
            raise
        except Exception as error:
            if ctx.params.get("debug"):
                traceback.print_exc()
            _say(error)
            raise typer.Exit(1) from None


def exit_code(command: Callable[[], Any]) -> int:
    """Run a command that ends in SystemExit, and give its code; a closed pipe ends in silence."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A terminal that cannot show a token still gets the rest of the table.
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        try:
            command()
            code = 0
        except SystemExit as stop:
            if isinstance(stop.__context__, BrokenPipeError):
                raise stop.__context__ from None
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except KeyboardInterrupt:
            code = INTERRUPTED
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more as it ends: give it somewhere to write.
        _into_nothing()
        return BROKEN_PIPE
    except OSError as error:
        print(f"lens: Cannot write to standard output: {error.strerror}.", file=sys.stderr)
        _into_nothing()
        return 1
    return code


def _into_nothing() -> None:
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(error: Exception) -> None:
    if isinstance(error, LensError):
        print(f"lens: {error}", file=sys.stderr)
        return
    print(
        f"lens: {type(error).__name__}: {error}\n"
        "This is not an error that lens foresaw: run the same with --debug for its traceback.",
        file=sys.stderr,
    )
