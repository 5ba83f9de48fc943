"""A folder that a run keeps its results in, so that it can be continued."""

import json
from pathlib import Path
from typing import Any

from lens.errors import ExportError, ResultFileError


def make_folder(folder: Path) -> None:
    """Make a folder for results where there is none. Raises ExportError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(
            f"{folder} cannot be made: {error.strerror}. Give the name of a folder."
        ) from error


def read_claim(path: Path) -> dict[str, Any]:
    """What an earlier run wrote of itself, as JSON. Raises ResultFileError."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(held, dict):
            raise TypeError(f"it holds {type(held).__name__}, not an object")
    except (OSError, ValueError, TypeError) as error:
        raise ResultFileError(
            f"{path} cannot be read ({type(error).__name__}: {error}). Name a new folder, or "
            "remove this one."
        ) from error
    return held
