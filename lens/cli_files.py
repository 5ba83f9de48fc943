"""A folder for output: refused before a model is loaded, and not left behind empty."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lens.errors import ExportError


def require_folder(folder: Path) -> None:
    """Raise ExportError where `folder` is not there and could not be made, or is no folder."""
    above = folder
    try:
        while not above.exists():
            above = above.parent
    except OSError as error:
        raise ExportError(f"Cannot use {folder} as a folder: {error.strerror}.") from error
    if not above.is_dir():
        raise ExportError(f"{above} is a file; give the name of a folder.")
    _require_room(above)


def require_picture(path: Path) -> None:
    """Raise MissingPackageError where `path` names a picture that nothing here could draw."""
    from lens.show.pictures import KINDS, require_drawable

    kind = path.suffix.lower().removeprefix(".")
    if kind in KINDS:
        require_drawable(kind)


@contextlib.contextmanager
def made(folder: Path) -> Iterator[None]:
    """Within: the folder is there; one that was made for nothing is taken away again."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(f"Cannot make the folder {folder}: {error.strerror}.") from error
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
