"""Several parts of one matrix beside each other: norms, the last one's share, their angle."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class PathShares:
    """How the parts of paths, the output path last, stand to each other, and by group of rows.

    `output_share` is |last| / sum of |part|, `additive_share` <last, sum> / |sum|^2, `cosine` that
    of the other parts' sum and the last; NaN where shapes differ.
    """

    norms: Float[np.ndarray, " path"]
    output_share: float
    additive_share: float
    cosine: float
    group_norms: Float[np.ndarray, "group path"]
    group_output_share: Float[np.ndarray, " group"]
    group_cosine: Float[np.ndarray, " group"]


def path_shares(
    parts: Sequence[Float[Tensor, "_ _"]], groups: Sequence[Int[np.ndarray, "_"]]
) -> PathShares:
    """The shares of whole matrices, and of the rows of each group."""
    share, cosine = share_and_cosine(parts)
    additive = float("nan")
    if all(part.shape == parts[-1].shape for part in parts):
        whole = torch.stack([part.double() for part in parts]).sum(0)
        additive = float((parts[-1].double() * whole).sum() / whole.square().sum())
    group_norms, group_share, group_cosine = [], [], []
    for rows in groups:
        chosen = [g[torch.from_numpy(rows[rows < g.shape[0]]).to(g.device)] for g in parts]
        group_norms.append([float(g.double().norm()) for g in chosen])
        one_share, one_cosine = share_and_cosine(chosen)
        group_share.append(one_share)
        group_cosine.append(one_cosine)
    return PathShares(
        norms=np.array([float(part.double().norm()) for part in parts]),
        output_share=share,
        additive_share=additive,
        cosine=cosine,
        group_norms=np.array(group_norms),
        group_output_share=np.array(group_share),
        group_cosine=np.array(group_cosine),
    )


def share_and_cosine(parts: Sequence[Float[Tensor, "_ _"]]) -> tuple[float, float]:
    """|last| over the sum of norms, and the cosine of the last with the sum of the others."""
    norms = [float(part.double().norm()) for part in parts]
    share = norms[-1] / max(sum(norms), 1e-300)
    if any(part.shape != parts[-1].shape for part in parts):
        return share, float("nan")
    into = torch.stack([part.double() for part in parts[:-1]]).sum(0)
    product = float((into * parts[-1].double()).sum())
    return share, product / max(float(into.norm()) * norms[-1], 1e-300)
