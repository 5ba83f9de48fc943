"""How a loaded model is continued with its matrices as they are, and with the tie changed."""

import math
from dataclasses import dataclass
from typing import Literal

from lens.errors import SelectionError

Matrices = Literal["as loaded", "untied", "input", "output", "mean"]
"""As they are; two that begin as copies of the one; one with the values of W_E, W_U or the mean."""


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """What all arms of a continued model have in common: steps, rates, windows, what is read.

    The rates warm up over `warmup_steps` and stay. Weight decay is on the matrices of the blocks
    alone; gradients are not clipped, and there is no dropout. After the steps `measure_at` (left
    out: 0, 1, 3, 10, 30, ... and the last) `documents` held-out documents are read, each up to
    4,000 characters, with translators fitted on `fit_documents` of the training documents.
    """

    steps: int = 300
    measure_at: tuple[int, ...] = ()
    trunk_rate: float = 1e-4
    embedding_rate: float = 1e-4
    warmup_steps: int = 10
    window_tokens: int | None = None
    batch_windows: int = 8
    seed: int = 0
    documents: int = 24
    fit_documents: int = 48
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95

    def __post_init__(self) -> None:
        counts = (self.steps, self.batch_windows, self.documents, self.fit_documents)
        if min(counts) < 1:
            raise SelectionError(
                f"steps, batch_windows, documents and fit_documents are {counts}; expected at "
                "least 1 of each."
            )
        rates = (self.trunk_rate, self.embedding_rate)
        if not all(math.isfinite(rate) and rate >= 0 for rate in rates):
            raise SelectionError(f"The rates are {rates}; expected numbers from 0 on.")
        wrong = [at for at in self.measure_at if not 0 <= at <= self.steps]
        if wrong:
            raise SelectionError(
                f"measure_at names the steps {wrong}; there are 0 (before the first) to "
                f"{self.steps}."
            )

    @property
    def points(self) -> tuple[int, ...]:
        """The steps after which is measured, 0 and the last always among them."""
        wanted = self.measure_at or log_spaced(self.steps)
        return tuple(sorted({0, *wanted, self.steps}))

    def rate_factor(self, step: int) -> float:
        """What the rates are multiplied with at a step, 0 the first."""
        return min(1.0, (step + 1) / max(1, self.warmup_steps))


def log_spaced(steps: int) -> tuple[int, ...]:
    """0, then half a power of ten apart: 1, 3, 10, 30, 100, ... below `steps`, and `steps`.

    >>> log_spaced(40)
    (0, 1, 3, 10, 30, 40)
    """
    between = (m * 10**e for e in range(len(str(steps))) for m in (1, 3))
    return (0, *(at for at in between if at < steps), steps)


@dataclass(frozen=True, kw_only=True)
class ContinuedArm:
    """One way to go on from the loaded model; `mixing` as in `lens.study.arms.Arm`."""

    name: str
    matrices: Matrices
    mixing: tuple[float, float] = (0.0, 0.0)


OF_TIED = (
    ContinuedArm(name="tied", matrices="as loaded"),
    ContinuedArm(name="untied", matrices="untied"),
    ContinuedArm(name="mixed-1-1", matrices="untied", mixing=(1.0, 1.0)),
    ContinuedArm(name="mixed-1-0", matrices="untied", mixing=(1.0, 0.0)),
    ContinuedArm(name="mixed-0-1", matrices="untied", mixing=(0.0, 1.0)),
)
OF_UNTIED = (
    ContinuedArm(name="untied", matrices="as loaded"),
    ContinuedArm(name="tied-output", matrices="output"),
    ContinuedArm(name="tied-mean", matrices="mean"),
    ContinuedArm(name="tied-input", matrices="input"),
)


def arms_of(*, tied: bool, names: tuple[str, ...] = ()) -> tuple[ContinuedArm, ...]:
    """The arms of a tied or an untied model, those of these names; without names, the plain ones.

    Mixed gradients are controls, and run only when named. Raises SelectionError.
    """
    every = {arm.name: arm for arm in (OF_TIED if tied else OF_UNTIED)}
    if not names:
        return tuple(arm for arm in every.values() if arm.mixing == (0.0, 0.0))
    wrong = [name for name in names if name not in every]
    if wrong:
        kind = "a tied" if tied else "an untied"
        raise SelectionError(f"There is no arm {wrong[0]!r} of {kind} model: {', '.join(every)}.")
    return tuple(every[name] for name in dict.fromkeys(names))
