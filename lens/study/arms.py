"""The arms of the study: what differs between two models that share all else."""

from dataclasses import dataclass
from typing import Literal

from lens.errors import SelectionError

Start = Literal["tied", "copy", "own"]
"""One matrix; two, W_U a copy of W_E; two, W_U drawn by itself."""
Family = Literal["gpt2", "granite", "phi", "stablelm", "llama"]
Change = Literal["none", "untie", "tie", "resume"]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train.

    `mixing` is (k1, k2) of two matrices: g_E = g_in + k1 g_out, g_U = g_out + k2 g_in; (0, 0) is
    plain training. `lookup` "sqrt(d)" multiplies the embedding by sqrt(d_model) and divides its
    first values by it. `change` happens to the matrices at half of the trunk, with their Adam
    state. `matched` widens the MLPs by the parameters that a tie saves.
    """

    name: str
    start: Start
    family: Family = "gpt2"
    mixing: tuple[float, float] = (0.0, 0.0)
    lookup: Literal["one", "sqrt(d)"] = "one"
    change: Change = "none"
    matched: bool = False
    decayed: bool = False
    varies: str = ""

    def __post_init__(self) -> None:
        if self.start == "tied" and self.mixing != (0.0, 0.0):
            raise SelectionError(f"{self.name}: gradients are mixed between two matrices.")

    @property
    def tied(self) -> bool:
        """Whether lookup and unembedding begin as one matrix."""
        return self.start == "tied"


def _three(prefix: str, varies: str, **more: object) -> list[Arm]:
    starts: tuple[tuple[str, Start], ...] = (
        ("tied", "tied"),
        ("untied-copy", "copy"),
        ("untied-own", "own"),
    )
    return [
        Arm(name=f"{prefix}{name}", start=start, varies=varies, **more)  # type: ignore[arg-type]
        for name, start in starts
    ]


CORE = tuple(_three("", "the tie, and what W_U begins as"))

PAIR = ("tied", "untied-copy")
"""Core arms that differ in the tie alone: the constraint effect is the second less the first."""

DOSES = (0.0, 0.25, 0.5, 0.75, 1.0)

ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        *CORE,
        *(
            Arm(
                name=f"mixed-{k1:g}-{k2:g}",
                start="copy",
                mixing=(k1, k2),
                varies="which gradient reaches which matrix",
            )
            for k1, k2 in ((1.0, 0.0), (0.0, 1.0), *((k, k) for k in DOSES))
        ),
        *_three("granite-", "the family, without a scale", family="granite"),
        *_three("scaled-", "sqrt(d) at the lookup", family="granite", lookup="sqrt(d)"),
        Arm(name="tied-matched", start="tied", matched=True, varies="parameters held equal"),
        Arm(name="tied-then-untied", start="tied", change="untie", varies="untied at half"),
        Arm(name="untied-then-tied", start="copy", change="tie", varies="tied at half (mean)"),
        Arm(name="tied-resumed", start="tied", change="resume", varies="control of the two above"),
        *_three("biased-", "a head bias", family="phi"),
        *_three("layernorm-", "LayerNorm, against RMSNorm", family="stablelm"),
        *_three("rmsnorm-", "RMSNorm, against LayerNorm", family="llama"),
        *_three("decayed-", "weight decay on the matrices", decayed=True),
    )
}


def arm_of(name: str) -> Arm:
    """The arm of that name. Raises SelectionError, which lists them."""
    if name not in ARMS:
        raise SelectionError(f"There is no arm {name!r}; there are {', '.join(ARMS)}.")
    return ARMS[name]
