"""Tie, untie, interpolate, reset: always on a copy, which is taken apart and proved anew."""

import copy
import dataclasses
import glob
import math
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lens.checkpoint.checkpoint import Checkpoint
from lens.checkpoint.plain_torch import in_plain_torch
from lens.checkpoint.proof import same_numbers
from lens.checkpoint.readout import DirectReadout
from lens.errors import (
    ExportError,
    SelectionError,
    ShapeError,
    UnsupportedArchitectureError,
    UnsupportedModelStateError,
)
from lens.linear import blocks, rotation

ABANDONED_SECONDS = 3600
"""A partial folder that nothing was written in for so long is of a run that was killed."""

_HEX_BYTES = 6
_FLAG = "tie_word_embeddings"


@in_plain_torch
def untie(checkpoint: Checkpoint) -> Checkpoint:
    """A copy in which every matrix of the tie is a parameter of its own, with the same logits.

    Encoder and decoder lookups part too: that is what the class reads where its flag is off. The
    user's model is not touched. Raises SelectionError where the matrices are two tensors already,
    UnsupportedArchitectureError where the flag alone changes the logits (Switch Transformers),
    UnsupportedModelStateError for weights that are not in memory.

    >>> lens.untie(model).tie.verdict  # doctest: +SKIP
    'equal values, separate'
    """
    if not checkpoint.tie.is_tied:
        raise SelectionError(f"There is no tie to undo: {checkpoint.tie.verdict}.")
    model = _copied(checkpoint)
    _part(model)
    result = _taken_apart(checkpoint, model, "untied")
    _require_same_logits(checkpoint, result)
    return result


@in_plain_torch
def tie(checkpoint: Checkpoint, *, keep: str) -> Checkpoint:
    """A copy in which one matrix serves as lookup and as unembedding.

    `keep` says whose values it has: "input" (W_E), "output" (W_U) or "mean" of the two. In an
    encoder-decoder the encoder's lookup joins them where the class says so. Biases stay. Raises
    SelectionError where they are one already, ShapeError where shapes differ,
    UnsupportedArchitectureError where the class cannot hold a tie, UnsupportedModelStateError.
    """
    if keep not in ("input", "output", "mean"):
        raise SelectionError(f'keep is {keep!r}; expected "input", "output" or "mean".')
    if checkpoint.tie.is_tied:
        raise SelectionError(f"The matrices are one already: {checkpoint.tie.verdict}.")
    _require_alike(checkpoint)
    here, there = checkpoint.W_E.device, checkpoint.W_U.device
    if here != there:
        raise UnsupportedModelStateError(
            f"W_E is on {here} and W_U on {there}: one matrix cannot be on both. Load "
            "the model on one device, or use interpolate(alpha=1), which keeps two."
        )
    model = _copied(checkpoint)
    names = checkpoint.tie.input_name, checkpoint.tie.output_name
    w_e, w_u = _named(model, names[0]), _named(model, names[1])
    value = {"input": lambda: w_e, "output": lambda: w_u, "mean": lambda: (w_e + w_u) / 2}[keep]()
    _set_flags(model, True)
    mapping = model.get_expanded_tied_weights_keys(all_submodels=True)
    if not any(_named(model, target) is w_u for target in mapping):
        raise UnsupportedArchitectureError(
            f"{type(model).__name__} maps no tied weights for {names[1]}: saved, its tie would be "
            "lost. Use interpolate(alpha=1), which keeps two matrices of equal values."
        )
    with torch.no_grad():
        value = value.clone()
        for name in (*names, *_kin(model, mapping, w_u)):
            _named(model, name).copy_(value)
        for target, source in mapping.items():
            # BERT ties a bias with the matrix; the one in use is the target's.
            if _named(model, source).shape != value.shape:
                _named(model, source).copy_(_named(model, target))
    model.tie_weights()
    result = _taken_apart(checkpoint, model, f"tied, values of the {keep}")
    if not result.tie.is_tied:
        raise UnsupportedArchitectureError(
            f"{type(model).__name__} did not join {names[0]} and {names[1]}: {result.tie.verdict}."
        )
    _require_only_the_matrix_changed(checkpoint, result)
    return result


@in_plain_torch
def interpolate(checkpoint: Checkpoint, alpha: int | float, *, rotate: bool = False) -> Checkpoint:
    """A copy with W_U(alpha) = (1 - alpha) W_U + alpha W_E; the lookup stays as it is.

    alpha 0 is the model as it was, alpha 1 has the values of a tie. `rotate` puts W_E R in place
    of W_E, R the orthogonal map that brings W_E nearest to W_U: it parts "other directions" from
    "other geometry". Raises SelectionError for a tied model or an alpha outside [0, 1],
    ShapeError, UnsupportedModelStateError.
    """
    if not (math.isfinite(alpha) and 0 <= alpha <= 1):
        raise SelectionError(f"alpha is {alpha}; expected a number from 0 to 1.")
    if checkpoint.tie.is_tied:
        raise SelectionError("W_E is W_U here: there is no path between them.")
    _require_alike(checkpoint)
    model = _copied(checkpoint)
    w_e = _named(model, checkpoint.tie.input_name)
    w_u = _named(model, checkpoint.tie.output_name)
    with torch.no_grad():
        turn = rotation(w_e, w_u) if rotate else None
        for rows in blocks(w_u.shape[0]):
            end = w_e[rows] if turn is None else (w_e[rows].double() @ turn).to(w_e.dtype)
            # lerp is exact at both ends.
            w_u[rows] = torch.lerp(w_u[rows], end.to(w_u.device, w_u.dtype), alpha)
    _set_flags(model, False)
    turned = " rotated" if rotate else ""
    return _taken_apart(
        checkpoint, model, f"unembedding {alpha:g} of the way to the{turned} lookup"
    )


@in_plain_torch
def reset_bias(checkpoint: Checkpoint) -> Checkpoint:
    """A copy whose output biases are zero: b_U, and those that are added after the product.

    Raises SelectionError where there is none, UnsupportedModelStateError.
    """
    model = _copied(checkpoint)
    result = _taken_apart(checkpoint, model, "output bias zero")
    biases = _output_biases(result)
    if not biases:
        raise SelectionError(
            f"{type(model).__name__} has no output bias. What its final norm's bias adds through "
            "W_U is told by lens.frequency."
        )
    with torch.no_grad():
        for bias in biases:
            bias.zero_()
    return _taken_apart(checkpoint, model, "output bias zero")


def save_checkpoint(
    checkpoint: Checkpoint, folder: str | Path, *, max_shard_size: str = "5GB"
) -> Path:
    """Write the model and its tokenizer to a new folder, from which `lens.load` reads them back.

    `max_shard_size` is the largest weights file. The folder appears when it is whole; partial ones
    that a killed run left an hour ago are removed. Raises ExportError where it exists and is not
    empty.
    """
    target = Path(folder)
    require_new_folder(target)
    _remove_abandoned(target)
    part = target.with_name(f".{target.name}.{secrets.token_hex(_HEX_BYTES)}.partial")
    try:
        part.mkdir(parents=True)
    except OSError as error:
        raise ExportError(f"{part} cannot be made: {error.strerror}.") from error
    try:
        with _as_trained(checkpoint.model):
            checkpoint.model.save_pretrained(part, max_shard_size=max_shard_size)
        if checkpoint.tokenizer is not None:
            checkpoint.tokenizer.save_pretrained(part)
        if target.is_dir():
            target.rmdir()
        part.replace(target)
    except OSError as error:
        raise ExportError(f"{target} cannot be written: {error}.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


@contextmanager
def _as_trained(model: Any) -> Iterator[None]:
    """Within: weights that the model divides by powers of two for inference as they are stored.

    RWKV does so in place at its first forward, and would do it again to what was saved after it.
    """
    divided = [m for m in model.modules() if getattr(m, "layers_are_rescaled", False)]
    flags = [module.training for module in divided]
    try:
        for module in divided:
            module.training = True
            module._rescale_layers()
        yield
    finally:
        for module, flag in zip(divided, flags, strict=True):
            module.training = False
            module._rescale_layers()
            module.training = flag


def require_new_folder(folder: Path) -> None:
    """Raise ExportError where something is there that would be overwritten."""
    if not folder.name or folder.name == "..":
        raise ExportError(f"{str(folder)!r} names no new folder; give the name of one.")
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ExportError(f"{folder} exists and is not empty; give the name of a new folder.")


def _remove_abandoned(target: Path) -> None:
    """Take away what killed runs left beside `target`: nothing written for an hour."""
    digits = "[0-9a-f]" * 2 * _HEX_BYTES
    for part in target.parent.glob(f".{glob.escape(target.name)}.{digits}.partial"):
        if part.is_symlink() or not part.is_dir():
            continue
        # Another run may be writing there, or have finished in between.
        with suppress(OSError):
            written = max(one.lstat().st_mtime for one in (part, *part.rglob("*")))
            if time.time() - written > ABANDONED_SECONDS:
                shutil.rmtree(part)


def _copied(checkpoint: Checkpoint) -> Any:
    for name, parameter in checkpoint.model.named_parameters():
        if parameter.is_meta or not parameter.is_floating_point():
            raise UnsupportedModelStateError(
                f"{name} is {parameter.dtype} on {parameter.device}: surgery needs plain weights "
                "in memory. Load the model without offloading or quantisation."
            )
    return copy.deepcopy(checkpoint.model)


def _taken_apart(source: Checkpoint, model: Any, what: str) -> Checkpoint:
    """The copy as a checkpoint of its own, with a note of what was done and what saving loses."""
    origin = source.origin
    notes = [note for note in origin.notes if note != what]
    if not _flag_survives(model):
        notes.append(
            f"a new {type(model.config).__name__} always says tied: saved while its matrices are "
            "equal, this model comes back tied"
        )
    origin = dataclasses.replace(
        origin,
        model_id=f"{origin.model_id} ({what})",
        format="memory",
        files_hash=None,
        checkpoint_keys=None,
        notes=tuple(notes),
    )
    return Checkpoint.from_model(model, tokenizer=source.tokenizer, origin=origin)


def _part(model: Any) -> None:
    """Give each name of the tie a parameter of its own, and turn the flag off."""
    pairs = model.get_expanded_tied_weights_keys(all_submodels=True)
    shared: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared.setdefault(parameter.data_ptr(), []).append(name)
    mapped = {name for pair in pairs.items() for name in pair}
    matrices = {model.get_input_embeddings().weight.data_ptr()}
    for place, names in shared.items():
        if place not in matrices and not mapped.intersection(names):
            continue
        for name in names[1:]:
            old = _named(model, name)
            new = nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad)
            path, _, own = name.rpartition(".")
            setattr(model.get_submodule(path), own, new)
    _set_flags(model, False)
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def _set_flags(model: Any, value: bool) -> None:
    """The flag of the config and of every config inside the model."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    for name in ("text_config", "encoder", "decoder"):
        configs.append(getattr(model.config, name, None))
    for config in configs:
        if hasattr(config, _FLAG):
            setattr(config, _FLAG, value)


def _flag_survives(model: Any) -> bool:
    config = model.config
    made_anew = type(config).from_dict(config.to_dict())
    return getattr(made_anew, _FLAG, None) == getattr(config, _FLAG, None)


def _kin(model: Any, mapping: dict[str, str], w_u: Tensor) -> list[str]:
    """The names that the mapping would make one with W_U, however far."""
    group = {name for name, p in model.named_parameters(remove_duplicate=False) if p is w_u}
    while True:
        more = {n for pair in mapping.items() if group.intersection(pair) for n in pair}
        if more <= group:
            return sorted(group)
        group |= more


def _named(model: Any, name: str | None) -> Any:
    if name is None:
        raise UnsupportedArchitectureError(
            f"A matrix of {type(model).__name__} is no parameter of it, so it cannot be replaced."
        )
    return model.get_parameter_or_buffer(name)


def _output_biases(checkpoint: Checkpoint) -> list[Tensor]:
    found = [] if checkpoint.b_U is None else [checkpoint.b_U]
    if isinstance(checkpoint.readout, DirectReadout):
        for step in checkpoint.readout.unembedding.steps:
            if step.kind in ("add", "sub") and isinstance(step.value, Tensor) and step.value.ndim:
                found.append(step.value)
    return found


def _require_alike(checkpoint: Checkpoint) -> None:
    report = checkpoint.tie
    if report.input_shape is None or report.input_shape != report.output_shape:
        raise ShapeError(
            f"The lookup is {report.input_shape} and the unembedding {report.output_shape}; "
            "matrices of one shape are needed."
        )


def _require_same_logits(before: Checkpoint, after: Checkpoint) -> None:
    for state in ("logits", "random_logits"):
        old, new = getattr(before._proved.witness, state), getattr(after._proved.witness, state)
        if not same_numbers(old, new):
            gap = float((old.double() - new.double()).abs().max())
            raise UnsupportedArchitectureError(
                f"Turning {_FLAG} off changes the logits of {type(after.model).__name__} by up to "
                f"{gap:.3g}: the flag does more than tie. It cannot be untied and stay the model."
            )


def _require_only_the_matrix_changed(before: Checkpoint, after: Checkpoint) -> None:
    """The tail of the copy is the old one with another matrix: the flag did nothing else."""
    if not (isinstance(before.readout, DirectReadout) and isinstance(after.readout, DirectReadout)):
        return
    state = before._proved.witness.random_state
    expected = before.readout.through(after.W_U.detach()).logits(state)
    if not same_numbers(expected, after.readout.logits(state)):
        raise UnsupportedArchitectureError(
            f"Turning {_FLAG} on changes more than the matrix in {type(after.model).__name__}: the "
            "flag does more than tie. Use interpolate(alpha=1)."
        )
