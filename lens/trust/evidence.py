"""The numbers that the verdicts stand on, by layer, each with a band over all layers at once."""

from dataclasses import replace

import numpy as np
from jaxtyping import Float, Int

from lens.measuring.calibration import calibration
from lens.measuring.columns import TAUS
from lens.measuring.profile import N_FOLDS, LensProfile
from lens.measuring.skill import marginal_bias_bits, skill
from lens.measuring.statistics import Interval, bootstrap


def skill_by_layer(profile: LensProfile) -> Interval:
    """Skill, drawn over documents; NaN without a context-free guess."""
    base = profile.final_sums["baseline_kl_bits"]
    stacked = np.concatenate([profile.sums["kl_bits"], base[:, None]], axis=1)
    return bootstrap(
        stacked,
        lambda totals: skill(totals[..., :-1], totals[..., -1:]),
        counts=profile.counts["n"],
    )


def usefulness_by_layer(profile: LensProfile) -> Interval:
    """X: the cross-entropy of the lens less the model's own, bits a target."""
    lost = profile.sums["nll_bits"] - profile.final_sums["nll_bits"][:, None]
    stacked = np.concatenate([lost, profile.counts["n_targets"][:, None]], axis=1)
    counts = profile.counts["n_targets"]
    return bootstrap(stacked, lambda totals: totals[..., :-1] / totals[..., -1:], counts=counts)


def confidence_gap(profile: LensProfile) -> Interval:
    """|mean q(top) - mean p(top)| over bins of equal mass; folds of documents are drawn.

    NaN at a layer where a confidence is NaN, so that nothing is decided there.
    """
    held = profile.confidence
    present = np.flatnonzero(held["count"].sum(axis=(1, 2)))
    total = {name: counts.sum(axis=0) for name, counts in held.items()}
    without = [
        calibration(**{name: total[name] - held[name][fold] for name in held}).gap_to_final
        for fold in present
    ]
    return of_folds(profile.calibration.gap_to_final, np.stack(without))


def reading_loss_share(profile: LensProfile, translated: LensProfile) -> Interval:
    """G / KL by layer below the output: the share of KL that the translator takes away."""
    stacked = np.concatenate(
        [profile.sums["kl_bits"][:, :-1], translated.sums["kl_bits"][:, :-1]], axis=1
    )
    return bootstrap(stacked, _share_lost, counts=profile.counts["n"])


def temperature_share(profile: LensProfile) -> Interval:
    """The share of KL that the best temperature of the grid takes away, below the output."""
    held = profile.tau_kl_bits[:, :-1]
    n_layers, n_taus = held.shape[1:]

    def statistic(totals: np.ndarray) -> np.ndarray:
        by_tau = totals.reshape(*totals.shape[:-1], n_layers, n_taus)
        plain = by_tau[..., TAUS.index(1.0)]
        return 1 - by_tau.min(axis=-1) / plain

    sums = held.reshape(len(held), -1)
    return bootstrap(sums, statistic, counts=profile.counts["n_sampled"])


def copy_share(profile: LensProfile) -> Interval:
    """The copy term's share of KL, below the output, from the sampled positions."""
    copied, rest = (profile.sums[name][:, :-1] for name in ("copy_bits", "rest_bits"))
    half = copied.shape[1]

    def statistic(totals: np.ndarray) -> np.ndarray:
        return totals[..., :half] / (totals[..., :half] + totals[..., half:])

    sums = np.concatenate([copied, rest], axis=1)
    return bootstrap(sums, statistic, counts=profile.counts["n_sampled"])


def marginal_share(profile: LensProfile) -> Interval:
    """KL(mean p || mean q) over mean KL, below the output; folds of documents are drawn."""
    folds = np.array(sorted(profile.marginals))
    total = np.sum([profile.marginals[f] for f in folds.tolist()], axis=0)
    bits = profile.sums["copy_bits"] + profile.sums["rest_bits"]
    counts = profile.counts["n_sampled"][:, None]
    kl_and_count = _by_fold(profile, np.concatenate([bits, counts], axis=1))[folds]

    def share(marginals: np.ndarray, sums: np.ndarray) -> np.ndarray:
        mean_kl = sums[:-2] / sums[-1]
        return marginal_bias_bits(marginals)[:-1] / mean_kl

    whole = kl_and_count.sum(axis=0)
    without = [
        share(total - profile.marginals[fold], whole - kl_and_count[row])
        for row, fold in enumerate(folds.tolist())
    ]
    return of_folds(share(total, whole), np.stack(without))


def of_folds(
    whole: Float[np.ndarray, " layer"], without: Float[np.ndarray, "fold layer"]
) -> Interval:
    """The interval of a number that is no sum, from what it is without each fold in turn.

    The jackknife's pseudo-values are drawn, and their mean is set on the estimate itself.
    """
    n = len(without)
    pseudo = n * whole - (n - 1) * without
    found = bootstrap(pseudo, lambda totals: totals / n)
    move = whole - found.estimate
    return replace(
        found,
        estimate=whole,
        low=found.low + move,
        high=found.high + move,
        band_low=found.band_low + move,
        band_high=found.band_high + move,
        replicates=found.replicates + move,
    )


def _share_lost(totals: np.ndarray) -> np.ndarray:
    half = totals.shape[-1] // 2
    return 1 - totals[..., half:] / totals[..., :half]


def _by_fold(profile: LensProfile, rows: np.ndarray) -> np.ndarray:
    total = np.zeros((N_FOLDS, rows.shape[1]))
    np.add.at(total, folds_of(profile), rows)
    return total


def folds_of(profile: LensProfile) -> Int[np.ndarray, " doc"]:
    """The fold that each document's histograms are kept in."""
    return profile.documents * N_FOLDS // profile.provenance.n_documents
