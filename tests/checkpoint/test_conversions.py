"""The cache of conversions: an entry is whole or absent, and made once."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lens.checkpoint import conversions


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LENS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _make(folder: Path) -> None:
    (folder / "weights").write_bytes(b"0123456789")


def _entries(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


def test_an_entry_is_made_once(cache: Path) -> None:
    calls = []

    def make(folder: Path) -> None:
        calls.append(folder)
        _make(folder)

    assert conversions.find("key") is None
    first = conversions.find_or_make("key", make)
    assert conversions.find_or_make("key", make) == first == conversions.find("key")
    assert len(calls) == 1
    assert _entries(cache) == ["key"]


def test_a_crash_in_the_middle_leaves_no_entry(cache: Path) -> None:
    def crash(folder: Path) -> None:
        _make(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conversions.find_or_make("key", crash)
    assert _entries(cache) == []
    assert conversions.find_or_make("key", _make).name == "key"


def test_what_a_killed_process_left_is_removed_and_holds_no_lock(cache: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from lens.checkpoint import conversions\n"
        "def make(folder):\n"
        "    (folder / 'weights').write_bytes(b'half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "conversions.find_or_make('key', make)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    assert done.returncode != 0
    assert [name.startswith(".key-") for name in _entries(cache)] == [True]
    assert conversions.find("key") is None
    assert (conversions.find_or_make("key", _make) / "weights").read_bytes() == b"0123456789"
    assert _entries(cache) == ["key"]


def test_two_at_once_make_one_entry(cache: Path) -> None:
    calls = []

    def slow(folder: Path) -> None:
        calls.append(folder)
        time.sleep(0.2)
        _make(folder)

    both = [threading.Thread(target=conversions.find_or_make, args=("key", slow)) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert len(calls) == 1
    assert _entries(cache) == ["key"]


@pytest.mark.parametrize("change", ["shorter", "other", "gone", "manifest"])
def test_a_damaged_entry_is_not_found(change: str) -> None:
    folder = conversions.find_or_make("key", _make)
    weights = folder / "weights"
    if change == "shorter":
        weights.write_bytes(b"01234")
    elif change == "other":
        weights.write_bytes(b"9876543210")
        os.utime(weights, ns=(1, 1))
    elif change == "gone":
        weights.unlink()
    else:
        (folder / "entry.json").write_text("{", encoding="utf-8")
    assert conversions.find("key") is None
    conversions.find_or_make("key", _make)
    assert weights.read_bytes() == b"0123456789"


def test_an_entry_whose_times_alone_changed_is_still_whole() -> None:
    folder = conversions.find_or_make("key", _make)
    os.utime(folder / "weights", ns=(1, 1))
    assert conversions.find("key") == folder


def test_the_place_of_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LENS_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert conversions.cache_folder() == Path("/somewhere/tied-lens")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert conversions.cache_folder() == Path.home() / ".cache" / "tied-lens"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert conversions.cache_folder() == Path.home() / "Library" / "Caches" / "tied-lens"
