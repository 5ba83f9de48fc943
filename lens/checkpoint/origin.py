"""Where a checkpoint came from, and what its files said beside what the model now holds."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What loading knew of a checkpoint.

    `model_id` is the name that the user gave (a path is given by its last part), `revision` the
    resolved commit or branch, `format` one of "safetensors", "pytorch", "gguf", "memory",
    "transformer_lens". `files_hash` is a sha256 over the weight files, None for a model that was
    in memory. `checkpoint_keys` are the tensor names that the files held, None where unknown.
    `notes` are sentences for the reader: a bias that was attached, a flag that contradicts.
    """

    model_id: str
    format: str
    revision: str | None = None
    files_hash: str | None = None
    checkpoint_keys: frozenset[str] | None = None
    notes: tuple[str, ...] = ()
