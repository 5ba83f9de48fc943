"""The names and units of what a profile keeps; no torch is needed to read one."""

TOP_K = 5
SUMS = (
    "kl_bits",
    "reverse_kl_bits",
    "entropy_bits",
    "nll_bits",
    "brier",
    "reciprocal_rank",
    "agreement",
    "top_k_overlap",
    "final_top_reciprocal_rank",
    "final_top_nll_bits",
    "self_copy_mass",
    "copies",
    "zero_kl_bits",
)
"""Sums over the positions of a document, for each layer; `zero_...` over its positions 0."""

OF_TARGETS = frozenset({"nll_bits", "brier", "reciprocal_rank"})
"""Sums over the positions that have a target."""

SAMPLED = ("js_bits", "total_variation", "copy_bits", "rest_bits")
"""Sums of the second pass, over a sample of positions: they need both normalisers first."""

SELF_COPY = "self_copy_mass"
"""Over the `n_known` positions: those of tokens that the unembedding has a row for."""

COUNTS = ("n", "n_known", "n_targets", "n_zero", "n_bytes", "n_sampled")
FINAL_SUMS = ("entropy_bits", "nll_bits", "baseline_kl_bits", "baseline_js_bits")
"""Sums over the model's own distributions; against the context-free guess 0 without one."""

BINS = ("count", "scored", "correct", "confidence_units", "scored_units", "final_units")

MAX_POSITIONS = 4096
"""Most positions of a whole corpus that the second pass takes."""

TAUS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)
"""Temperatures that are tried; the best is the grid's, so it is known to about a tenth."""

MARGINAL_UNIT = 2.0**-50
"""What one step of a summed distribution stands for: 4,096 positions fill 62 bits at most."""
