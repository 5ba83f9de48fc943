"""A lens over a corpus: sums per layer and document, histograms per fold; they merge exactly."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

from lens.errors import ProvenanceError, SelectionError
from lens.lenses.predictions import Provenance
from lens.measuring.calibration import GAPS, Calibration, calibration
from lens.measuring.columns import OF_TARGETS, SAMPLED, SELF_COPY, TAUS
from lens.measuring.depth import depth_sums, mean_depths, of_kind
from lens.measuring.histograms import quantile, trimmed_mean
from lens.measuring.skill import area, marginal_bias_bits, skill
from lens.measuring.statistics import Interval, bootstrap, mean_interval

if TYPE_CHECKING:
    import pandas as pd

N_FOLDS = 20
"""Histograms and mean distributions are kept for this many runs of neighbouring documents."""


@dataclass(frozen=True, kw_only=True)
class ProfileProvenance:
    """What a profile was measured with; profiles merge only where all of it agrees.

    `n_documents` and `corpus_hash` are of the whole corpus, of which a profile may hold a part.
    `baseline_hash` names the context-free guess that skill is against, "" where there is none.
    """

    reading: Provenance
    lens_hash: str
    corpus_name: str
    corpus_hash: str
    n_documents: int
    n_sources: int
    window_tokens: int
    tokenizer_hash: str
    baseline_hash: str
    baseline_name: str
    sample_positions: int
    seed: int


@dataclass(frozen=True, kw_only=True, eq=False)
class LensProfile:
    """How one lens reads one model over the documents of a corpus; information in bits.

    Rows are `documents` (places in the corpus), columns layers 0 (the embedding) to n_layers.
    Position 0 of each window stands apart (`zero_kl_bits`), and so does layer 0 in headlines.
    """

    provenance: ProfileProvenance
    documents: Int[np.ndarray, " doc"]
    ids: tuple[str, ...]
    sources: tuple[str, ...]
    counts: Mapping[str, Int[np.ndarray, " doc"]]
    final_sums: Mapping[str, Float[np.ndarray, " doc"]]
    sums: Mapping[str, Float[np.ndarray, "doc layer"]]
    tau_kl_bits: Float[np.ndarray, "doc layer tau"]
    depths: Int[np.ndarray, "doc kind entropy depth"]
    kl_bins: Int[np.ndarray, "fold layer bin"]
    confidence: Mapping[str, Int[np.ndarray, "fold layer bin"]]
    marginals: Mapping[int, Int[np.ndarray, "row d_vocab"]]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LensProfile):
            return NotImplemented
        return all(
            _same(getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        p = self.provenance
        share = "" if len(self.documents) == p.n_documents else f" of {p.n_documents}"
        return (
            f"LensProfile({p.reading.model_id}, {p.reading.lens} lens: "
            f"{self.n_positions:,} positions of {len(self.documents)}{share} documents of "
            f"{p.corpus_name}{'' if p.baseline_hash else '; no baseline, so no skill'})"
        )

    @property
    def n_layers(self) -> int:
        """Number of blocks: the last layer."""
        return self.provenance.reading.n_layers

    @property
    def n_positions(self) -> int:
        """Positions that the means are over."""
        return int(self.counts["n"].sum())

    @property
    def n_readable(self) -> int:
        """Documents that give a position: intervals are over these, and need two."""
        return int((self.counts["n"] > 0).sum())

    def mean(self, name: str) -> Float[np.ndarray, " layer"]:
        """The mean over positions of one of the sums, by layer. Raises SelectionError."""
        return self._summed(name) / self.counts_of(name).sum()

    def interval(self, name: str, *, level: float = 0.95) -> Interval:
        """Mean and cluster-bootstrap interval over documents, by layer: pointwise and as a band.

        Raises SelectionError for a sum that is not there and for fewer than two documents.
        """
        return mean_interval(self._column(name), self.counts_of(name), level=level)

    @property
    def median_kl_bits(self) -> Float[np.ndarray, " layer"]:
        """The median KL of each layer, to 0.5 % (the histogram's bins); NaN where a KL is."""
        return self.kl_quantile(0.5)

    @property
    def trimmed_kl_bits(self) -> Float[np.ndarray, " layer"]:
        """The mean KL without the lowest and the highest 5 % of the positions, to 0.5 %.

        A KL above 1,000 bits, infinite or not, counts as 1,000; NaN where a KL is NaN.
        """
        fine = self.kl_bins.sum(axis=0)
        return np.where(self._whole(fine), trimmed_mean(fine), np.nan)

    def kl_quantile(self, share: float) -> Float[np.ndarray, " layer"]:
        """The KL below which this share of the positions lie, to 0.5 %; NaN where a KL is NaN."""
        fine = self.kl_bins.sum(axis=0)
        return np.where(self._whole(fine), quantile(fine, share), np.nan)

    @property
    def usefulness_bits(self) -> Float[np.ndarray, " layer"]:
        """X: by how many bits a token the lens predicts the target worse than the model does."""
        lost = self._summed("nll_bits") - self.final_sums["nll_bits"].sum()
        return lost / self.counts["n_targets"].sum()

    @property
    def bits_per_byte(self) -> Float[np.ndarray, " layer"]:
        """Cross-entropy over the UTF-8 bytes of the scored text; NaN for token-id documents."""
        return _ratio(self._summed("nll_bits"), self.counts["n_bytes"].sum())

    @property
    def skill(self) -> Float[np.ndarray, " layer"]:
        """1 - KL(final || lens) / KL(final || context-free guess): 1 is the model's own, 0 no
        better than the guess, negative worse. NaN without a baseline."""
        return skill(self._summed("kl_bits"), self.final_sums["baseline_kl_bits"].sum())

    @property
    def bounded_skill(self) -> Float[np.ndarray, " layer"]:
        """Skill by JS in place of KL, from the sampled positions; NaN without them."""
        return skill(self._summed("js_bits"), self.final_sums["baseline_js_bits"].sum())

    @property
    def skill_area(self) -> float:
        """Area under the skill, clipped at -1, over relative depth from layer 1 to n_layers.

        By trapezoids and divided by its width, so that the first and last layer count half.
        """
        return float(area(self.skill))

    def skill_area_interval(self, *, level: float = 0.95) -> Interval:
        """`skill_area` with its cluster-bootstrap interval over two documents or more."""
        base = self.final_sums["baseline_kl_bits"]
        stacked = np.concatenate([self.sums["kl_bits"], base[:, None]], axis=1)

        def headline(totals: np.ndarray) -> np.ndarray:
            return area(skill(totals[..., :-1], totals[..., -1:]))[..., None]

        return bootstrap(stacked, headline, counts=self.counts["n"], level=level)

    @property
    def calibration(self) -> Calibration:
        """Is the lens' confidence right, against the target and against the model's own?

        Its two gaps are NaN at a layer where a confidence is NaN; the bins are of the others.
        """
        found = calibration(**{name: fine.sum(axis=0) for name, fine in self.confidence.items()})
        whole = self._whole(found.count)
        gaps = {name: np.where(whole, getattr(found, name), np.nan) for name in GAPS}
        return dataclasses.replace(found, **gaps)

    @property
    def best_temperature(self) -> Float[np.ndarray, " layer"]:
        """The temperature of the fixed grid with the least KL; NaN without sampled positions."""
        best = np.array(TAUS)[self.tau_kl_bits.sum(axis=0).argmin(axis=-1)]
        return np.where(self.counts["n_sampled"].sum() > 0, best, np.nan)

    @property
    def marginal_bias_bits(self) -> Float[np.ndarray, " layer"]:
        """KL(mean p || mean q): at least this much a bias over the vocabulary could remove."""
        if not self.marginals:
            return np.full(self.n_layers + 1, np.nan)
        return marginal_bias_bits(_added(list(self.marginals.values())))

    def depth_shares(self, kind: str = "top-1") -> Float[np.ndarray, " depth"]:
        """The share of positions that settle at each layer; the last entry: those that never do.

        `kind` is "top-1" (the argmax stays), "0.1 bit", "0.5 bit" or "1 bit" (KL stays below).
        Raises SelectionError for another.
        """
        found = of_kind(self.depths, kind).sum(axis=(0, 1))
        return found / found.sum()

    def mean_depth(self, kind: str = "top-1") -> float:
        """The mean depth over n_layers, of the positions that settle: 0 embedding, 1 output."""
        shares = self.depth_shares(kind)[:-1]
        return float((shares * np.arange(len(shares))).sum() / shares.sum() / self.n_layers)

    def depth_by_entropy(self, kind: str = "top-1", *, level: float = 0.95) -> Interval:
        """`mean_depth` within each bin of the model's own entropy, with intervals over documents.

        A sure prediction is reached earlier than a vague one. Entries are the bins of
        `lens.measuring.depth.ENTROPY_NAMES`, in bits; NaN where a draw of documents may have none.
        """
        sums = depth_sums(of_kind(self.depths, kind))
        return bootstrap(sums, mean_depths, counts=self.counts["n"], level=level)

    def merge(self, other: "LensProfile") -> "LensProfile":
        """The profile of both parts' documents; the same, bit for bit, as measured at once.

        Raises ProvenanceError where model, lens, corpus or options differ, SelectionError where
        both hold a document.
        """
        return merged([self, other])

    def to_frame(self) -> "pd.DataFrame":
        """A pandas table with one row for each layer, units in the columns' names."""
        from lens.measuring.profile_table import profile_table

        return profile_table(self)

    def save(self, path: str | Path) -> Path:
        """Write a .parquet file that `lens.read_profile` reads back equal; or ExportError."""
        from lens.measuring.profile_file import write_profile

        return write_profile(self, path)

    def _column(self, name: str) -> np.ndarray:
        if name not in self.sums:
            raise SelectionError(
                f"A profile holds no {name!r}; it holds {', '.join(sorted(self.sums))}."
            )
        return self.sums[name]

    def counts_of(self, name: str) -> Int[np.ndarray, " doc"]:
        """How many positions of each document the mean of one of the sums is over."""
        if name in OF_TARGETS:
            return self.counts["n_targets"]
        if name == SELF_COPY:
            return self.counts["n_known"]
        if name.startswith("zero_"):
            return self.counts["n_zero"]
        return self.counts["n_sampled" if name in SAMPLED else "n"]

    def _whole(self, fine: np.ndarray) -> np.ndarray:
        """By layer: does a histogram [layer, bin] hold every position? NaN is in no bin."""
        return fine.sum(axis=-1) == self.n_positions

    def _summed(self, name: str) -> np.ndarray:
        column = self._column(name)
        if name in SAMPLED and not self.counts["n_sampled"].sum():
            return np.full(column.shape[1:], np.nan)
        return column.sum(axis=0)


def merged(profiles: list[LensProfile]) -> LensProfile:
    """One profile of the documents of all; errors as in `LensProfile.merge`."""
    first = profiles[0]
    for other in profiles[1:]:
        require_same(first.provenance, other.provenance)
    documents = np.concatenate([p.documents for p in profiles])
    order = np.argsort(documents, kind="stable")
    if len(set(documents.tolist())) != len(documents):
        twice = sorted({d for d in documents.tolist() if (documents == d).sum() > 1})
        raise SelectionError(
            f"Documents {twice[:5]} stand in more than one part; keep one of each."
        )

    def joined(values: list[np.ndarray]) -> np.ndarray:
        return np.concatenate(values)[order]

    def each(name: str) -> dict[str, np.ndarray]:
        return {
            key: joined([getattr(p, name)[key] for p in profiles]) for key in getattr(first, name)
        }

    marginals: dict[int, np.ndarray] = {}
    for fold in sorted({f for p in profiles for f in p.marginals}):
        marginals[fold] = _added([p.marginals[fold] for p in profiles if fold in p.marginals])
    return LensProfile(
        provenance=first.provenance,
        documents=documents[order],
        ids=tuple(np.concatenate([np.array(p.ids, dtype=object) for p in profiles])[order]),
        sources=tuple(np.concatenate([np.array(p.sources, dtype=object) for p in profiles])[order]),
        counts=each("counts"),
        final_sums=each("final_sums"),
        sums=each("sums"),
        tau_kl_bits=joined([p.tau_kl_bits for p in profiles]),
        depths=joined([p.depths for p in profiles]),
        kl_bins=_added([p.kl_bins for p in profiles]),
        confidence={k: _added([p.confidence[k] for p in profiles]) for k in first.confidence},
        marginals=marginals,
    )


def require_same(ours: ProfileProvenance, theirs: ProfileProvenance) -> None:
    """Raise ProvenanceError that names the first thing in which two provenances differ."""
    for field in dataclasses.fields(ProfileProvenance):
        a, b = getattr(ours, field.name), getattr(theirs, field.name)
        if a != b:
            name = field.name
            if isinstance(a, Provenance):
                name = next(n for n in vars(a) if getattr(a, n) != getattr(b, n))
                a, b = getattr(a, name), getattr(b, name)
            raise ProvenanceError(
                f"These measurements differ in {name}: {a!r} and {b!r}. Only parts of one "
                "measurement go together: the same model, lens, corpus and options."
            )


def _added(arrays: list[np.ndarray]) -> np.ndarray:
    total = arrays[0].copy()
    for other in arrays[1:]:
        total += other
    return total


def _ratio(numerator: np.ndarray, denominator: Any) -> np.ndarray:
    return numerator / denominator if denominator else np.full_like(numerator, np.nan)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, np.ndarray):
        if not isinstance(b, np.ndarray) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        return bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))
    return bool(a == b)
