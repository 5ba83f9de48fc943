"""Why a layer cannot be trusted yet: what its distance from the model's prediction is made of."""

from collections.abc import Callable
from dataclasses import dataclass

from lens.measuring.profile import LensProfile
from lens.measuring.statistics import Interval
from lens.show.ribbons import State
from lens.trust.evidence import marginal_share, reading_loss_share, temperature_share
from lens.trust.intervals import complement, entries
from lens.trust.verdict import states_of

MOST = 0.5
"""A reason is given at a layer where it stands for more than half."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One possible reason: what is measured, and what it means where that is more than half."""

    key: str
    name: str
    share: str
    means: str


KINDS = (
    Kind(
        key="copying",
        name="it copies the input",
        share="share of positions whose top-1 is the token that stands there",
        means="the row shows which row of the matrix the token itself is, not a prediction",
    ),
    Kind(
        key="marginal",
        name="wrong token frequencies",
        share="KL(mean p ‖ mean q) / KL: at least this share would go with a bias over tokens",
        means="the same tokens are too likely in every context alike",
    ),
    Kind(
        key="temperature",
        name="too sure, or too vague",
        share="share of KL that one temperature for the layer takes away",
        means="the order of tokens is better than their probabilities",
    ),
    Kind(
        key="basis",
        name="another basis",
        share="G / KL: the share that an affine translator takes away",
        means="the prediction is there, and the output's readout is not the one to read it with",
    ),
    Kind(
        key="representation",
        name="not there yet",
        share="R / KL: the share that the affine translator leaves",
        means="the affine map that was fitted does not find the prediction here; a better one may",
    ),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Reason:
    """A kind of reason with its share at each layer below the output; None: not measured."""

    kind: Kind
    found: Interval | None
    why_absent: str = ""

    @property
    def states(self) -> tuple[State, ...]:
        """At each layer below the output: more than half, less, or undecided."""
        return () if self.found is None else states_of(self.found, MOST, "higher")

    def layers(self, state: State = "yes") -> list[int]:
        """The layers in that state."""
        return [layer for layer, found in enumerate(self.states) if found == state]


def reasons(profile: LensProfile, translated: LensProfile | None) -> tuple[Reason, ...]:
    """Every kind of reason, measured where the profiles hold what it needs.

    They overlap: "another basis" and "not there yet" divide KL between them, the first three are
    further looks at the same KL.
    """
    return tuple(_reason(kind, profile, translated) for kind in KINDS)


def _reason(kind: Kind, profile: LensProfile, translated: LensProfile | None) -> Reason:
    why = _NEEDS[kind.key](profile, translated)
    if why:
        return Reason(kind=kind, found=None, why_absent=why)
    return Reason(kind=kind, found=_FOUND[kind.key](profile, translated))


def _copies(profile: LensProfile, _: LensProfile | None) -> Interval:
    return entries(profile.interval("copies"), slice(None, -1))


def _basis(profile: LensProfile, translated: LensProfile | None) -> Interval:
    if translated is None:
        raise ValueError("without a translated profile there is no share of reading loss")
    return reading_loss_share(profile, translated)


def _no_target_copy(profile: LensProfile, _: LensProfile | None) -> str:
    masked = profile.provenance.reading.target == "same"
    return "the target of a masked model is the token that stands there" if masked else ""


def _no_sample(profile: LensProfile, _: LensProfile | None) -> str:
    sampled = profile.counts["n_sampled"].sum() > 0
    return "" if sampled else "no sample of positions was read a second time"


def _no_folds(profile: LensProfile, _: LensProfile | None) -> str:
    folds = len(profile.marginals)
    return "" if folds > 1 else f"the positions read a second time stand in {folds} folds, not 2"


def _no_translator(_: LensProfile, translated: LensProfile | None) -> str:
    return "" if translated is not None else "no translator was fitted"


_Needs = Callable[[LensProfile, LensProfile | None], str]
_Found = Callable[[LensProfile, LensProfile | None], Interval]

_NEEDS: dict[str, _Needs] = {
    "copying": _no_target_copy,
    "marginal": _no_folds,
    "temperature": _no_sample,
    "basis": _no_translator,
    "representation": _no_translator,
}

_FOUND: dict[str, _Found] = {
    "copying": _copies,
    "marginal": lambda profile, _: marginal_share(profile),
    "temperature": lambda profile, _: temperature_share(profile),
    "basis": _basis,
    "representation": lambda profile, translated: complement(_basis(profile, translated)),
}
