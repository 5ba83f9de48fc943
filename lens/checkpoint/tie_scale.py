"""The exact cost of a tie for any config, counted on the meta device: no weights are needed."""

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from lens.checkpoint.matrices import ONE_TENSOR
from lens.checkpoint.tying import TieReport, report_tie
from lens.errors import CheckpointNotFoundError, SelectionError, UnsupportedArchitectureError
from lens.files import expanded, is_file, is_folder


def scale_table(configs: Iterable[Any]) -> list[tuple[str, TieReport]]:
    """For each config (an object, a dict, a config.json or its folder) its name and its tie.

    The model of the config is built without memory, so that `report.cost` is exact for the
    architecture: V x d, and the size of the model tied and untied. The verdict is that of a new
    model; a checkpoint may break it. Raises CheckpointNotFoundError, UnsupportedArchitectureError.

    >>> table = scale_table([{"model_type": "gpt2"}])
    >>> f"{table[0][1].cost.share_of_untied:.3f}"
    '0.237'
    """
    return [_row(config) for config in configs]


def _row(source: Any) -> tuple[str, TieReport]:
    name, config = _config(source)
    report = _report(config)
    if report.cost is None:
        raise UnsupportedArchitectureError(
            f"{name}: the model of this config has no embedding and unembedding to compare."
        )
    return name, report


def _config(source: Any) -> tuple[str, Any]:
    from transformers import CONFIG_MAPPING, AutoConfig

    if isinstance(source, str | Path):
        path = expanded(source)
        path = path / "config.json" if is_folder(path) else path
        if not is_file(path):
            raise CheckpointNotFoundError(
                f"There is no config at {path}. Pass a config.json or the folder that holds it."
            )
        name = path.parent.name if path.name == "config.json" else path.stem
        try:
            source = json.loads(path.read_text("utf-8"))
        except ValueError as error:
            raise CheckpointNotFoundError(f"{path} is no JSON ({error}).") from error
        if not isinstance(source, dict):
            raise CheckpointNotFoundError(f"{path} is no config: {type(source).__name__}.")
    elif not isinstance(source, dict):
        return str(getattr(source, "_name_or_path", "") or source.model_type), copy.deepcopy(source)
    else:
        name = str(source.get("model_type"))
    options = dict(source)
    model_type = options.pop("model_type", None)
    if model_type not in CONFIG_MAPPING:
        raise UnsupportedArchitectureError(
            f"The installed transformers does not know the model type {model_type!r} of {name}."
        )
    try:
        return name, AutoConfig.for_model(model_type, **options)
    except Exception as error:  # each config checks its own fields, with errors of its own
        raise SelectionError(f"{name} is no config of {model_type}: {error}") from error


def _report(config: Any) -> TieReport:
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

    last: Exception | None = None
    order = (AutoModelForCausalLM, AutoModelForMaskedLM)
    seq2seq = bool(getattr(config, "is_encoder_decoder", False))
    for auto in (AutoModelForSeq2SeqLM,) if seq2seq else order:
        try:
            with torch.device("meta"):
                model = auto.from_config(config)
        except (ValueError, KeyError) as error:
            last = error
            continue
        except (RuntimeError, TypeError, ZeroDivisionError) as error:
            raise SelectionError(
                f"No model of type {config.model_type!r} can be built of these sizes: {error}"
            ) from error
        return report_tie(model, None, seq2seq=seq2seq)
    raise UnsupportedArchitectureError(
        f"No language model of type {config.model_type!r} can be built: {last}"
    )


def table_text(table: list[tuple[str, TieReport]]) -> str:
    """The table as Markdown: V x d, its share with and without, bytes, and what is the default."""
    lines = [
        "| model | V x d | of the untied model | of the tied model | weights | new model is |",
        "|---|--:|--:|--:|--:|---|",
    ]
    for name, report in table:
        cost = report.cost
        assert cost is not None
        tied = "tied" if report.verdict in ONE_TENSOR else "untied"
        lines.append(
            f"| {name} | {cost.parameters:,} | {cost.share_of_untied:.1%} | "
            f"{cost.share_of_tied:.1%} | {cost.weight_bytes / 1e6:,.1f} MB | {tied} |"
        )
    return "\n".join(lines)
