"""A profile as a table: one row for each layer."""

from typing import TYPE_CHECKING

import numpy as np

from lens.measuring.columns import SAMPLED, SUMS
from lens.measuring.profile import LensProfile

if TYPE_CHECKING:
    import pandas as pd


def profile_table(profile: LensProfile) -> "pd.DataFrame":
    """Means by layer, KL with its 95 % interval over documents; NaN for what was not measured."""
    import pandas as pd

    layers = np.arange(profile.n_layers + 1)
    columns: dict[str, np.ndarray] = {"layer": layers, "depth": layers / profile.n_layers}
    for name in SUMS:
        columns[f"mean_{name}"] = profile.mean(name)
    if profile.n_readable > 1:
        kl = profile.interval("kl_bits")
        columns |= {"kl_bits_low_95": kl.low, "kl_bits_high_95": kl.high}
    columns |= {
        "median_kl_bits": profile.median_kl_bits,
        "trimmed_kl_bits": profile.trimmed_kl_bits,
        "usefulness_bits": profile.usefulness_bits,
        "bits_per_byte": profile.bits_per_byte,
        "skill": profile.skill,
        "ece": profile.calibration.ece,
        "gap_to_final": profile.calibration.gap_to_final,
        "settled_top_1_share": profile.depth_shares()[:-1],
    }
    if profile.counts["n_sampled"].sum():
        columns |= {f"mean_{name}": profile.mean(name) for name in SAMPLED}
        columns |= {
            "bounded_skill": profile.bounded_skill,
            "marginal_bias_bits": profile.marginal_bias_bits,
            "best_temperature": profile.best_temperature,
        }
    return pd.DataFrame(columns)
