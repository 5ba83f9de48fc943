"""Maps between two matrices with the same rows: rotation, ridge map, similarity of their spans.

Every function streams blocks of rows and sums d x d products in float64; nothing with a row for
each pair of rows is held.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from lens.errors import ShapeError

ROWS_AT_ONCE = 8192


def blocks(n_rows: int) -> Iterator[slice]:
    """Slices of at most ROWS_AT_ONCE rows that cover all."""
    for start in range(0, n_rows, ROWS_AT_ONCE):
        yield slice(start, min(start + ROWS_AT_ONCE, n_rows))


def mean_row(a: Float[Tensor, "rows d"]) -> Float[Tensor, " d"]:
    """The mean of the rows, in float64."""
    total = torch.zeros(a.shape[1], dtype=torch.float64, device=a.device)
    for rows in blocks(a.shape[0]):
        total += a[rows].double().sum(0)
    return total / a.shape[0]


def cross_product(
    a: Float[Tensor, "rows_a d_a"],
    b: Float[Tensor, "rows_b d_b"],
    *,
    shift_a: Tensor | None = None,
    shift_b: Tensor | None = None,
) -> Float[Tensor, "d_a d_b"]:
    """(A - shift_a)^T (B - shift_b), in float64. Raises ShapeError where the rows differ."""
    if a.shape[0] != b.shape[0]:
        raise ShapeError(
            f"The matrices have {a.shape[0]} and {b.shape[0]} rows; row i of one must belong to "
            "row i of the other. Cut the padding off the longer one."
        )
    total = torch.zeros(a.shape[1], b.shape[1], dtype=torch.float64, device=a.device)
    for rows in blocks(a.shape[0]):
        x, y = a[rows].double(), b[rows].to(a.device).double()
        x = x if shift_a is None else x - shift_a
        y = y if shift_b is None else y - shift_b
        total += x.T @ y
    return total


def rotation_of(cross: Float[Tensor, "d_a d_b"]) -> Float[Tensor, "d_a d_b"]:
    """The orthogonal R that makes |A R - B| smallest, from A^T B (Schoenemann 1966)."""
    left, _, right = torch.linalg.svd(cross, full_matrices=False)
    return left @ right


def rotation(a: Float[Tensor, "rows d"], b: Float[Tensor, "rows d"]) -> Float[Tensor, "d d"]:
    """The orthogonal R that makes |A R - B| smallest.

    >>> a = torch.eye(3)
    >>> torch.allclose(a.double() @ rotation(a, a.flip(1)), a.flip(1).double())
    True
    """
    return rotation_of(cross_product(a, b))


def procrustes_cosine(
    cross: Float[Tensor, "d_a d_b"],
    gram_a: Float[Tensor, "d_a d_a"],
    gram_b: Float[Tensor, "d_b d_b"],
) -> float:
    """|A^T B|_* / (|A| |B|): the cosine of A R and B under the best rotation; 1 = a rotation."""
    norms = gram_a.trace().clamp_min(0).sqrt() * gram_b.trace().clamp_min(0).sqrt()
    return float(torch.linalg.svdvals(cross).sum() / norms.clamp_min(1e-300))


def linear_cka(
    cross: Float[Tensor, "d_a d_b"],
    gram_a: Float[Tensor, "d_a d_a"],
    gram_b: Float[Tensor, "d_b d_b"],
) -> float:
    """|A^T B|^2 / (|A^T A| |B^T B|): alignment of the two similarity matrices (Kornblith 2019)."""
    norms = torch.linalg.matrix_norm(gram_a) * torch.linalg.matrix_norm(gram_b)
    return float(torch.linalg.matrix_norm(cross) ** 2 / norms.clamp_min(1e-300))


def ridge_map(
    gram_a: Float[Tensor, "d_a d_a"], cross: Float[Tensor, "d_a d_b"], *, penalty: float = 1e-3
) -> Float[Tensor, "d_a d_b"]:
    """M that makes |A M - B|^2 + penalty * mean(eigenvalue of A^T A) * |M|^2 smallest."""
    d = gram_a.shape[0]
    eye = torch.eye(d, dtype=gram_a.dtype, device=gram_a.device)
    return torch.linalg.solve(gram_a + penalty * gram_a.trace() / d * eye, cross)
