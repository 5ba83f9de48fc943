"""What else differs between two checkpoints: read from both, so that no difference is credited
to the tie alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lens.checkpoint import packages
from lens.checkpoint.readout import DirectReadout
from lens.measuring.measure import tokenizer_hash

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint

_PARALLEL_FLAGS = ("use_parallel_residual", "parallel_attn", "use_parallel_attn_mlp")
_PARALLEL_TYPES = frozenset({"gptj", "codegen", "phi", "cohere", "cohere2"})
"""Types whose blocks run attention and feed-forward side by side without a flag in the config."""


@dataclass(frozen=True, kw_only=True)
class Confound:
    """One thing, besides the tie, in which two checkpoints differ; or that nobody knows."""

    what: str
    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.what}: {self.first} / {self.second}"


def confounds(first: "Checkpoint", second: "Checkpoint") -> tuple[Confound, ...]:
    """Everything read from both checkpoints in which they differ, and the training data.

    The tie itself is left out: it is what the comparison is about. Of the twins that come with
    lens nothing else differs.
    """
    if packages.are_twins(first.origin.model_id, second.origin.model_id):
        return ()
    ours, theirs = facts(first), facts(second)
    found = [
        Confound(what=name, first=ours[name], second=theirs[name])
        for name in ours
        if ours[name] != theirs[name]
    ]
    return (*found, Confound(what="training data and recipe", first="unknown", second="unknown"))


def caution(differing: Sequence[str]) -> str:
    """One sentence on what a difference between two checkpoints may be credited to."""
    if not differing:
        return (
            "These are matched twins: they differ in the tie and in nothing else. "
            "This is one pair of them."
        )
    return "These are two checkpoints, not the tie: they also differ in " + "; ".join(differing)


def facts(checkpoint: "Checkpoint") -> dict[str, str]:
    """What can be read of a checkpoint that may move its lens, in words."""
    model, readout = checkpoint.model, checkpoint.readout
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else None
    config = config or model.config
    direct = isinstance(readout, DirectReadout)
    scale = checkpoint.lookup_scale
    n_words = 0 if checkpoint.tokenizer is None else len(checkpoint.tokenizer)
    padded = max(0, checkpoint.d_vocab - n_words) if n_words else 0
    return {
        "architecture": type(model).__name__,
        "parameters": f"{sum(p.numel() for p in model.parameters()):,}",
        "layers": str(checkpoint.n_layers),
        "d_model": str(checkpoint.d_model),
        "vocabulary": f"{checkpoint.d_vocab:,}",
        "rows without a token": f"{padded:,}",
        "tokenizer": tokenizer_hash(checkpoint.tokenizer)[:12] or "none",
        "readout": readout.describe() if direct else readout.kind,  # type: ignore[union-attr]
        "lookup scale": "none measurable" if scale is None else f"{scale:.4g}",
        "positions": _positions(config),
        "parallel blocks": "yes" if _parallel(config) else "no",
        "residual streams": str(checkpoint.trunk.layout.n_streams),
        "dtype": str(checkpoint.dtype).removeprefix("torch."),
        "context": str(checkpoint.n_ctx or "unbounded"),
        "scored against": checkpoint.target,
    }


def _parallel(config: Any) -> bool:
    flagged = any(bool(getattr(config, name, False)) for name in _PARALLEL_FLAGS)
    return flagged or getattr(config, "model_type", None) in _PARALLEL_TYPES


def _positions(config: Any) -> str:
    if getattr(config, "alibi", False):
        return "ALiBi"
    rotary = ("rope_theta", "rope_parameters", "rotary_dim", "rotary_pct", "rotary_emb_base")
    if any(getattr(config, name, None) is not None for name in rotary):
        return "rotary"
    kind = getattr(config, "position_embedding_type", None)
    return str(kind) if kind else "other"
