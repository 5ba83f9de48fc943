"""What a layer's reading may be used for, and what each use asks of it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Use:
    """One use of a reading: the quantity that decides it, and how good that has to be.

    The verdict is by `threshold`; `others` are thresholds that some readers would rather have.
    `form` writes a value, `short` the same in a narrow cell, in the unit `unit`.
    """

    key: str
    name: str
    asks: str
    quantity: str
    better: Literal["higher", "lower"]
    threshold: float
    others: tuple[float, ...]
    form: str
    short: str
    unit: str

    def criterion(self) -> str:
        """The condition in words."""
        return f"{self.quantity} {self.limit()}"

    def limit(self, threshold: float | None = None) -> str:
        """The threshold, or another one, with its sign."""
        value = self.threshold if threshold is None else threshold
        sign = "≥" if self.better == "higher" else "≤"
        return f"{sign} {self.form.format(value)}".replace(" ", "\N{NO-BREAK SPACE}")


USES = (
    Use(
        key="context",
        name="anything about the context",
        asks="Does the layer say more than the best guess that sees no context?",
        quantity="skill",
        better="higher",
        threshold=0.0,
        others=(0.25, 0.5),
        form="{:.2g}",
        short="{:.1f}",
        unit="skill",
    ),
    Use(
        key="top-1",
        name="the top-1 token",
        asks="Is the layer's top token the one that the model itself ends on?",
        quantity="top-1 agreement",
        better="higher",
        threshold=0.8,
        others=(0.5, 0.9),
        form="{:.0%}",
        short="{:.0%}",
        unit="%",
    ),
    Use(
        key="confidence",
        name="how sure it is",
        asks="Is the probability of the layer's top token the one that the model gives it?",
        quantity="gap in confidence",
        better="lower",
        threshold=0.05,
        others=(0.1, 0.02),
        form="{:.2g}",
        short="{:.2f}",
        unit="gap",
    ),
    Use(
        key="text",
        name="predicting the text",
        asks="Does the layer predict what comes next nearly as well as the model?",
        quantity="usefulness lost X",
        better="lower",
        threshold=0.5,
        others=(1.0, 0.1),
        form="{:.2g} bit",
        short="{:.1f}",
        unit="bits",
    ),
    Use(
        key="distribution",
        name="the probabilities",
        asks="Is the whole distribution that of the model?",
        quantity="KL(final ‖ lens)",
        better="lower",
        threshold=0.5,
        others=(1.0, 0.1),
        form="{:.2g} bit",
        short="{:.1f}",
        unit="bits",
    ),
)
"""From the least that can be asked to the most. The thresholds are a convention, and stated."""
