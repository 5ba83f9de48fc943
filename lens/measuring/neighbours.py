"""Nearest rows of a matrix, streamed: never a row for each pair of rows."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens.linear import blocks


@dataclass(frozen=True, eq=False)
class Nearest:
    """For each query the ids of its k nearest rows by cosine, best first, and by dot product.

    On the CPU, wherever the rows are: they name rows.
    """

    by_cosine: Int[Tensor, "query k"]
    by_dot: Int[Tensor, " query"]


def nearest_rows(
    queries: Float[Tensor, "query d"],
    matrix: Float[Tensor, "row d"],
    *,
    k: int,
    own: Int[Tensor, " query"] | None = None,
    shift: Tensor | None = None,
) -> Nearest:
    """The rows nearest to each query; `own` are rows that do not count for their query.

    `shift` is taken off the rows (queries come shifted). Rows of length 0 are never near.
    """
    n = queries.shape[0]
    best = torch.full((n, k), -torch.inf, dtype=queries.dtype, device=queries.device)
    ids = torch.zeros((n, k), dtype=torch.long, device=queries.device)
    best_dot = torch.full((n,), -torch.inf, dtype=queries.dtype, device=queries.device)
    dot_ids = torch.zeros(n, dtype=torch.long, device=queries.device)
    for rows in blocks(matrix.shape[0]):
        block = matrix[rows].to(queries.device).float()
        block = block if shift is None else block - shift.float()
        lengths = block.norm(dim=1)
        dots = queries @ block.T
        if own is not None:
            here = (own >= rows.start) & (own < rows.stop)
            at = torch.arange(n, device=own.device)[here]
            dots[at, own[here] - rows.start] = -torch.inf
        top, place = dots.max(1)
        better = top > best_dot
        best_dot = torch.where(better, top, best_dot)
        dot_ids = torch.where(better, place + rows.start, dot_ids)
        cosines = dots / lengths.clamp_min(1e-30)
        cosines[:, lengths == 0] = -torch.inf
        top, place = cosines.topk(min(k, cosines.shape[1]), dim=1)
        best, chosen = torch.cat([best, top], 1).topk(k, dim=1)
        ids = torch.cat([ids, place + rows.start], 1).gather(1, chosen)
    return Nearest(ids.cpu(), dot_ids.cpu())


def overlap(a: Int[Tensor, "query k"], b: Int[Tensor, "query k"]) -> float:
    """The mean share of ids that two lists of neighbours have in common."""
    return float((a[:, :, None] == b[:, None, :]).any(2).float().mean())
