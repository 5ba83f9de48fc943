"""What `lens inspect` tells of a checkpoint, as one record."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CheckpointSummary:
    """What `lens inspect` tells: names, sizes, the tie, the readout and how it was proved."""

    model_id: str
    revision: str | None
    model_class: str
    n_parameters: int
    n_layers: int
    d_model: int
    d_vocab: int
    n_ctx: int | None
    dtype: str
    device: str
    blocks: str
    residual_layout: str
    target: str
    tie: str
    tie_detail: str
    tie_rows: tuple[tuple[str, str], ...]
    lookup_scale: float | None
    readout: str
    readout_steps: str
    proof: str
    why_not_direct: str | None
    tokenizer: str | None
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(f"{label:<16} {text}" for label, text in self.rows())

    def rows(self) -> list[tuple[str, str]]:
        """(label, text) pairs, in the order in which a reader wants them."""
        scale = "none measurable" if self.lookup_scale is None else f"x {self.lookup_scale:.6g}"
        rows = [
            ("model", self.model_id + (f" @ {self.revision}" if self.revision else "")),
            ("class", f"{self.model_class}, {self.n_parameters:,} parameters"),
            (
                "sizes",
                f"{self.n_layers} layers, d_model {self.d_model}, d_vocab {self.d_vocab:,}, "
                f"context {self.n_ctx or 'unbounded'}, {self.dtype} on {self.device}",
            ),
            ("blocks", f"{self.blocks} ({self.residual_layout})"),
            *self.tie_rows,
            ("lookup scale", scale),
            ("readout", f"{self.readout}: {self.readout_steps}"),
            ("proof", self.proof),
            ("scored against", f"the {self.target} token"),
            ("tokenizer", self.tokenizer or "none: pass token ids"),
        ]
        if self.why_not_direct:
            at = next(i for i, (label, _) in enumerate(rows) if label == "proof")
            rows.insert(at + 1, ("not direct", self.why_not_direct))
        return rows + [("note", note) for note in self.notes]
