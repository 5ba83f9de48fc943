"""Products of two matrices, of some rows and of the rest, and of the same rows shifted."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens.linear import blocks


@dataclass(frozen=True, kw_only=True, eq=False)
class Moments:
    """Sums over rows, part 0 those to fit on and part 1 those held out.

    `aa` and `cross` are A^T A and A^T B by part, `bb` is B^T B over both parts, `bb_trace` its
    trace by part, `sum_a` and `sum_b` the sums of rows, `n` their number.
    """

    n: Float[Tensor, "2"]
    sum_a: Float[Tensor, "2 d"]
    sum_b: Float[Tensor, "2 d"]
    aa: Float[Tensor, "2 d d"]
    cross: Float[Tensor, "2 d d"]
    bb: Float[Tensor, "d d"]
    bb_trace: Float[Tensor, "2"]

    def shifted(self, a: Float[Tensor, " d"], b: Float[Tensor, " d"]) -> "Moments":
        """The same of A - a and B - b, from the sums alone."""
        a, b, n = a.cpu(), b.cpu(), self.n[:, None, None]
        sum_b = self.sum_b.sum(0)
        return replace(
            self,
            sum_a=self.sum_a - self.n[:, None] * a,
            sum_b=self.sum_b - self.n[:, None] * b,
            aa=self.aa - _outer(self.sum_a, a) - _outer(a, self.sum_a) + n * _outer(a, a),
            cross=self.cross - _outer(self.sum_a, b) - _outer(a, self.sum_b) + n * _outer(a, b),
            bb=self.bb - _outer(sum_b, b) - _outer(b, sum_b) + self.n.sum() * _outer(b, b),
            bb_trace=self.bb_trace - 2 * self.sum_b @ b + self.n * (b @ b),
        )


def moments_of(
    a: Float[Tensor, "row d"],
    b: Float[Tensor, "row d"],
    held_out: Bool[Tensor, " row"],
    *,
    order: Int[Tensor, " row"] | None = None,
    known: Moments | None = None,
) -> Moments:
    """Sums of A and of B, whose rows are read in `order`, in float64.

    `known` are the moments of the same matrices in another order: what does not depend on the
    order is taken from there.
    """
    d = a.shape[1]
    square = {name: torch.zeros(2, d, d, dtype=torch.float64) for name in ("aa", "cross")}
    sums = {name: torch.zeros(2, d, dtype=torch.float64) for name in ("a", "b")}
    bb, trace = torch.zeros(d, d, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for rows in blocks(a.shape[0]):
        x = a[rows].double().cpu()
        y = b[rows if order is None else order[rows]].double().cpu()
        if known is None:
            bb += y.T @ y
        for part, chosen in enumerate((~held_out[rows], held_out[rows])):
            u, v = x[chosen], y[chosen]
            square["cross"][part] += u.T @ v
            if known is None:
                square["aa"][part] += u.T @ u
            sums["a"][part] += u.sum(0)
            sums["b"][part] += v.sum(0)
            trace[part] += v.square().sum()
    n = torch.stack([(~held_out).sum(), held_out.sum()]).double()
    return Moments(
        n=n,
        sum_a=sums["a"],
        sum_b=sums["b"],
        aa=square["aa"] if known is None else known.aa,
        cross=square["cross"],
        bb=bb if known is None else known.bb,
        bb_trace=trace,
    )


def _outer(x: Tensor, y: Tensor) -> Tensor:
    return x[..., :, None] * y[..., None, :]
