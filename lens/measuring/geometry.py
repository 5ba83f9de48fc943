"""The embedding against the unembedding, row by row and as spaces, each number beside chance.

Chance is the same number with the rows of W_U permuted. Nothing of size V x V is held. Sources:
Kornblith et al. 2019 (CKA), Roy and Vetterli 2007 (effective rank), Lopardo et al. (the set).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens import linear
from lens.checkpoint.plain_torch import in_plain_torch
from lens.checkpoint.readout import DirectReadout
from lens.errors import SelectionError, ShapeError
from lens.measuring.moments import Moments, moments_of
from lens.measuring.neighbours import Nearest, nearest_rows, overlap
from lens.measuring.ranks import rank_correlation

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint

MEASURES = (
    "row cosine",
    "Procrustes cosine",
    "linear CKA",
    "ridge R2",
    "ridge cosine",
    "pair rank correlation",
    "kNN overlap",
    "norm correlation",
)
FORMS = ("as they are", "centred")
ISOTROPY = (
    "mean cosine",
    "mean row share",
    "effective rank",
    "participation ratio",
    "dot agrees with cosine",
    "dot follows norm",
)
HELD_OUT = 0.2
"""Share of the rows that a ridge map is judged on."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Geometry:
    """W_E against W_U; `values` and `chance` are [measure, form], in the order of MEASURES, FORMS.

    `isotropy` [matrix, ISOTROPY] and `spectra` [matrix, d] (singular values, largest first) are
    of W_E and W_U each. "mean row share" is |mean row| / mean |row|; "dot agrees with cosine" how
    often a row's nearest other row is the same by dot product and by cosine; "dot follows norm"
    the rank correlation of a dot product with the length of its second row.
    `copy_score` is how often the row that answers best to N(scaled E_i) is i, None where no norm
    can be put before the product. Neighbours and copies are of `n_sampled` rows.
    """

    model_id: str
    tie: str
    n_rows: int
    n_sampled: int
    neighbours: int
    seed: int
    values: Float[np.ndarray, "measure form"]
    chance: Float[np.ndarray, "measure form"]
    isotropy: Float[np.ndarray, "matrix isotropy"]
    spectra: Float[np.ndarray, "matrix d"]
    copy_score: float | None
    copy_chance: float | None

    def value(self, measure: str, *, centred: bool = False) -> float:
        """One number of the table, by the name of its measure. Raises SelectionError."""
        if measure not in MEASURES:
            raise SelectionError(
                f"There is no measure {measure!r}; there are {', '.join(MEASURES)}."
            )
        return float(self.values[MEASURES.index(measure), int(centred)])

    def rows(self) -> list[tuple[str, str]]:
        """(label, text) pairs: value (chance), as they are and centred."""
        rows = [("tie", self.tie), ("rows", f"{self.n_rows:,}, {self.n_sampled:,} of them sampled")]
        for name, value, chance in zip(MEASURES, self.values, self.chance, strict=True):
            cells = [f"{v:+.3f} (chance {c:+.3f})" for v, c in zip(value, chance, strict=True)]
            rows.append((name, f"{cells[0]}; centred {cells[1]}"))
        if self.copy_score is not None:
            rows.append(("copy score", f"{self.copy_score:.3f} (chance {self.copy_chance:.3f})"))
        for column, name in enumerate(ISOTROPY):
            one, other = self.isotropy[:, column]
            rows.append((name, f"W_E {one:.4g}, W_U {other:.4g}"))
        return rows


@in_plain_torch
def geometry(
    checkpoint: "Checkpoint",
    *,
    sample: int = 512,
    pairs: int = 20_000,
    neighbours: int = 10,
    penalty: float = 1e-3,
    seed: int = 0,
) -> Geometry:
    """Compare the lookup with the unembedding; on a tied model this is one matrix with itself.

    Rows beyond the shorter matrix and rows of length 0 are left out. `sample` rows are looked up
    among all for `neighbours` neighbours and copies, `pairs` pairs of rows give the rank
    correlation, all drawn by `seed`; `penalty` is the ridge of the linear map, relative to the mean
    size of its inputs. Raises
    ShapeError where the widths differ, SelectionError.

    >>> lens.geometry(model).value("row cosine")  # doctest: +SKIP
    """
    w_e, w_u = _matrices(checkpoint)
    n_rows = w_e.shape[0]
    if not 2 <= neighbours + 1 < n_rows or sample < 2 or pairs < 2:
        raise SelectionError(
            f"sample {sample}, pairs {pairs}, neighbours {neighbours}: expected 2 or more, and "
            f"fewer neighbours than the {n_rows} rows."
        )
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(n_rows, generator=generator)
    queries = order[: min(sample, n_rows)]
    # Sampled rows change places among themselves, so that the neighbours of each are known.
    shuffle = torch.arange(n_rows)
    shuffle[queries] = queries[torch.randperm(len(queries), generator=generator)]
    rest = order[len(queries) :]
    shuffle[rest] = rest[torch.randperm(len(rest), generator=generator)]
    drawn = torch.randint(n_rows, (2, pairs), generator=generator)
    held_out = torch.zeros(n_rows, dtype=torch.bool)
    held_out[order[: max(1, int(HELD_OUT * n_rows))]] = True
    values, chance = np.zeros((len(MEASURES), 2)), np.zeros((len(MEASURES), 2))
    found: list[tuple[Nearest, Nearest]] = []
    whole = moments_of(w_e, w_u, held_out)
    sums = whole, moments_of(w_e, w_u, held_out, order=shuffle, known=whole)
    for form, centred in enumerate((False, True)):
        one, other = _Rows.of(w_e, centred=centred), _Rows.of(w_u, centred=centred)
        spaces = [
            _spaces(one, b, m.shifted(one.shift, other.shift), held_out, penalty)
            for b, m in zip((other, other.permuted(shuffle)), sums, strict=True)
        ]
        near = [_near(rows, queries, neighbours) for rows in (one, other)]
        found.append((near[0], near[1]))
        for column, (table, b) in enumerate(((values, other), (chance, other.permuted(shuffle)))):
            table[0, form] = _row_cosine(one, b)
            table[1:5, form] = spaces[column]
            table[5, form] = rank_correlation(one.pair_cosines(drawn), b.pair_cosines(drawn))
            table[7, form] = rank_correlation(one.lengths(), b.lengths())
        values[6, form] = overlap(near[0].by_cosine, near[1].by_cosine)
        chance[6, form] = overlap(near[0].by_cosine, _renamed(near[1], queries, shuffle))
    copies = _copies(checkpoint, w_e, w_u, queries, shuffle)
    plain = _Rows.of(w_e, centred=False), _Rows.of(w_u, centred=False)
    isotropy = [_isotropy(rows, drawn, near) for rows, near in zip(plain, found[0], strict=True)]
    return Geometry(
        model_id=checkpoint.origin.model_id,
        tie=checkpoint.tie.verdict,
        n_rows=n_rows,
        n_sampled=len(queries),
        neighbours=neighbours,
        seed=seed,
        values=values,
        chance=chance,
        isotropy=np.array([numbers for numbers, _ in isotropy]),
        spectra=np.stack([spectrum for _, spectrum in isotropy]),
        copy_score=copies[0],
        copy_chance=copies[1],
    )


@dataclass(frozen=True, eq=False)
class _Rows:
    """A matrix with what is taken off its rows, and the order in which they are read."""

    matrix: Tensor
    shift: Tensor
    order: Tensor | None = None

    @classmethod
    def of(cls, matrix: Tensor, *, centred: bool) -> "_Rows":
        zero = torch.zeros(matrix.shape[1], dtype=torch.float64, device=matrix.device)
        return cls(matrix, linear.mean_row(matrix) if centred else zero)

    def permuted(self, order: Tensor) -> "_Rows":
        return _Rows(self.matrix, self.shift, order)

    def __getitem__(self, rows: Any) -> Float[Tensor, "row d"]:
        if self.order is not None:
            rows = self.order[rows]
        # Moments are summed in float64; a single row needs no more than it was stored with.
        return self.matrix[rows].float() - self.shift.float()

    def lengths(self) -> Float[np.ndarray, " row"]:
        parts = [
            torch.linalg.vector_norm(self[rows], dim=1)
            for rows in linear.blocks(self.matrix.shape[0])
        ]
        return torch.cat(parts).double().cpu().numpy()

    def pair_cosines(self, pairs: Int[Tensor, "2 pair"]) -> Float[np.ndarray, " pair"]:
        return _cosines(self[pairs[0]], self[pairs[1]]).cpu().numpy()


def _matrices(checkpoint: "Checkpoint") -> tuple[Tensor, Tensor]:
    w_e, w_u = checkpoint.W_E.detach(), checkpoint.W_U.detach()
    if w_e.shape[1] != w_u.shape[1]:
        raise ShapeError(
            f"W_E is {w_e.shape[1]} wide and W_U {w_u.shape[1]}: their rows lie in two spaces and "
            "cannot be compared."
        )
    rows = min(w_e.shape[0], w_u.shape[0])
    w_e, w_u = w_e[:rows], w_u[:rows]
    there = [(w != 0).any(1) for w in (w_e, w_u)]
    kept = there[0] & there[1].to(there[0].device)
    return (w_e, w_u) if bool(kept.all()) else (w_e[kept], w_u[kept.to(w_u.device)])


def _row_cosine(a: _Rows, b: _Rows) -> float:
    total = 0.0
    for rows in linear.blocks(a.matrix.shape[0]):
        total += float(_cosines(a[rows], b[rows]).sum())
    return total / a.matrix.shape[0]


def _spaces(a: _Rows, b: _Rows, moments: Moments, held_out: Tensor, penalty: float) -> list[float]:
    """Procrustes cosine, CKA, and R2 and mean row cosine of a ridge map on rows it never saw."""
    cross, aa, bb = moments.cross.sum(0), moments.aa.sum(0), moments.bb
    mapped = linear.ridge_map(moments.aa[0], moments.cross[0], penalty=penalty)
    # |A M - B|^2 over the held-out rows, from their products alone.
    explained = (mapped * moments.cross[1]).sum() * 2
    explained -= (mapped * (moments.aa[1] @ mapped)).sum()
    total, where = 0.0, held_out.nonzero()[:, 0]
    for rows in linear.blocks(len(where)):
        x, y = a[where[rows]], b[where[rows]]
        total += float(_cosines(x @ mapped.to(x.device, x.dtype), y).sum())
    return [
        linear.procrustes_cosine(cross, aa, bb),
        linear.linear_cka(cross, aa, bb),
        float(explained / moments.bb_trace[1]),
        total / len(where),
    ]


def _cosines(x: Float[Tensor, "row d"], y: Float[Tensor, "row d"]) -> Float[Tensor, " row"]:
    y = y.to(x.device)
    lengths = torch.linalg.vector_norm(x, dim=1) * torch.linalg.vector_norm(y, dim=1)
    return torch.linalg.vecdot(x, y).double() / lengths.double().clamp_min(1e-300)


def _near(rows: _Rows, queries: Tensor, k: int) -> Nearest:
    return nearest_rows(rows[queries], rows.matrix, k=k, own=queries, shift=rows.shift)


def _renamed(near: Nearest, queries: Tensor, shuffle: Tensor) -> Int[Tensor, "query k"]:
    """The neighbours of each query in the permuted matrix, by the names of its rows."""
    back = torch.empty_like(shuffle)
    back[shuffle] = torch.arange(len(shuffle))
    place = torch.empty_like(shuffle)
    place[queries] = torch.arange(len(queries))
    return back[near.by_cosine[place[shuffle[queries]]]]


def _copies(
    checkpoint: "Checkpoint", w_e: Tensor, w_u: Tensor, queries: Tensor, shuffle: Tensor
) -> tuple[float | None, float | None]:
    readout = checkpoint.readout
    if not isinstance(readout, DirectReadout) or w_e.shape[1] != checkpoint.d_model:
        return None, None
    scale = 1.0 if checkpoint.lookup_scale is None else checkpoint.lookup_scale
    with torch.no_grad():
        states = readout.prepare(w_e[queries] * scale)
    answers = nearest_rows(states.float(), w_u, k=1).by_dot
    return (
        float((answers == queries).float().mean()),
        float((answers == shuffle[queries]).float().mean()),
    )


def _isotropy(
    rows: _Rows, pairs: Tensor, near: Nearest
) -> tuple[list[float], Float[np.ndarray, " d"]]:
    n = rows.matrix.shape[0]
    lengths = rows.lengths()
    gram = linear.cross_product(rows.matrix, rows.matrix)
    energy = torch.linalg.eigvalsh(gram).clamp_min(0).flip(0).cpu().numpy()
    singular = np.sqrt(energy)
    share = singular / singular.sum()
    unit_sum = torch.zeros(rows.matrix.shape[1], dtype=torch.float64, device=rows.matrix.device)
    for block in linear.blocks(n):
        unit_sum += torch.nn.functional.normalize(rows[block], dim=1).double().sum(0)
    # All pairs i != j: |sum of unit rows|^2 counts each pair, and each row with itself.
    mean_cosine = (float(unit_sum.square().sum()) - n) / (n * (n - 1))
    dots = torch.linalg.vecdot(rows[pairs[0]], rows[pairs[1]]).double().cpu().numpy()
    numbers = [
        mean_cosine,
        float(linear.mean_row(rows.matrix).norm()) / float(lengths.mean()),
        float(np.exp(-(share[share > 0] * np.log(share[share > 0])).sum())),
        float(energy.sum() ** 2 / (energy**2).sum()),
        float((near.by_dot == near.by_cosine[:, 0]).float().mean()),
        rank_correlation(dots, lengths[pairs[1].numpy()]),
    ]
    return numbers, singular
