"""What the weight files of a folder hold, told from their headers, and whether it is whole."""

import hashlib
import json
import os
import pickle
import struct
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from lens.checkpoint.quantized import plain_parts
from lens.errors import CorruptCheckpointError, UnsupportedModelStateError

_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_HEADER_LIMIT = 100_000_000  # as in the safetensors library
_READ_BYTES = 1 << 22


@dataclass(frozen=True, kw_only=True)
class WeightFiles:
    """The weight files of one checkpoint, in order, and which tensor lies in which.

    `format` is "safetensors" or "pytorch"; `shapes` maps a tensor's name to its shape.
    """

    format: str
    paths: tuple[Path, ...]
    home: dict[str, Path]
    shapes: dict[str, tuple[int, ...]]

    @property
    def keys(self) -> frozenset[str]:
        """The names of all tensors."""
        return frozenset(self.home)

    def read(self, key: str) -> Tensor:
        """One tensor, on the CPU, in the dtype of the file."""
        path = self.home[key]
        if self.format == "pytorch":
            return _unpickle(path)[key].clone()
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            return file.get_tensor(key)


def find_weights(folder: Path) -> WeightFiles | None:
    """The weight files that transformers would read in this folder, None where there are none.

    Raises CorruptCheckpointError for a truncated file, a missing shard or an unreadable pickle;
    pickles are read with weights_only, so that they run no code.
    """
    for names, format_, read in (
        (_SAFETENSORS, "safetensors", _safetensors_shapes),
        (_PICKLES, "pytorch", _pickle_shapes),
    ):
        paths = _paths(folder, *names)
        if paths is None:
            continue
        home: dict[str, Path] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for path in paths:
            found = read(path)
            shapes |= found
            home |= dict.fromkeys(found, path)
        return WeightFiles(format=format_, paths=tuple(paths), home=home, shapes=shapes)
    return None


def _paths(folder: Path, single: str, index: str) -> list[Path] | None:
    if (folder / single).is_file():
        return [folder / single]
    if not (folder / index).is_file():
        return None
    try:
        named = json.loads((folder / index).read_text("utf-8"))["weight_map"].values()
        names = sorted({os.fspath(name) for name in named})
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CorruptCheckpointError(
            f"{folder / index} is no index of weight files ({error}). Get the file again."
        ) from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CorruptCheckpointError(
            f"{folder} lacks {len(missing)} of its {len(names)} weight files: "
            f"{', '.join(missing[:3])}. Get the missing files."
        )
    return [folder / name for name in names]


def _safetensors_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < length <= min(_HEADER_LIMIT, size - 8):
            raise CorruptCheckpointError(
                f"{path} is no safetensors file, or was cut: its header would have {length:,} "
                f"bytes, the file has {size:,}. Get the file again."
            )
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptCheckpointError(
                f"The header of {path} is damaged ({error}). Get the file again."
            ) from error
    if size != 8 + length + end:
        raise CorruptCheckpointError(
            f"{path} is truncated or was written to: its header asks for {8 + length + end:,} "
            f"bytes, the file has {size:,}. Get the file again."
        )
    return shapes


def _pickle_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in _unpickle(path).items() if isinstance(t, Tensor)}


def _unpickle(path: Path) -> dict[str, Tensor]:
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            # Files older than torch 1.6 are no zip archive and cannot be mapped.
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CorruptCheckpointError(
            f"{path} is no plain file of tensors, or is damaged; it was opened with weights_only, "
            "since a pickle can run code. Convert it to safetensors where you trust it."
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CorruptCheckpointError(
            f"{path} cannot be read whole ({reason}). Get the file again."
        ) from error


def hash_files(paths: Iterable[Path]) -> str:
    """The sha256 of one file, or of the lines "sha256  name" of several, sorted by name.

    >>> import tempfile, pathlib
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "a"
    >>> _ = file.write_bytes(b"abc")
    >>> hash_files([file])[:16]
    'ba7816bf8f01cfea'
    """
    ordered = sorted(paths, key=lambda path: path.name)
    with ThreadPoolExecutor(2) as pool:
        digests = list(pool.map(hash_file, ordered))
    if len(digests) == 1:
        return digests[0]
    lines = [f"{digest}  {path.name}\n" for digest, path in zip(digests, ordered, strict=True)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def hash_file(path: Path) -> str:
    """The sha256 of a file; one of the hub's cache is named by it, and is not read."""
    blob = path.resolve()
    if blob.parent.name == "blobs" and len(blob.name) == 64:
        return blob.name
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            digest.update(part)
    return digest.hexdigest()


def check_finite(model: nn.Module) -> None:
    """Raises CorruptCheckpointError naming the tensors that hold NaN or inf.

    One sum per tensor, in at least float32: a NaN or inf never leaves a sum finite. A sum that
    overflowed by itself is settled by looking at each value.
    """
    bad = [name for name, tensor in _persistent(model) if not _is_finite(tensor)]
    if bad:
        raise CorruptCheckpointError(
            f"{len(bad)} weights hold NaN or inf, first {', '.join(bad[:3])}: no reading of them "
            "would mean anything. Get the files again, or repair the training run."
        )


def check_materialized(model: nn.Module) -> None:
    """Raises UnsupportedModelStateError where weights are on the meta device and nothing, such as
    accelerate's offloading, brings them in for the forward.
    """
    absent = [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if not hasattr(module, "_hf_hook")
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.is_meta
    ]
    if absent:
        raise UnsupportedModelStateError(
            f"{len(absent)} weights are on the meta device, first {absent[0]}: they have shapes "
            "and no values. Load the model with its weights (from_pretrained, or to_empty and "
            "load_state_dict)."
        )


def _persistent(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and saved buffers, each tensor once."""
    seen: set[int] = set()
    found = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            found += [(name, part.detach()) for part in plain_parts(tensor)]
    return found


@torch.no_grad()
def _is_finite(tensor: Tensor) -> bool:
    if tensor.is_meta or not tensor.is_floating_point() or tensor.itemsize < 2:
        return True
    total = tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32))
    return bool(torch.isfinite(total)) or bool(torch.isfinite(tensor).all())
