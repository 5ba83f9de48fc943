"""Captured residual states as a thing of their own: kept, saved, loaded, read again."""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lens.checkpoint.layer_numbers import Layer
from lens.errors import ExportError, ResultFileError, SelectionError

_FORMAT = "lens-residual-states-1"


@dataclass(frozen=True, kw_only=True, eq=False)
class ResidualStates:
    """Residual states of one prompt: `states[i]` is the state after `layers[i]` blocks.

    3.5 stands for the state between attention and MLP of block 3. `model_hash` names the weights
    that they came from, so that another model's readout refuses them.
    """

    states: Float[Tensor, "layer pos d_model"]
    layers: tuple[Layer, ...]
    input_ids: Int[Tensor, " pos"]
    model_id: str
    model_hash: str

    def at(self, layer: Layer) -> Float[Tensor, "pos d_model"]:
        """The states of one layer. Raises SelectionError where it was not captured."""
        if layer not in self.layers:
            raise SelectionError(f"Layer {layer} was not captured; these were: {self.layers}.")
        return self.states[self.layers.index(layer)]

    def save(self, path: str | Path) -> Path:
        """Write a .safetensors file; an existing file stays whole if writing fails."""
        target = Path(path)
        if target.suffix != ".safetensors":
            raise ExportError(f"States are saved as .safetensors; {target.name!r} is not one.")
        tensors = {"states": self.states.contiguous().cpu(), "input_ids": self.input_ids.cpu()}
        meta = {
            "format": _FORMAT,
            "layers": json.dumps(self.layers),
            "model_id": self.model_id,
            "model_hash": self.model_hash,
        }
        _write_whole(tensors, meta, target)
        return target


def load_states(path: str | Path) -> ResidualStates:
    """Read what ResidualStates.save wrote. Raises ResultFileError for anything else."""
    source = Path(path)
    if not source.is_file():
        raise ResultFileError(f"No file at {source}; expected residual states (.safetensors).")
    try:
        with safe_open(source, framework="pt") as file:
            meta: Mapping[str, str] = file.metadata() or {}
            if meta.get("format") != _FORMAT:
                raise ResultFileError(
                    f"{source.name} has format {meta.get('format')!r}; expected {_FORMAT!r}, as "
                    "written by ResidualStates.save."
                )
            return ResidualStates(
                states=file.get_tensor("states"),
                layers=tuple(json.loads(meta["layers"])),
                input_ids=file.get_tensor("input_ids"),
                model_id=meta["model_id"],
                model_hash=meta["model_hash"],
            )
    except (SafetensorError, KeyError, ValueError) as error:
        raise ResultFileError(
            f"{source.name} cannot be read as residual states: {error}. Save them again."
        ) from error


def save_states(states: ResidualStates, path: str | Path) -> Path:
    """Write captured states to a .safetensors file; `load_states` reads them back equal.

    Raises ExportError; an existing file stays whole if writing fails.
    """
    return states.save(path)


def _write_whole(tensors: dict[str, torch.Tensor], meta: dict[str, str], target: Path) -> None:
    part = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
    try:
        part.touch(exist_ok=False)
        mode = part.stat().st_mode
    except OSError as error:
        raise ExportError(f"Cannot write in {target.parent}: {error.strerror}.") from error
    try:
        save_file(tensors, part, metadata=meta)
        # safetensors makes a file for its owner alone; this one has the rights of any other here.
        part.chmod(mode)
        part.replace(target)
    except (OSError, SafetensorError) as error:
        raise ExportError(f"Cannot write {target}: {error}.") from error
    finally:
        part.unlink(missing_ok=True)
