"""A folder in Hugging Face's layout, opened as the language model that its files hold."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lens.checkpoint.readout_keys import refuse_missing, settle_dropped
from lens.checkpoint.weights import WeightFiles
from lens.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    MissingPackageError,
    UnsupportedArchitectureError,
    UnsupportedModelStateError,
)

_AUTO_CLASSES = {
    "seq2seq": "AutoModelForSeq2SeqLM",
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
}


def open_folder(
    folder: Path,
    *,
    weights: WeightFiles,
    dtype: torch.dtype | None,
    device_map: Any,
    trust_remote_code: bool,
) -> tuple[Any, tuple[str, ...]]:
    """The model in eval mode, and sentences on what a reader should know of its files.

    `weights` is what `find_weights` said of this folder. Raises CheckpointNotFoundError,
    CorruptCheckpointError, IncompleteCheckpointError, UnsupportedArchitectureError,
    UnsupportedModelStateError for an adapter, MissingPackageError.
    """
    declared = read_config(folder)
    with quiet_transformers():
        config = _open_config(folder, declared, trust_remote_code=trust_remote_code)
        model_class = _model_class(config, trust_remote_code=trust_remote_code)
        remote = {"trust_remote_code": True} if trust_remote_code else {}
        model, info = _from_pretrained(
            model_class,
            folder,
            config=config,
            dtype="auto" if dtype is None else dtype,
            device_map=device_map,
            # A safetensors file beside a pickle is what transformers takes, and what was checked.
            use_safetensors=weights.format == "safetensors",
            **remote,
        )
    _refuse_mismatched(model, info["mismatched_keys"], folder)
    named = (getattr(config, "architectures", None) or [None])[0]
    refuse_missing(model, set(info["missing_keys"]), declared=named)
    notes = settle_dropped(model, set(info["unexpected_keys"]), weights)
    if named and named != type(model).__name__:
        notes = (f"the config names {named}; read as {type(model).__name__}", *notes)
    return model, notes


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder as it stands. Raises as `open_folder` does."""
    if (folder / "adapter_config.json").is_file():
        raise UnsupportedModelStateError(
            f"{folder} holds an adapter, not a model. Merge it first: "
            "PeftModel.from_pretrained(base, folder).merge_and_unload(), and pass the result."
        )
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointNotFoundError(
            f"{folder} has no config.json, so it is no Hugging Face checkpoint; it holds "
            f"{_listing(folder)}. Pass the folder that save_pretrained wrote, or a .gguf file."
        )
    try:
        config = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise CorruptCheckpointError(f"{path} is no JSON ({error}). Get the file again.") from error
    if not isinstance(config, dict):
        raise CorruptCheckpointError(f"{path} holds no JSON object. Get the file again.")
    return config


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Within: transformers logs errors alone; its load report is told in our own words."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _open_config(folder: Path, declared: dict[str, Any], *, trust_remote_code: bool) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig, __version__

    model_type = declared.get("model_type")
    if model_type not in CONFIG_MAPPING:
        if "auto_map" not in declared:
            raise UnsupportedArchitectureError(
                f"The installed transformers {__version__} does not know the model type "
                f"{model_type!r} of {folder}. Install a newer one, or load the model with the "
                "code that it came with and pass it to lens.load."
            )
        _require_trust(trust_remote_code, str(model_type))
    try:
        return AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except ImportError as error:
        raise MissingPackageError(f"{folder} needs a package that is absent: {error}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"{folder / 'config.json'} is no valid {model_type} config: {_short(error)}"
        ) from error


def _model_class(config: Any, *, trust_remote_code: bool) -> Any:
    """The language-model class: the one that the config names, else the one of its model type."""
    import transformers

    for name in getattr(config, "architectures", None) or ():
        if name in _language_models():
            return getattr(transformers, name)
    remote = getattr(config, "auto_map", None) or {}
    for auto_class in _AUTO_CLASSES.values():
        if auto_class in remote:
            _require_trust(trust_remote_code, config.model_type)
            return getattr(transformers, auto_class)
    kinds = [kind for kind in _AUTO_CLASSES if config.model_type in _mapping(kind)]
    if not kinds:
        raise UnsupportedArchitectureError(
            f"transformers {transformers.__version__} has no causal, masked or sequence-to-"
            f"sequence language model of type {config.model_type!r}; the config names "
            f"{getattr(config, 'architectures', None)}. Only models with an unembedding are read."
        )
    return getattr(transformers, _mapping(_preferred(kinds, config))[config.model_type])


def _preferred(kinds: list[str], config: Any) -> str:
    """Of several language models of one type (BERT is masked, and causal as a decoder)."""
    if "seq2seq" in kinds and getattr(config, "is_encoder_decoder", False):
        return "seq2seq"
    if "causal" in kinds and (getattr(config, "is_decoder", False) or "masked" not in kinds):
        return "causal"
    return "masked" if "masked" in kinds else kinds[0]


def _mapping(kind: str) -> dict[str, str]:
    from transformers.models.auto import modeling_auto as auto

    return {
        "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    }[kind]


def _language_models() -> set[str]:
    from transformers.models.auto import modeling_auto as auto

    names: set[str] = set()
    for mapping in (
        *map(_mapping, _AUTO_CLASSES),
        auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    ):
        names.update(mapping.values())
    return names


def _require_trust(trust_remote_code: bool, model_type: str) -> None:
    if not trust_remote_code:
        raise UnsupportedArchitectureError(
            f"The model type {model_type!r} comes with its own Python code, which is not run "
            "unless asked. Read that code, and pass trust_remote_code=True if you trust it."
        )


def _from_pretrained(model_class: Any, folder: Path, **options: Any) -> tuple[Any, dict[str, Any]]:
    from safetensors import SafetensorError

    try:
        return model_class.from_pretrained(
            folder,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            weights_only=True,
            **options,
        )
    except ImportError as error:
        raise MissingPackageError(
            f"{folder} needs a package that is absent: {_short(error)}"
        ) from error
    except torch.OutOfMemoryError:
        raise
    except (SafetensorError, RuntimeError, OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpointError(
            f"{folder} cannot be read as {model_class.__name__} "
            f"({type(error).__name__}: {_short(error)}). Check config.json against the weights."
        ) from error


def _refuse_mismatched(model: Any, mismatched: set[Any], folder: Path) -> None:
    if not mismatched:
        return
    name, in_file, in_model = min(mismatched, key=lambda entry: entry[0])
    raise IncompleteCheckpointError(
        f"{len(mismatched)} tensors of {folder} have another shape than config.json asks for, "
        f"first {name}: {list(in_file)} in the files, {list(in_model)} in "
        f"{type(model).__name__}; they would be random. Correct config.json."
    )


def no_weights(folder: Path) -> CheckpointNotFoundError:
    """The error for a folder in which `find_weights` found none."""
    return CheckpointNotFoundError(
        f"{folder} holds no weights: neither model.safetensors nor pytorch_model.bin (nor an index "
        f"of parts); it holds {_listing(folder)}. Get the weight files."
    )


def _listing(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    if not names:
        return "nothing"
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:300] + (" …" if len(text) > 300 else "")
