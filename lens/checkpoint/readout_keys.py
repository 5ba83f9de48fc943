"""Tensors of the files that belong to the readout, and that the model class would miss or drop."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lens.checkpoint.weights import WeightFiles
from lens.errors import IncompleteCheckpointError


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Where the embedding and the unembedding stand in a model, by name; None where absent."""

    embedding: str | None
    unembedding: str | None

    @classmethod
    def of(cls, model: Any) -> "Heads":
        """Find both by the model's own accessors."""
        names = {id(module): name for name, module in model.named_modules()}
        return cls(
            embedding=names.get(id(model.get_input_embeddings())),
            unembedding=names.get(id(model.get_output_embeddings())),
        )


def refuse_missing(model: Any, missing: set[str], *, declared: str | None) -> None:
    """Raises IncompleteCheckpointError where weights were not in the files, and so are random.

    `declared` is the class that the config names, told where it is another one.
    """
    if not missing:
        return
    heads = Heads.of(model)
    lost = []
    for what, path in (("unembedding", heads.unembedding), ("embedding", heads.embedding)):
        names = sorted(name for name in missing if path and name.startswith(path + "."))
        if names:
            lost.append(f"the {what} ({', '.join(names)})")
    first = ", ".join(sorted(missing)[:3])
    found = " and ".join(lost) if lost else f"{len(missing)} weights, first {first},"
    name = type(model).__name__
    because = ""
    if declared and declared != name:
        because = f" The config names {declared}, which is no language model with these weights."
    raise IncompleteCheckpointError(
        f"The files do not hold {found} of {name}: they would be random, and so would every "
        f"reading.{because} Load a checkpoint that was saved with its language-model head."
    )


def settle_dropped(model: Any, dropped: set[str], weights: WeightFiles) -> tuple[str, ...]:
    """Attach an output bias that the class dropped; returns sentences on what was done.

    Raises IncompleteCheckpointError for any other dropped tensor of the embedding, the final norm
    or the unembedding: without it the model is not the one that was trained.
    """
    notes, refused = [], []
    heads = Heads.of(model)
    for key in sorted(dropped):
        if _attach(model, key, heads, weights):
            notes.append(
                f"{type(model).__name__} does not read {key}, which the files hold: it was "
                "attached to the unembedding, and the model's own forward adds it"
            )
        elif _is_of_the_readout(model, key, heads, weights):
            refused.append(key)
    if refused:
        raise IncompleteCheckpointError(
            f"The files hold {', '.join(refused)}, which {type(model).__name__} does not read: "
            "without it the readout is not the one that was trained. Load it with the class that "
            "it was saved from, and pass that model."
        )
    others = sorted(dropped - {key for key in dropped if any(key in note for note in notes)})
    if others:
        notes.append(
            f"{len(others)} tensors of the files are not read by {type(model).__name__}, and are "
            f"no part of its readout: {', '.join(others[:4])}{' …' if len(others) > 4 else ''}"
        )
    return tuple(notes)


def _attach(model: Any, key: str, heads: Heads, weights: WeightFiles) -> bool:
    """Give the unembedding the bias `key`, where it is one and there is none. True where done."""
    head = model.get_output_embeddings()
    if heads.unembedding is None or _suffix(key, heads.unembedding) != "bias":
        return False
    # Only nn.Linear itself is known to add `self.bias` in its forward.
    if type(head) is not nn.Linear or head.bias is not None or head.weight.is_meta:
        return False
    if weights.shapes.get(key) != (head.out_features,):
        return False
    value = weights.read(key).to(dtype=head.weight.dtype, device=head.weight.device)
    head.bias = nn.Parameter(value, requires_grad=head.weight.requires_grad)
    return True


def _is_of_the_readout(model: Any, key: str, heads: Heads, weights: WeightFiles) -> bool:
    for path in (heads.unembedding, heads.embedding):
        if path is not None and _suffix(key, path) is not None:
            return True
    shape = weights.shapes.get(key, ())
    rows = _rows(model)
    if rows and torch.Size(shape).numel() == rows:
        return True
    return _beside_the_blocks(model, key)


def _beside_the_blocks(model: Any, key: str) -> bool:
    """Whether the key names a new parameter of a module that is there, outside the blocks.

    The final norm is such a module. Buffers that older versions saved are not meant.
    """
    path, _, name = key.rpartition(".")
    if name not in ("weight", "bias", "scale", "gamma", "beta"):
        return False
    modules = dict(model.named_modules())
    prefix = getattr(model, "base_model_prefix", "")
    for candidate in (path, f"{prefix}.{path}"):
        parts = candidate.split(".")
        parents = [".".join(parts[:n]) for n in range(1, len(parts))]
        if candidate in modules and not any(
            isinstance(modules.get(parent), nn.ModuleList) for parent in parents
        ):
            return True
    return False


def _suffix(key: str, path: str) -> str | None:
    """What follows `path` in a key, None where the key is not beneath it."""
    return key[len(path) + 1 :] if key.startswith(path + ".") else None


def _rows(model: Any) -> int | None:
    weight = getattr(model.get_output_embeddings(), "weight", None)
    return None if weight is None else int(weight.shape[0])
