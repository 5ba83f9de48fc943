"""What the arguments of a command mean: prompts, numbers, target sets."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer


def prompt_from(
    text: str | None, ids: str | None, messages: Path | None, *, source: str | None = None
) -> str | list[int] | None:
    """The one prompt that was given: text or token ids, None where it is messages.

    And None beside a source alone: the model writes the target itself.
    """
    given = {"TEXT": text, "--ids": ids, "--messages": messages}
    present = [name for name, value in given.items() if value is not None]
    if not present and source is not None:
        return None
    if len(present) != 1:
        found = " and ".join(present) or "none of them"
        raise typer.BadParameter(f"give one of TEXT, --ids, --messages; found {found}.")
    if ids is not None:
        return numbers_from(ids, "--ids")
    return text_from(text, "TEXT")


def text_from(argument: str | None, name: str) -> str | None:
    """Text as given, of a file (@file), of standard input (-); @@ is a literal @.

    One final newline of a file or of standard input is dropped: it would be a token of its own.
    """
    if argument is None or argument.startswith("@@"):
        return argument and argument[1:]
    if argument == "-":
        if sys.stdin is None:
            raise typer.BadParameter("standard input is closed.", param_hint=name)
        return _decoded(sys.stdin.buffer.read(), "standard input", name)
    if not argument.startswith("@"):
        return argument
    return _decoded(_bytes(Path(argument[1:]), name), argument[1:], name)


def messages_from(path: Path | None) -> list[dict[str, Any]] | None:
    """A chat: a JSON list of objects that each hold a role and a content."""
    if path is None:
        return None
    text = _decoded(_bytes(path, "--messages"), str(path), "--messages")
    try:
        messages = json.loads(text)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(
            f'{path} is not JSON: {error}. Expected [{{"role": "user", "content": "..."}}].',
            param_hint="--messages",
        ) from None
    good = isinstance(messages, list) and all(
        isinstance(one, dict) and {"role", "content"} <= one.keys() for one in messages
    )
    if not good or not messages:
        raise typer.BadParameter(
            f"{path} holds no list of messages. "
            'Expected [{"role": "user", "content": "..."}, ...].',
            param_hint="--messages",
        )
    return messages


def numbers_from(text: str | None, name: str) -> list[int] | None:
    """Whole numbers between commas."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a list of whole numbers such as 0,6,12.", param_hint=name
        ) from None


def layers_from(text: str | None, name: str) -> list[int | float] | None:
    """Whole or half numbers between commas: 3.5 lies within block 3."""
    if text is None:
        return None
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [0.25]
    if any((2 * number) % 1 for number in numbers):
        raise typer.BadParameter(
            f"{text!r} is not a list of layers such as 0,6,6.5,-1.", param_hint=name
        )
    return [int(number) if number % 1 == 0 else number for number in numbers]


def sets_from(pairs: Sequence[str] | None) -> dict[str, list[str]] | None:
    """NAME=TOKEN pairs as sets by name, in the order of their first use."""
    sets: dict[str, list[str]] = {}
    for pair in pairs or ():
        name, equals, token = pair.partition("=")
        if not (name and equals and token):
            raise typer.BadParameter(
                f'{pair!r} is not NAME=TOKEN, as in right=" Paris".', param_hint="--target"
            )
        sets.setdefault(name, []).append(token)
    return sets or None


def _bytes(path: Path, name: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise typer.BadParameter(
            f"cannot read {path}: {error.strerror}. A literal @ is written @@.", param_hint=name
        ) from None


def _decoded(raw: bytes, place: str, name: str) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(
            f"{place} is not UTF-8 at byte {error.start}. Convert it first.", param_hint=name
        ) from None
    # A byte-order mark is of the file, not of the text; so is one final newline.
    text = text.removeprefix("\ufeff")
    return text.removesuffix("\n").removesuffix("\r")
