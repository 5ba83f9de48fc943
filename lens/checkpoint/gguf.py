"""A GGUF file, de-quantised by transformers and kept as safetensors."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from lens.checkpoint import conversions
from lens.checkpoint.gguf_header import GGUFHeader, read_header
from lens.checkpoint.pretrained import quiet_transformers
from lens.checkpoint.readout_keys import refuse_missing
from lens.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    UnsupportedArchitectureError,
)

_FORMAT = 1
"""To be raised when what is written into an entry changes."""

Opener = Callable[[], AbstractContextManager[Path]]


def opened(path: Path) -> Opener:
    """How to get at a file that is there."""

    @contextmanager
    def open_() -> Iterator[Path]:
        yield path

    return open_


def written(write: Callable[[Path], None], name: str) -> Opener:
    """How to get at a file that `write` makes, for as long as it is needed."""

    @contextmanager
    def open_() -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="tied-lens-") as folder:
            path = Path(folder) / name
            write(path)
            yield path

    return open_


def converted(sha256: str, open_file: Opener) -> Path:
    """The folder in the cache that holds this GGUF as safetensors, float32, made at first use.

    Raises OSError where the cache cannot be written, else the errors of `dequantized`.
    """

    def make(folder: Path) -> None:
        with open_file() as path:
            model, tokenizer = dequantized(path)
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    return conversions.find_or_make(_key(sha256), make)


def dequantized(
    path: Path, *, dtype: torch.dtype = torch.float32, device_map: Any = None
) -> tuple[Any, Any]:
    """The model and the tokenizer of a GGUF file, None where it holds no usable one.

    Raises CorruptCheckpointError, UnsupportedArchitectureError, IncompleteCheckpointError.
    """
    from transformers import AutoModelForCausalLM, GgufConfig

    header = read_header(path)
    try:
        with quiet_transformers():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path.parent,
                gguf_file=path.name,
                local_files_only=True,
                dtype=dtype,
                device_map=device_map,
                # Else a machine with the package `kernels` would keep the weights packed.
                quantization_config=GgufConfig(dequantize=True),
                output_loading_info=True,
            )
    except (ValueError, NotImplementedError) as error:
        if "not supported" not in str(error) and "Unrecognized" not in str(error):
            raise _damaged(path, error) from error
        raise UnsupportedArchitectureError(
            f"transformers cannot de-quantise GGUF files of the architecture "
            f"{header.architecture!r} ({error}). Load the original checkpoint instead."
        ) from error
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError, KeyError, TypeError, OSError) as error:
        raise _damaged(path, error) from error
    model, info = loaded
    refuse_missing(model, set(info["missing_keys"]), declared=None)
    _refuse_untied(model, header, path)
    # No longer quantised: these marks would keep it from being saved.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, _tokenizer(path) if header.has_tokenizer else None


def keys_of(model: Any) -> frozenset[str]:
    """The names under which the tensors of a conversion are kept: a tied matrix counts once."""
    return frozenset(name for name, _ in model.named_parameters())


def _tokenizer(path: Path) -> Any:
    """The tokenizer in a GGUF, None where transformers cannot convert its kind."""
    from transformers import AutoTokenizer

    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(
                path.parent, gguf_file=path.name, local_files_only=True
            )
    except (ValueError, KeyError, NotImplementedError, TypeError):
        return None


def _refuse_untied(model: Any, header: GGUFHeader, path: Path) -> None:
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    if not header.has_unembedding and not tied:
        raise IncompleteCheckpointError(
            f"{path} holds no output.weight, which means that the embedding is the unembedding "
            f"too, but transformers left the two of {type(model).__name__} untied, so that the "
            "unembedding is random. Load the original checkpoint instead."
        )


def _damaged(path: Path, error: Exception) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{path} has a sound header, but transformers cannot read it "
        f"({type(error).__name__}: {error}). Get the file again, or load the original checkpoint."
    )


def _key(sha256: str) -> str:
    import transformers

    return f"{sha256}-transformers-{transformers.__version__}-{_FORMAT}"
