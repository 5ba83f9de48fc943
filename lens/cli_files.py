"""Output files of the command: refused before a model is loaded, not after."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lens.errors import ExportError


def require_output(path: Path) -> None:
    """Raise ExportError where `path` could not be written: extension, folder, permission."""
    from lens.show.export import WRITERS

    if path.suffix.lower() not in WRITERS:
        found = f"extension {path.suffix!r}" if path.suffix else "no extension"
        raise ExportError(f"{path} has {found}; -o writes {', '.join(WRITERS)}.")
    if path.is_dir():
        raise ExportError(f"{path} is a folder; give the name of a file in it.")
    if not path.parent.is_dir():
        raise ExportError(f"There is no folder {path.parent}: make it first, or choose another.")
    if path.exists() and not os.access(path, os.W_OK):
        raise ExportError(f"{path} is write-protected; choose another name or lift the protection.")
    _require_room(path.parent)


def require_folder(folder: Path) -> None:
    """Raise ExportError where `folder` is not there and could not be made, or is no folder."""
    above = folder
    while not above.exists():
        above = above.parent
    if not above.is_dir():
        raise ExportError(f"{above} is a file; give the name of a folder.")
    _require_room(above)


@contextlib.contextmanager
def made(folder: Path) -> Iterator[None]:
    """Within: the folder is there; one that was made for nothing is taken away again."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for one in missing:
            with contextlib.suppress(OSError):
                one.rmdir()
        raise


def _require_room(folder: Path) -> None:
    # Only the attempt tells: permissions do not know of read-only file systems.
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ExportError(
            f"Nothing can be written in {folder}: {error.strerror}. Choose another place."
        ) from error
