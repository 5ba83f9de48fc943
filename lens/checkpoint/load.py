"""One entrance for every form that a pretrained model comes in."""

import dataclasses
import difflib
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lens.checkpoint import gguf, hub, memory, packages, tokenizing, weights
from lens.checkpoint.checkpoint import Checkpoint
from lens.checkpoint.origin import Origin
from lens.checkpoint.placing import parse_device, parse_dtype, refuse_without_float64
from lens.checkpoint.plain_torch import in_plain_torch
from lens.checkpoint.pretrained import no_weights, open_folder, read_config
from lens.errors import (
    CheckpointNotFoundError,
    LensError,
    SelectionError,
    UnsupportedArchitectureError,
)
from lens.files import expanded, is_file, is_folder

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True, kw_only=True)
class _Wish:
    """What the caller asked for besides the source; checked."""

    tokenizer: Any
    dtype: torch.dtype | None
    device: torch.device | None
    device_map: Any
    trust_remote_code: bool
    cache: bool


@in_plain_torch
def load(
    source: Any,
    *,
    revision: str | None = None,
    tokenizer: Any = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    device_map: Any = None,
    trust_remote_code: bool = False,
    cache: bool = True,
    readout: Any = None,
) -> Checkpoint:
    """Load a pretrained language model, take it apart and prove a readout of it.

    `source` is a hub id, a folder, a .gguf file (or a folder that holds one), a transformers model
    in memory, a TransformerBridge, "demo", or "tied-twin" and "untied-twin", which come with lens.
    A path is read without any network. `revision` is a hub's branch, tag or commit. `dtype` is that
    of the files by default (float32 for GGUF and the twins), the `device` the CPU; `device_map`
    spreads the model as accelerate does. `trust_remote_code` runs the code that a hub id or folder
    brings. `tokenizer` stands in for the checkpoint's own: an object, its folder, or a WordPiece
    vocab.txt. `cache=False` keeps no converted copy of a GGUF file. `readout` takes the place of
    the one that is found, and is proved like it. A model in memory is never changed.

    Raises CheckpointNotFoundError, CorruptCheckpointError, IncompleteCheckpointError,
    UnsupportedArchitectureError, UnsupportedModelStateError, TokenizerError, SelectionError,
    MissingPackageError.

    >>> import lens
    >>> lens.load("demo").tie.is_tied  # doctest: +SKIP
    True
    """
    model, found_tokenizer, origin = _resolve(
        source,
        revision=revision,
        tokenizer=tokenizer,
        dtype=dtype,
        device=device,
        device_map=device_map,
        trust_remote_code=trust_remote_code,
        cache=cache,
    )
    return Checkpoint.from_model(model, tokenizer=found_tokenizer, origin=origin, readout=readout)


def _resolve(
    source: Any,
    *,
    revision: str | None = None,
    tokenizer: Any = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    device_map: Any = None,
    trust_remote_code: bool = False,
    cache: bool = True,
) -> tuple[Any, Any, Origin]:
    """The model, its usable tokenizer or None, and where they came from."""
    if not isinstance(source, str | Path):
        given = {"revision": revision, "dtype": dtype, "device": device, "device_map": device_map}
        _refuse_options([name for name, value in given.items() if value is not None])
        return _of_memory(source, tokenizer)
    if device is not None and device_map is not None:
        raise SelectionError("Pass device= or device_map=, not both.")
    wish = _Wish(
        tokenizer=tokenizer,
        dtype=parse_dtype(dtype),
        device=parse_device(device),
        device_map=device_map,
        trust_remote_code=trust_remote_code,
        cache=cache,
    )
    if isinstance(source, str) and source in packages.TWINS:
        return _of_twin(source, revision, wish)
    demo = isinstance(source, str) and source == packages.DEMO
    path = None if demo else _local_path(source)
    if path is None and not demo:
        folder = hub.fetch(str(source), revision=revision, with_code=trust_remote_code)
        return _of_folder(
            folder, Origin(model_id=str(source), format="", revision=folder.name), wish
        )
    if revision is not None:
        raise SelectionError(
            f"revision={revision!r} belongs to a hub id; {str(source)!r} is on this machine. "
            "Leave it out."
        )
    if path is None:
        return _of_demo(wish)
    file = _gguf_in(path)
    if file is None:
        return _of_folder(path, Origin(model_id=_last_part(path), format=""), wish)
    origin = Origin(model_id=file.name, format="gguf", files_hash=weights.hash_file(file))
    return _of_gguf(gguf.opened(file), origin, wish)


def _of_folder(folder: Path, origin: Origin, wish: _Wish) -> tuple[Any, Any, Origin]:
    """A Hugging Face folder; `origin` says what is known so far, its format "" that it is not
    the conversion of another file."""
    read_config(folder)
    files = weights.find_weights(folder)
    if files is None:
        raise no_weights(folder)
    known = origin.files_hash
    with ThreadPoolExecutor(1) as pool:
        # Beside the loading, which it takes about as long as.
        digest = None if known else pool.submit(weights.hash_files, files.paths)
        model, notes = open_folder(
            folder,
            weights=files,
            dtype=wish.dtype,
            device_map=wish.device_map,
            trust_remote_code=wish.trust_remote_code,
        )
    if wish.device is not None:
        model.to(wish.device)
    tokenizer, reason = wish.tokenizer, None
    if tokenizer is None:
        trust = {"trust_remote_code": True} if wish.trust_remote_code else {}
        tokenizer, reason = tokenizing.load_tokenizer(folder, d_vocab=_rows(model), **trust)
    origin = dataclasses.replace(
        origin,
        format=origin.format or files.format,
        files_hash=known if digest is None else digest.result(),
        checkpoint_keys=files.keys,
        notes=(*origin.notes, *notes, *([reason] if reason else [])),
    )
    return _checked(model, tokenizer, origin)


def _of_gguf(file: gguf.Opener, origin: Origin, wish: _Wish) -> tuple[Any, Any, Origin]:
    note = "de-quantised from GGUF: the weights are those of the file, rounded to its blocks"
    origin = dataclasses.replace(origin, notes=(*origin.notes, note))
    if wish.cache:
        try:
            folder = gguf.converted(str(origin.files_hash), file)
        except LensError:
            raise
        except OSError as error:
            note = f"the conversion could not be kept ({error}), so it is made anew each time"
            origin = dataclasses.replace(origin, notes=(*origin.notes, note))
        else:
            if wish.dtype is None:
                wish = dataclasses.replace(wish, dtype=torch.float32)
            return _of_folder(folder, origin, wish)
    with file() as path:
        model, tokenizer = gguf.dequantized(
            path, dtype=wish.dtype or torch.float32, device_map=wish.device_map
        )
    if wish.device is not None:
        model.to(wish.device)
    origin = dataclasses.replace(origin, checkpoint_keys=gguf.keys_of(model))
    return _checked(model, wish.tokenizer or tokenizer, origin)


def _of_demo(wish: _Wish) -> tuple[Any, Any, Origin]:
    origin = Origin(
        model_id=packages.DEMO,
        format="gguf",
        files_hash=packages.demo_hash(),
        notes=("demo is Gemma 3 270M (base), from the package index",),
    )
    return _of_gguf(gguf.written(packages.write_demo, "gemma-3-270m.gguf"), origin, wish)


def _of_twin(name: str, revision: str | None, wish: _Wish) -> tuple[Any, Any, Origin]:
    """A shipped twin, in float32 unless asked otherwise: its file is bfloat16 to be small."""
    if revision is not None:
        raise SelectionError(f"{name!r} comes with lens and has no revision {revision!r}.")
    if wish.dtype is None:
        wish = dataclasses.replace(wish, dtype=torch.float32)
    note = "shipped with lens: trained to differ from its twin in the tie alone"
    origin = Origin(model_id=name, format="", notes=(note,))
    return _of_folder(packages.twin_folder(name), origin, wish)


def _of_memory(source: Any, tokenizer: Any) -> tuple[Any, Any, Origin]:
    model, own_tokenizer, notes, format_ = memory.unwrap(source)
    name = str(getattr(model.config, "_name_or_path", "") or "")
    if not _HUB_ID.fullmatch(name):
        name = Path(name).name or type(model).__name__
    if tokenizer is None and own_tokenizer is not None:
        reason = tokenizing.why_unusable(own_tokenizer, d_vocab=_rows(model))
        tokenizer = own_tokenizer if reason is None else None
    return _checked(model, tokenizer, Origin(model_id=name, format=format_, notes=notes))


def _checked(model: Any, tokenizer: Any, origin: Origin) -> tuple[Any, Any, Origin]:
    weights.check_materialized(model)
    refuse_without_float64(p.device for p in model.parameters())
    weights.check_finite(model)
    if tokenizer is not None:
        tokenizer = tokenizing.open_tokenizer(tokenizer, d_vocab=_rows(model))
    return model, tokenizer, origin


def _rows(model: Any) -> int:
    """How many ids the embedding takes. Raises UnsupportedArchitectureError without a lookup."""
    weight = getattr(model.get_input_embeddings(), "weight", None)
    if weight is None or weight.ndim != 2:
        raise UnsupportedArchitectureError(
            f"{type(model).__name__} has no embedding that takes token ids, so a tokenizer is of "
            "no use to it. Load a language model."
        )
    return int(weight.shape[0])


def _refuse_options(names: list[str]) -> None:
    if names:
        raise SelectionError(
            f"{', '.join(names)} cannot be applied to a model in memory, which is never changed. "
            "Move or cast it yourself before lens.load, and leave these out."
        )


def _local_path(source: str | Path) -> Path | None:
    """The path that is meant, None where the text is the name of a repository."""
    path = expanded(source)
    if str(source) and (is_file(path) or is_folder(path)):
        return path
    if isinstance(source, str) and _HUB_ID.fullmatch(source) and path.suffix != ".gguf":
        return None
    raise CheckpointNotFoundError(
        f"There is nothing at {str(source)[:300]!r}{_did_you_mean(path)}. Pass a folder, a .gguf "
        "file or a hub id such as openai-community/gpt2."
    )


def _did_you_mean(path: Path) -> str:
    if not is_folder(path.parent):
        return f": {str(path.parent)!r} is no folder"
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return f": {str(path.parent)!r} cannot be looked into"
    close = difflib.get_close_matches(path.name, names, n=3)
    return f"; there is {' and '.join(close)}" if close else ""


def _gguf_in(path: Path) -> Path | None:
    """The GGUF file at or in `path`, None for a folder in Hugging Face's layout."""
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        raise CheckpointNotFoundError(
            f"{path} is neither a folder nor a .gguf file. Pass the folder that it lies in: "
            f"{str(path.parent)!r}."
        )
    if any(
        (path / name).is_file() or (path / f"{name}.index.json").is_file() for name in _WEIGHT_FILES
    ):
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:6])
        raise SelectionError(f"{path} holds {len(found)} GGUF files: {names}. Pass one of them.")
    return found[0] if found else None


def _last_part(path: Path) -> str:
    return path.resolve().name or str(path)
