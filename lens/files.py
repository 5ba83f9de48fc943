"""Files that appear whole or not at all, and questions of paths that never raise."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from lens.errors import ExportError

_NAME_BYTES = 80


def is_file(path: Path) -> bool:
    """Whether a file can be seen there; False for a name that no file can have."""
    with contextlib.suppress(OSError, ValueError):
        return path.is_file()
    return False


def is_folder(path: Path) -> bool:
    """Whether a folder can be seen there; False for a name that no folder can have."""
    with contextlib.suppress(OSError, ValueError):
        return path.is_dir()
    return False


def expanded(path: str | Path) -> Path:
    """The path with ~ for a home; as it is where there is no such home."""
    with contextlib.suppress(RuntimeError):
        return Path(path).expanduser()
    return Path(path)


def require_writable(path: Path) -> None:
    """Raise ExportError where no file could be written at `path`; nothing is left behind.

    To be asked before the work whose result is to be written.
    """
    target = Path(os.path.realpath(path))
    if is_folder(target):
        raise ExportError(f"{path} is a folder; give the name of a file in it.")
    if not is_folder(target.parent):
        raise ExportError(f"There is no folder {path.parent}: make it first, or choose another.")
    attempt = partial_of(target)
    try:
        if target.exists() and not os.access(target, os.W_OK):
            raise ExportError(
                f"{path} is write-protected; choose another name or lift the protection."
            )
        # Only the attempt tells: permissions do not know of read-only file systems.
        create(attempt)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            attempt.unlink(missing_ok=True)


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Within: a partial file to write. After: it is on disk and has taken the name `path`.

    Through a link the file changes and the link stays; a file that was there keeps its permissions.
    Raises ExportError, and leaves what was there.
    """
    target = Path(os.path.realpath(path))
    partial = partial_of(target)
    try:
        create(partial)
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, partial)
        partial.replace(target)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _unwritable(path: Path, error: OSError) -> ExportError:
    return ExportError(f"Cannot write {path}: {error.strerror or error}. Choose another place.")


def partial_of(target: Path) -> Path:
    """A name beside the target for what is not whole yet, short enough for any file system."""
    start = target.name.encode("utf-8", "surrogateescape")[:_NAME_BYTES]
    name = start.decode("utf-8", "ignore")
    return target.with_name(f".{name}.{secrets.token_hex(6)}.partial")


def create(path: Path) -> None:
    """An empty file with the permissions that the user's umask gives."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
