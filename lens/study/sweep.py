"""The size sweep: what untying does, against how large the matrix is beside the model."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from lens.checkpoint.plain_torch import in_plain_torch
from lens.errors import ResultFileError, SelectionError
from lens.study.arms import PAIR, arm_of
from lens.study.effects import CONTRASTS, Effect, effect, student_t
from lens.study.measured import measure_run, read_rows, write_row
from lens.study.recipe import Recipe
from lens.study.run import told, train
from lens.study.texts import study_texts
from lens.study.twins import GATE, write_gate

SIZES = ((48, 4), (96, 6), (128, 8))
"""(d_model, n_layers); the one in the middle is the study's own."""

VOCABULARIES = (512, 2048, 8192)
SWEEP_SEEDS = 2
STEPS, DECAY_STEPS = 600, 100
MEASURING = {"tuning_steps": 60, "last_documents": 60, "gradient_targets": 2048}
"""Options of `measure_run` where those of the study would take longer than the training."""

SWEPT = {
    "held-out loss": "loss",
    "mean dG": "mean G",
    "middle dG": "middle G",
    "mean dR": "mean R",
}
"""What `effect` calls a difference: what it is a difference in."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One size of model with one vocabulary."""

    d_vocab: int
    d_model: int
    n_layers: int

    @property
    def name(self) -> str:
        """As "v2048-d96-l6"."""
        return f"v{self.d_vocab}-d{self.d_model}-l{self.n_layers}"

    @property
    def matrix_parameters(self) -> int:
        """V d: what a tie saves."""
        return self.d_vocab * self.d_model

    @property
    def block_parameters(self) -> int:
        """N: the weights of the blocks' matrices, 4 d^2 of attention and 8 d^2 of the MLP each."""
        return 12 * self.n_layers * self.d_model**2

    @property
    def log2_share(self) -> float:
        """log2(V d / N): 0 where the matrix is as large as the blocks."""
        return math.log2(self.matrix_parameters / self.block_parameters)

    def recipe(self, of: Recipe) -> Recipe:
        """That recipe at this size."""
        return replace(of, d_vocab=self.d_vocab, d_model=self.d_model, n_layers=self.n_layers)


CELLS = {
    cell.name: cell
    for cell in (
        Cell(d_vocab=d_vocab, d_model=d_model, n_layers=n_layers)
        for d_vocab in VOCABULARIES
        for d_model, n_layers in SIZES
    )
}


def sweep_recipe() -> Recipe:
    """The study's recipe with one branch, about a quarter of its tokens."""
    return replace(Recipe(), branch_at=(STEPS,), branch_steps=DECAY_STEPS)


@in_plain_torch
def reproduce_sweep(
    corpus: Any,
    folder: str | Path,
    results: str | Path,
    *,
    cells: Sequence[str] | None = None,
    seeds: int = SWEEP_SEEDS,
    recipe: Recipe | None = None,
    measuring: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[Path]:
    """Train and measure tied and untied-copy twins of several sizes and vocabularies.

    Each row that is finished is written at once, as RESULTS/vV/dD-lL/ARM-seed-N.json; what is
    there is not run again, and a run that was stopped goes on. The first seed of all cells comes
    first. `cells` are names as "v2048-d96-l6"; None is all nine. Rates are the study's in each.
    `seeds` is how many of each arm, `recipe` what cells do not vary, and `measuring` as in
    `lens.reproduce_study`.

    Raises SelectionError for a cell that is not there, CorpusError where the corpus is too small
    for a vocabulary.
    """
    chosen = [_cell_of(name) for name in (CELLS if cells is None else cells)]
    base = recipe or sweep_recipe()
    options: dict[str, Any] = {**MEASURING, **(measuring or {})}
    texts_of = cache(lambda d_vocab: study_texts(corpus, d_vocab=d_vocab))
    written = []
    for seed, cell, arm in product(range(seeds), chosen, PAIR):
        place, name = folder_of(results, cell), f"{arm}-seed-{seed}"
        if (place / f"{name}.json").is_file():
            continue
        texts = texts_of(cell.d_vocab)
        if not (place.parent / GATE).is_file():
            write_gate(texts, base, place.parent)
        run = folder_of(folder, cell) / name
        report = told(progress, of=f"{cell.name}, ")
        train(arm_of(arm), seed, texts, cell.recipe(base), run, progress=report)
        written.append(write_row(measure_run(run, texts, **options), place))
        if progress is not None:
            progress(f"{cell.name}, {arm}, seed {seed}: measured")
    return written


def folder_of(results: str | Path, cell: Cell) -> Path:
    """Where a cell's rows lie."""
    return Path(results) / f"v{cell.d_vocab}" / f"d{cell.d_model}-l{cell.n_layers}"


def read_sweep(results: str | Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of each cell that has any. Raises ResultFileError where one cannot be read."""
    found = {name: read_rows(folder_of(results, cell)) for name, cell in CELLS.items()}
    return {name: rows for name, rows in found.items() if rows}


def targets_per_byte(results: str | Path) -> dict[int, float]:
    """Scored tokens a byte of the held-out texts, by vocabulary, as each gate.json says.

    Raises ResultFileError where one cannot be read.
    """
    found = {}
    for d_vocab in sorted({cell.d_vocab for cell in CELLS.values()}):
        path = Path(results) / f"v{d_vocab}" / GATE
        if path.is_file():
            try:
                gate = json.loads(path.read_text("utf-8"))
                found[d_vocab] = gate["held_out_targets"] / gate["held_out_bytes"]
            except (ValueError, LookupError, TypeError) as error:
                raise ResultFileError(
                    f"{path} does not say how long its texts are ({type(error).__name__}: "
                    f"{error}). Remove it; the sweep writes it again with the next row."
                ) from None
    return found


def sweep_effects(
    rows: Mapping[str, Sequence[Any]], quantity: str, per_byte: Mapping[int, float] | None = None
) -> dict[str, Effect]:
    """Untied-copy less tied in each cell that has a seed of both, paired by seed.

    In bits a token of the cell's own vocabulary; with `per_byte`, what `targets_per_byte` gives, in
    bits a byte of the text, the unit that cells of different vocabularies share.
    """
    found = {
        name: effect(of_cell, *CONTRASTS["constraint"], quantity)
        for name, of_cell in rows.items()
        if set.intersection(
            *({r["seed"] for r in of_cell if r["arm"]["name"] == arm} for arm in PAIR)
        )
    }
    if per_byte is None:
        return found
    rates = {name: per_byte[CELLS[name].d_vocab] for name in found}
    return {
        name: replace(one, differences=one.differences * rates[name]) for name, one in found.items()
    }


@dataclass(frozen=True, kw_only=True, eq=False)
class Slopes:
    """Least squares over cells: the change for each doubling, with Student's 95 % half-widths.

    The cells are the sample, so that the interval is about sizes such as these; a seed's own
    spread is a part of what scatters them. `explained` is R squared, NaN where
    all cells differ alike.
    """

    terms: tuple[str, ...]
    slope: Float[np.ndarray, " term"]
    half_width: Float[np.ndarray, " term"]
    n_cells: int
    explained: float


def slopes(effects: Mapping[str, Effect], *, apart: bool = False) -> Slopes:
    """The slope of a difference against log2(V d / N); `apart`, against log2 V and log2(N / d).

    If the share of the matrix is all that matters, the two slopes apart are opposites.

    Raises SelectionError for fewer cells than the fit needs, or cells that do not differ in what
    it is a slope against.
    """
    cells = [CELLS[name] for name in effects]
    terms = ("log2 V", "log2(N / d)") if apart else ("log2(V d / N)",)
    columns = [
        (math.log2(c.d_vocab), math.log2(c.d_vocab) - c.log2_share) if apart else (c.log2_share,)
        for c in cells
    ]
    values = np.array([e.mean[0] for e in effects.values()])
    design = np.column_stack([np.ones(len(cells)), np.array(columns).reshape(len(cells), -1)])
    free = len(cells) - design.shape[1]
    if free < 1 or np.linalg.matrix_rank(design) < design.shape[1]:
        raise SelectionError(
            f"A slope against {' and '.join(terms)} needs at least {design.shape[1] + 1} cells "
            f"that differ in it; there are {', '.join(effects) or 'none'}."
        )
    found = np.linalg.lstsq(design, values, rcond=None)[0]
    rest = values - design @ found
    variance = rest @ rest / free * np.linalg.inv(design.T @ design).diagonal()
    centred = values - values.mean()
    total = float(centred @ centred)
    return Slopes(
        terms=terms,
        slope=found[1:],
        half_width=student_t(free) * np.sqrt(variance[1:]),
        n_cells=len(cells),
        explained=1 - float(rest @ rest) / total if total else math.nan,
    )


def sweep_table(
    rows: Mapping[str, Sequence[Any]], per_byte: Mapping[int, float]
) -> Iterator[tuple[str, ...]]:
    """Lines of a table, the heading first: each cell, and beneath them the slope of each column.

    In bits a byte of the text.
    """
    yield "cell", "V d / N", "seeds", *(f"d {quantity}" for quantity in SWEPT.values())
    found = {quantity: sweep_effects(rows, quantity, per_byte) for quantity in SWEPT}
    first = next(iter(found.values()))
    for name, one in first.items():
        values = (f"{of[name].mean[0]:+.3f}" for of in found.values())
        yield name, f"{2 ** CELLS[name].log2_share:.3f}", f"{len(one.seeds)}", *values
    try:
        fits = [slopes(of) for of in found.values()]
    except SelectionError:  # too few cells
        return
    cells = (f"{f.slope[0]:+.3f} ({f.half_width[0]:.3f})" for f in fits)
    yield "for each doubling", "", "", *cells


def _cell_of(name: str) -> Cell:
    if name not in CELLS:
        raise SelectionError(f"The sweep has no cell {name!r}; there are {', '.join(CELLS)}.")
    return CELLS[name]
