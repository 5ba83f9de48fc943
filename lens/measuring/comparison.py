"""Two lenses over the same documents: signed differences with bands, a verdict, the confounds."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from lens.errors import SelectionError
from lens.measuring.confounds import caution
from lens.measuring.depth import ENTROPY_NAMES, depth_sums, mean_depths, of_kind
from lens.measuring.profile import LensProfile
from lens.measuring.skill import area, skill
from lens.measuring.statistics import MARGIN, Interval, Verdict, bootstrap, verdict

if TYPE_CHECKING:
    import pandas as pd

GRID = np.linspace(0.0, 1.0, 21)
"""Relative depths at which models of different numbers of layers are compared."""

QUANTITIES = {
    "KL": "KL(final || logit lens)",
    "X": "usefulness: cross-entropy of the logit lens less the model's own",
    "R": "not there yet: KL(final || affine translator)",
    "G": "reading loss: KL of the logit lens less that of the affine translator",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Side:
    """One model of a comparison: its profiles by lens, and the verdict on its tie."""

    name: str
    output: LensProfile
    through_input: LensProfile | None
    translated: LensProfile | None

    @property
    def overtaken_at(self) -> int | None:
        """The first layer from which on W_U reads better than W_E; None without an input lens."""
        if self.through_input is None:
            return None
        better = self.output.mean("kl_bits") < self.through_input.mean("kl_bits")
        stays = np.logical_and.accumulate(better[::-1])[::-1]
        return int(stays.argmax()) if stays.any() else None


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """What differs between two checkpoints' lenses, second less first; positive KL is worse.

    `differences` hold "KL" and "X", and "R" and "G" where both sides have a translator, at the
    relative depths `depth`, in `unit`. `headline` is the mean of G (of KL without translators)
    between the first and the last layer; `skill_difference` that of the skill areas.
    `depth_by_entropy` is the difference of the mean depth of the top-1 (over n_layers) within each
    bin of the models' own entropy (`lens.measuring.depth.ENTROPY_NAMES`): below 0 the second
    decides earlier; NaN where a draw of documents may leave a bin empty.
    """

    first: Side
    second: Side
    depth: Float[np.ndarray, " entry"]
    unit: str
    differences: Mapping[str, Interval]
    headline_of: str
    headline: Interval
    skill_difference: Interval | None
    depth_by_entropy: Interval
    verdict: Verdict | None
    confounds: tuple[str, ...]

    @property
    def separates_lens_from_representation(self) -> bool:
        """True where reading loss G and what is not there yet, R, are told apart."""
        return "G" in self.differences

    def __str__(self) -> str:
        a, b = self.first.name, self.second.name
        h = self.headline
        lines = [
            f"{b} less {a}, mean d{self.headline_of} between the first and the last layer: "
            f"{h.estimate[0]:+.3f} {self.unit} "
            f"[{h.low[0]:+.3f}, {h.high[0]:+.3f}], 95 % over {h.n_documents} documents"
        ]
        if self.skill_difference is not None:
            s = self.skill_difference
            lines.append(
                f"skill area: {s.estimate[0]:+.3f} [{s.low[0]:+.3f}, {s.high[0]:+.3f}]: "
                f"{b} is {_VERDICTS[self.verdict or 'undecided'].format(a=a, margin=MARGIN)}"
            )
        if told := self.depths_in_words():
            lines.append(f"depth of the top-1, by entropy of the output: {'; '.join(told)}")
        if not self.separates_lens_from_representation:
            lines.append(
                "No tuned lens was given: G (the lens' part) and R (the representation's) are not "
                "told apart, and dKL, dX stand alone."
            )
        lines.append(caution(self.confounds).rstrip(".") + ".")
        return "\n".join(lines)

    def depths_in_words(self) -> list[str]:
        """The entries of `depth_by_entropy` that have an interval: bin, difference, interval."""
        found = self.depth_by_entropy
        return [
            f"{name} bits {found.estimate[i]:+.3f} [{found.low[i]:+.3f}, {found.high[i]:+.3f}]"
            for i, name in enumerate(ENTROPY_NAMES)
            if np.isfinite(found.low[i])
        ]

    def to_frame(self) -> "pd.DataFrame":
        """A row for each depth: every difference with its interval and its band."""
        import pandas as pd

        columns: dict[str, np.ndarray] = {"depth": self.depth}
        unit = self.unit.replace(" ", "_")
        for name, found in self.differences.items():
            columns[f"d{name}_{unit}"] = found.estimate
            columns |= {f"d{name}_low_95": found.low, f"d{name}_high_95": found.high}
            columns |= {
                f"d{name}_band_low_95": found.band_low,
                f"d{name}_band_high_95": found.band_high,
            }
        return pd.DataFrame(columns)


_VERDICTS = {
    "better": "better than {a}",
    "worse": "worse than {a}",
    "equivalent": "equivalent to {a} within {margin}",
    "undecided": "neither shown to differ from {a} nor to be within {margin}: undecided",
}


def compared(first: Side, second: Side, *, confounds: tuple[str, ...]) -> Comparison:
    """Put two sides' documents side by side; both see the same draws of documents.

    Raises SelectionError for a model of one block, where they were not measured on the same
    documents in windows of one length, or where token-id documents of different tokenizers give
    no common unit.
    """
    require_inner_layers([(side.name, side.output.n_layers) for side in (first, second)])
    _require_same_documents(first, second)
    _require_same_windows(first, second)
    unit, per_token = _unit(first, second)
    sides = [
        _Columns(side, _depths(first, second), per_token=per_token) for side in (first, second)
    ]
    names = [name for name in QUANTITIES if all(name in side.names for side in sides)]
    differences = {name: _difference(sides, name) for name in names}
    headline_of = "G" if "G" in names else "KL"
    with_guess = all(side.output.provenance.baseline_hash for side in (first, second))
    skills = _skill_difference(first, second) if with_guess else None
    return Comparison(
        first=first,
        second=second,
        depth=_depths(first, second),
        unit=unit,
        differences=differences,
        headline_of=headline_of,
        headline=_difference(sides, headline_of, inner_mean=True),
        skill_difference=skills,
        depth_by_entropy=_depth_difference(first, second),
        verdict=None if skills is None else verdict(skills.replicates[:, 0]),
        confounds=confounds,
    )


def require_inner_layers(n_layers: Iterable[tuple[str, int]]) -> None:
    """Raise SelectionError for a model of one block, given names and numbers of blocks.

    Between its embedding and its output lies no layer, so there is no lens to compare.
    """
    shallow = [name for name, count in n_layers if count < 2]
    if shallow:
        raise SelectionError(
            f"{' and '.join(shallow)}: one block, so no layer lies between the first and the last, "
            "and there is nothing to compare. Measure each alone, with lens.measure."
        )


class _Columns:
    """Sums by document at the common depths: numerators of each quantity, and denominators."""

    def __init__(self, side: Side, depth: np.ndarray, *, per_token: bool):
        own = np.arange(side.output.n_layers + 1) / side.output.n_layers
        edge = 1 / side.output.n_layers - 1e-9
        self.inner = (depth >= edge) & (depth <= 1 - edge)
        self.at = np.stack([np.interp(depth, own, row) for row in np.eye(len(own))])
        profile, translated = side.output, side.translated
        nll = profile.sums["nll_bits"] - profile.final_sums["nll_bits"][:, None]
        self.names = {"KL": profile.sums["kl_bits"], "X": nll}
        if translated is not None:
            self.names["R"] = translated.sums["kl_bits"]
            self.names["G"] = profile.sums["kl_bits"] - translated.sums["kl_bits"]
        counts = profile.counts
        self.per = dict.fromkeys(QUANTITIES, counts["n" if per_token else "n_bytes"])
        self.per["X"] = counts["n_targets" if per_token else "n_bytes"]

    def of(self, name: str) -> np.ndarray:
        """[doc, depths + 1]: the numerators, then the denominator."""
        return np.concatenate([self.names[name] @ self.at, self.per[name][:, None]], axis=1)


def _difference(sides: list[_Columns], name: str, *, inner_mean: bool = False) -> Interval:
    stacked = np.concatenate([side.of(name) for side in sides], axis=1)
    half = stacked.shape[1] // 2
    # Layer 0 is given apart, and the last layer is 0 by law.
    inner = np.concatenate([side.inner for side in sides]).reshape(len(sides), -1).all(axis=0)

    def statistic(totals: np.ndarray) -> np.ndarray:
        a, b = totals[..., :half], totals[..., half:]
        found = b[..., :-1] / b[..., -1:] - a[..., :-1] / a[..., -1:]
        return found[..., inner].mean(axis=-1, keepdims=True) if inner_mean else found

    # A document that one of the two cannot read says nothing about their difference.
    counts = np.minimum(*(side.per[name] for side in sides))
    return bootstrap(stacked, statistic, counts=counts)


def _skill_difference(first: Side, second: Side) -> Interval:
    parts = [
        np.concatenate(
            [s.output.sums["kl_bits"], s.output.final_sums["baseline_kl_bits"][:, None]], axis=1
        )
        for s in (first, second)
    ]
    cut = parts[0].shape[1]

    def statistic(totals: np.ndarray) -> np.ndarray:
        a, b = totals[..., :cut], totals[..., cut:]
        areas = [area(skill(t[..., :-1], t[..., -1:])) for t in (a, b)]
        return (areas[1] - areas[0])[..., None]

    counts = np.minimum(*(s.output.counts["n"] for s in (first, second)))
    return bootstrap(np.concatenate(parts, axis=1), statistic, counts=counts)


def _depth_difference(first: Side, second: Side) -> Interval:
    parts = [depth_sums(of_kind(side.output.depths, "top-1")) for side in (first, second)]
    counts = np.minimum(*(s.output.counts["n"] for s in (first, second)))

    def statistic(totals: np.ndarray) -> np.ndarray:
        a, b = np.split(totals, 2, axis=-1)
        return mean_depths(b) - mean_depths(a)

    return bootstrap(np.concatenate(parts, axis=1), statistic, counts=counts)


def _depths(first: Side, second: Side) -> np.ndarray:
    if first.output.n_layers == second.output.n_layers:
        return np.arange(first.output.n_layers + 1) / first.output.n_layers
    return GRID


def _unit(first: Side, second: Side) -> tuple[str, bool]:
    ours, theirs = (s.output.provenance for s in (first, second))
    if ours.tokenizer_hash == theirs.tokenizer_hash:
        return "bits a token", True
    if not all(s.output.counts["n_bytes"].sum() for s in (first, second)):
        raise SelectionError(
            "These models have different tokenizers and no byte counts (token-id documents, or a "
            "tokenizer without offsets), so there is no common unit. Pass documents of text."
        )
    return "bits a byte", False


def _require_same_documents(first: Side, second: Side) -> None:
    ours, theirs = first.output, second.output
    if ours.provenance.corpus_hash != theirs.provenance.corpus_hash or not np.array_equal(
        ours.documents, theirs.documents
    ):
        raise SelectionError(
            f"{first.name} and {second.name} were not measured on the same documents; measure both "
            "on one corpus."
        )


def _require_same_windows(first: Side, second: Side) -> None:
    ours, theirs = (s.output.provenance.window_tokens for s in (first, second))
    if ours != theirs:
        raise SelectionError(
            f"{first.name} was measured in windows of {ours} tokens, {second.name} of {theirs}: "
            "with less context before them, their positions are not alike. Measure both with "
            f"window_tokens={min(ours, theirs)}."
        )
