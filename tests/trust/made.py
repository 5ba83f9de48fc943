"""Profiles made from wanted means: what a verdict has to find is known beforehand."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lens.measuring.columns import BINS, COUNTS, FINAL_SUMS, MARGINAL_UNIT, SAMPLED, SUMS, TAUS
from lens.measuring.comparison import Side
from lens.measuring.correction import ORDERS
from lens.measuring.decomposition import Decomposition, GapProvenance
from lens.measuring.depth import KINDS, N_ENTROPY_BINS
from lens.measuring.histograms import N_BINS, UNIT, confidence_place, kl_bins
from lens.measuring.profile import N_FOLDS, LensProfile, ProfileProvenance
from lens.trust.subject import Plan, Subject
from tests.show.made import made, provenance

PER_DOCUMENT = 50
GUESS_BITS = 4.0


def profile(
    *,
    kl: Sequence[float],
    agreement: Sequence[float] | None = None,
    copies: Sequence[float] | None = None,
    gap: Sequence[float] | None = None,
    marginal: Sequence[float] | None = None,
    cooled: Sequence[float] | None = None,
    documents: int = 40,
    spread: float = 0.02,
    seed: int = 0,
    **reading: Any,
) -> LensProfile:
    """Layer means as given, 0 distance at the last layer; documents differ by `spread` of a mean.

    `gap` is what the lens is too sure by, `marginal` the share of KL that is a wrong frequency of
    tokens, `cooled` the share that the temperature 2 takes away.
    """
    n_layers = len(kl) - 1
    zero = np.zeros(n_layers + 1)
    means = dict.fromkeys((*SUMS, *SAMPLED), zero)
    means |= {"kl_bits": np.array(kl), "nll_bits": 3.0 + np.array(kl)}
    means["agreement"] = zero + 1 if agreement is None else np.array(agreement)
    means["copies"] = zero if copies is None else np.array(copies)
    means["rest_bits"] = np.array(kl)
    generator = np.random.default_rng(seed)
    n = np.full(documents, PER_DOCUMENT)
    moved = 1 + spread * generator.normal(size=(documents, n_layers + 1))
    sums = {name: n[:, None] * mean * moved for name, mean in means.items()}
    # At the output the lens is the model, in every document alike.
    for name in ("kl_bits", "rest_bits", "agreement"):
        sums[name][:, -1] = n * means[name][-1]
    sums["nll_bits"][:, -1] = 3.0 * n
    held = np.arange(documents)
    return LensProfile(
        provenance=ProfileProvenance(
            reading=provenance(n_layers=n_layers, **reading),
            lens_hash="output",
            corpus_name="made",
            corpus_hash="c" * 32,
            n_documents=documents,
            n_sources=2,
            window_tokens=16,
            tokenizer_hash="t" * 32,
            baseline_hash="b" * 32,
            baseline_name="made, others",
            sample_positions=documents * PER_DOCUMENT,
            seed=0,
        ),
        documents=held,
        ids=tuple(map(str, held)),
        sources=tuple("ab"[i % 2] for i in held),
        counts=dict.fromkeys(COUNTS, n),
        final_sums={
            name: (3.0 if name == "nll_bits" else GUESS_BITS) * n * np.ones(documents)
            for name in FINAL_SUMS
        },
        sums=sums,
        tau_kl_bits=_tau(sums["kl_bits"], zero if cooled is None else np.array(cooled)),
        depths=_depths(documents, n_layers),
        kl_bins=_by_fold(kl_bins(np.array(kl)[:, None]) * PER_DOCUMENT, documents),
        confidence=_confidence(zero if gap is None else np.array(gap), documents),
        marginals=_marginals(np.array(kl), zero if marginal is None else np.array(marginal)),
    )


def subject(name: str = "made/up", *, awkward: bool = True, **options: Any) -> Subject:
    """A checkpoint with a clear story: it copies, then holds the prediction in another basis."""
    kl = [30.0, 9.0, 6.0, 3.0, 1.2, 0.3, 0.0]
    output = profile(
        kl=kl,
        agreement=[0.0, 0.05, 0.2, 0.5, 0.7, 0.9, 1.0],
        copies=[1.0, 0.9, 0.2, 0.1, 0.0, 0.0, 0.0],
        gap=[0.5, 0.4, 0.3, 0.2, 0.1, 0.01, 0.0],
        marginal=[0.1, 0.7, 0.1, 0.1, 0.1, 0.1, 0.0],
        **options,
    )
    documents = options.get("documents", 40)
    left = profile(
        kl=[20.0, 7.0, 5.0, 1.0, 0.3, 0.2, 0.0], seed=1, documents=documents, lens="ridge"
    )
    return Subject(
        name=name,
        output=output,
        through_input=None,
        translated=left,
        translator="ridge, affine, made",
        tie_rows=(("tie", "one matrix"), ("config says", "tied <true>")),
        summary_rows=(("model", name), ("class", "GPT2LMHeadModel"), ("sizes", "6 layers")),
        predictions=tuple(
            made(layers=7, prompt=8, awkward=awkward, seed=seed) for seed in range(3)
        ),
    )


def gap(layers: Sequence[int] = (1, 3)) -> Decomposition:
    """Every term takes away one bit of nine, but the last, which does harm."""
    drops = np.array([0.0, 1.0, 1.0, 1.0, 1.0, 1.0, -0.5])
    kl = 9.0 - drops.cumsum()
    documents = 12
    means = np.tile(kl, (len(ORDERS), len(layers), 1))
    return Decomposition(
        provenance=GapProvenance(
            reading=provenance(n_layers=6),
            corpus_name="made",
            corpus_hash="c" * 32,
            fitted_on="made, others",
            fitted_on_hash="d" * 32,
            n_fit_positions=77,
            n_check_positions=7,
            window_tokens=16,
            options={},
        ),
        layers=np.array(layers),
        documents=np.arange(documents),
        counts=np.full(documents, 10),
        sums=np.repeat(10 * means[..., None], documents, axis=-1),
        fit_kl_bits=means,
        fit_loss_bits=means,
        temperatures=np.ones_like(means),
    )


def plan(**changes: Any) -> Plan:
    """A plan that nothing is measured by; its texts are named on the page."""
    from lens.corpus import read_corpus

    texts = read_corpus(["a text", "another", "a third"])
    fields: dict[str, Any] = {
        "held_out": texts,
        "fit_on": texts,
        "prompts": (),
        "prompt_tokens": None,
        "translator": "ridge",
        "sample_positions": 16,
        "gap_positions": 0,
        "window_tokens": None,
        "seed": 0,
        "folder": None,
        "repeat": "lens report made/up --corpus made",
    }
    return Plan(**{**fields, **changes})


def sides(**options: Any) -> tuple[Side, Side]:
    """Two checkpoints of which the second reads worse."""
    first, second = subject("tied", **options), subject("untied", seed=3, **options)
    return first.side, second.side


def _tau(kl_sums: np.ndarray, share: np.ndarray) -> np.ndarray:
    """[doc, layer, tau]: the same KL at every temperature but 2, where a share of it is gone."""
    left = np.repeat(kl_sums[:, :, None], len(TAUS), axis=2)
    left[:, :, TAUS.index(2.0)] *= 1 - share
    return left


def _depths(documents: int, n_layers: int) -> np.ndarray:
    """Every position settles at the last layer but one."""
    depths = np.zeros((documents, len(KINDS), N_ENTROPY_BINS, n_layers + 2), dtype=np.int64)
    depths[:, :, 0, n_layers - 1] = PER_DOCUMENT
    return depths


def _confidence(gap: np.ndarray, documents: int) -> dict[str, np.ndarray]:
    """All positions in one bin: the lens says 0.8, the model 0.8 less the gap."""
    place = int(confidence_place(np.array([[0.8]]))[0, 0])
    shape = (len(gap), N_BINS)
    found = {name: np.zeros(shape, dtype=np.int64) for name in BINS}
    for name in ("count", "scored"):
        found[name][:, place] = PER_DOCUMENT
    found["correct"][:, place] = PER_DOCUMENT // 2
    for name, share in (("confidence_units", 0.8), ("scored_units", 0.8)):
        found[name][:, place] = round(PER_DOCUMENT * share / UNIT)
    found["final_units"][:, place] = np.rint(PER_DOCUMENT * (0.8 - gap) / UNIT).astype(np.int64)
    return {name: _by_fold(counts, documents) for name, counts in found.items()}


def _by_fold(counts: np.ndarray, documents: int) -> np.ndarray:
    """[fold, ...]: what one document holds, by the fold that each document falls in."""
    folds = np.bincount(np.arange(documents) * N_FOLDS // documents, minlength=N_FOLDS)
    return counts[None] * folds.reshape(-1, *(1,) * counts.ndim)


def _marginals(kl: np.ndarray, share: np.ndarray) -> dict[int, np.ndarray]:
    """Mean p is even over two tokens; mean q is uneven by as much as gives KL(p || q)."""
    p = np.array([0.5, 0.5])
    # KL((1/2, 1/2) || (a, 1 - a)) = -1 - log2(a (1 - a)) / 2 bits
    product = 0.25 * 4.0 ** -(share * kl)
    a = 0.5 + np.sqrt(np.maximum(0.25 - product, 0))
    rows = np.concatenate([np.stack([a, 1 - a], axis=1), p[None]])
    units = np.rint(rows * PER_DOCUMENT / MARGINAL_UNIT).astype(np.int64)
    return {fold: units * (1 + fold % 3) for fold in range(N_FOLDS)}
