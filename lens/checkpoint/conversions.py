"""A cache of converted models on the user's disk: each entry whole or absent, made once."""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from lens.checkpoint.weights import hash_file

_MANIFEST = "entry.json"
_ENVIRONMENT = "LENS_CACHE"


def cache_folder() -> Path:
    """Where conversions are kept: $LENS_CACHE, else tied-lens in the user's cache directory."""
    named = os.environ.get(_ENVIRONMENT)
    if named:
        return Path(named).expanduser()
    if sys.platform == "win32":
        parent = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        parent = Path.home() / "Library" / "Caches"
    else:
        parent = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(parent) / "tied-lens"


def find(key: str) -> Path | None:
    """The folder of an entry, None where it is absent or damaged."""
    folder = cache_folder() / key
    try:
        manifest = json.loads((folder / _MANIFEST).read_text("utf-8"))
        whole = all(_is_whole(folder / name, was) for name, was in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return folder if whole else None


def find_or_make(key: str, make: Callable[[Path], None]) -> Path:
    """The entry `key`, made by `make(folder)` where it is absent or damaged.

    `make` fills an empty folder, which gets its name only when it is whole; a second process waits
    for the first; what a crash left is removed.
    Raises OSError where the cache cannot be written.
    """
    found = find(key)
    if found is not None:
        return found
    parent = cache_folder()
    parent.mkdir(parents=True, exist_ok=True)
    # The lock is the kernel's: it goes with its process, so a crash leaves none behind.
    with FileLock(parent / f"{key}.lock"):
        found = find(key)
        if found is not None:
            return found
        _remove_leftovers(parent, key)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=parent))
        try:
            make(unfinished)
            _write_manifest(unfinished)
            unfinished.rename(parent / key)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
    found = find(key)
    if found is None:
        raise OSError(f"{parent / key} was written and is not whole; is the disk sound?")
    return found


def _remove_leftovers(parent: Path, key: str) -> None:
    """Only while the lock is held: then nobody writes under these names."""
    for folder in (parent / key, *parent.glob(f".{key}-*")):
        if folder.is_dir():
            shutil.rmtree(folder)
        else:
            folder.unlink(missing_ok=True)


def _write_manifest(folder: Path) -> None:
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        stat = path.stat()
        files[path.relative_to(folder).as_posix()] = {
            "bytes": stat.st_size,
            "mtime_ns": stat.st_mtime_ns,
            "sha256": hash_file(path),
        }
    text = json.dumps({"files": files}, indent=1)
    (folder / _MANIFEST).write_text(text, encoding="utf-8")


def _is_whole(path: Path, was: dict[str, Any]) -> bool:
    """A file of the same size and time is taken as it is; one that was touched is read again."""
    stat = path.stat()
    if stat.st_size != was["bytes"]:
        return False
    return stat.st_mtime_ns == was["mtime_ns"] or hash_file(path) == was["sha256"]
