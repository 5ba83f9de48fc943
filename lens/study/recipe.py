"""How a twin is trained: sizes, rates, schedule; all that its arms have in common."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from lens.errors import SelectionError


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Steps that run in one go: a stretch of the trunk, or a branch that decays off it.

    `first` and `last` count the steps since the beginning, the decay's included.
    """

    kind: str
    first: int
    last: int

    @property
    def name(self) -> str:
        """The trunk up to a step, or the branch off it: "trunk-00480", "branch-00480"."""
        at = self.last if self.kind == "trunk" else self.first
        return f"{self.kind}-{at:05}"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Sizes, rates and the warm-up, stable, decay schedule of a run.

    The trunk warms up and stays at its rate; at each of `branch_at` a branch of `branch_steps`
    decays to 0, so that arms can be compared at equal loss, each model after a decay of its own.
    Weight decay is on the matrices of the blocks alone; gradients are not clipped.
    """

    d_vocab: int = 2048
    d_model: int = 96
    n_layers: int = 6
    n_heads: int = 4
    window_tokens: int = 128
    batch_windows: int = 8
    warmup_steps: int = 100
    branch_at: tuple[int, ...] = (110, 240, 440, 800, 1240, 1750)
    branch_steps: int = 150
    trunk_rate: float = 5e-4
    embedding_rate: float = 8e-3
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95

    def __post_init__(self) -> None:
        at = self.branch_at
        if not at or list(at) != sorted(set(at)) or at[0] < 1 or self.branch_steps < 1:
            raise SelectionError(
                f"branch_at is {at}, branch_steps {self.branch_steps}: expected rising steps from "
                "1 on, and branches of at least one step."
            )
        if self.d_model % self.n_heads:
            raise SelectionError(f"{self.n_heads} heads do not divide a d_model of {self.d_model}.")

    @property
    def d_mlp(self) -> int:
        """Width of an MLP before any matching of parameters."""
        return 4 * self.d_model

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one step is trained on."""
        return self.window_tokens * self.batch_windows

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All that a run does, in order: to each branching point, then its branch."""
        return tuple(self._segments())

    def _segments(self) -> Iterator[Segment]:
        begin = 0
        for at in self.branch_at:
            yield Segment(kind="trunk", first=begin, last=at)
            yield Segment(kind="branch", first=at, last=at + self.branch_steps)
            begin = at

    def rate_factor(self, segment: Segment, step: int) -> float:
        """What the rates are multiplied with at a step, 0 the first."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        if segment.kind == "trunk":
            return warm
        return warm * (segment.last - step) / (segment.last - segment.first + 1)

    def quarter(self, trunk: float, embedding: float) -> "Recipe":
        """A quarter of the tokens and one branch, with the rates multiplied: to tune rates by."""
        return replace(
            self,
            branch_at=(max(1, self.branch_at[-1] // 4),),
            branch_steps=max(1, self.branch_steps // 4),
            trunk_rate=self.trunk_rate * trunk,
            embedding_rate=self.embedding_rate * embedding,
        )

    @property
    def hash(self) -> str:
        """16 hex digits over all of it."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.blake2b(text.encode("ascii"), digest_size=8).hexdigest()


def recipe_of(run: Mapping[str, Any]) -> Recipe:
    """The recipe in a run's file."""
    fields = run["recipe"]
    return Recipe(**fields | {"branch_at": tuple(fields["branch_at"])})
