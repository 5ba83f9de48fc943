"""The matrices of twins against each other, and how far training moved them from where they began.

Source: metrics.md 13; Lopardo et al. compare a tied matrix with the two of an untied model. Two
twins of a seed begin with one W_E, so that their rows lie in one basis.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lens import linear
from lens.errors import ResultFileError
from lens.study.arms import arm_of
from lens.study.building import build, matrices
from lens.study.recipe import recipe_of
from lens.study.run import RUN, branch_folder, is_finished, read_formatted, replace_text

FORMAT = "lens-study-matrices-1"
CEILING = "tied W, tied W of another seed"
UNTIED = ("untied-copy", "untied-own")
Matrix = Float[Tensor, "_ d"]


@dataclass(frozen=True, kw_only=True)
class Likeness:
    """Two matrices row by row, and after the best rotation; `chance_*` with permuted rows."""

    row_cosine: float
    chance_row_cosine: float
    procrustes: float
    chance_procrustes: float


def likeness(a: Matrix, b: Matrix) -> Likeness:
    """How alike two matrices with the same rows are, on the device of the first."""
    b = b.to(a.device)
    gram_a, gram_b = linear.cross_product(a, a), linear.cross_product(b, b)
    order = torch.randperm(b.shape[0], generator=torch.Generator().manual_seed(0))
    found = [
        (
            float(torch.nn.functional.cosine_similarity(a.double(), rows.double()).mean()),
            linear.procrustes_cosine(linear.cross_product(a, rows), gram_a, gram_b),
        )
        for rows in (b, b[order])
    ]
    (row, procrustes), (chance_row, chance_procrustes) = found
    return Likeness(
        row_cosine=row,
        chance_row_cosine=chance_row,
        procrustes=procrustes,
        chance_procrustes=chance_procrustes,
    )


@dataclass(frozen=True, eq=False)
class Trained:
    """W_E and W_U of a finished run, at step 0 and after its last branch."""

    first: tuple[Matrix, Matrix]
    last: tuple[Matrix, Matrix]

    @classmethod
    def of(cls, folder: str | Path) -> "Trained":
        """Read a run. Raises ResultFileError where it is not finished."""
        from transformers.models.auto.modeling_auto import AutoModelForCausalLM

        place = Path(folder)
        if not is_finished(place):
            raise ResultFileError(f"{place} holds no finished run. Train it to its end first.")
        run = json.loads((place / RUN).read_text("utf-8"))
        recipe = recipe_of(run)
        began = build(arm_of(run["arm"]["name"]), recipe, run["seed"])
        ended = AutoModelForCausalLM.from_pretrained(
            branch_folder(place, recipe.branch_at[-1]), local_files_only=True
        )
        first, last = (tuple(w.detach() for w in matrices(model)) for model in (began, ended))
        return cls((first[0], first[1]), (last[0], last[1]))

    def moved(self, which: int) -> Matrix:
        """W - W_0 of W_E (0) or W_U (1)."""
        return self.last[which] - self.first[which]

    def distance(self, which: int) -> float:
        """|W - W_0| / |W_0|."""
        return float(self.moved(which).norm() / self.first[which].norm())


def pairs_of(
    tied: Trained, untied: Trained, other: Trained | None
) -> Iterator[tuple[str, Matrix, Matrix]]:
    """(what is compared, one, other): within the untied twin, across twins, across seeds."""
    yield "untied E, untied U", untied.last[0], untied.last[1]
    yield "tied W, untied E", tied.last[0], untied.last[0]
    yield "tied W, untied U", tied.last[0], untied.last[1]
    yield "moved: untied E, untied U", untied.moved(0), untied.moved(1)
    yield "moved: tied W, untied E", tied.moved(0), untied.moved(0)
    yield "moved: tied W, untied U", tied.moved(0), untied.moved(1)
    if other is not None:
        yield CEILING, tied.last[0], other.last[0]


def compare_matrices(folder: str | Path, seed: int, arm: str) -> dict[str, Any] | None:
    """The matrices of an untied twin and of the tied one of its seed; None where one is missing.

    The ceiling, tied against tied, is with the nearest other seed that is finished.
    """
    place = Path(folder)
    tied, untied = place / f"tied-seed-{seed}", place / f"{arm}-seed-{seed}"
    if not (is_finished(tied) and is_finished(untied)):
        return None
    others = [int(p.name.rpartition("-")[2]) for p in place.glob("tied-seed-*") if is_finished(p)]
    nearest = min((s for s in others if s != seed), key=lambda s: (abs(s - seed), s), default=None)
    one, two = Trained.of(tied), Trained.of(untied)
    other = None if nearest is None else Trained.of(place / f"tied-seed-{nearest}")
    return {
        "format": FORMAT,
        "seed": seed,
        "arm": arm,
        "ceiling_seed": nearest,
        "moved": {
            "tied W": one.distance(0),
            "untied E": two.distance(0),
            "untied U": two.distance(1),
        },
        "likeness": {
            name: {k: round(v, 6) for k, v in vars(likeness(a, b)).items()}
            for name, a, b in pairs_of(one, two, other)
        },
    }


def write_matrices(folder: str | Path, results: str | Path, seed: int) -> list[Path]:
    """The comparisons of a seed's twins as matrices-ARM-N.json, of those that are finished."""
    written = []
    for arm in UNTIED:
        found = compare_matrices(folder, seed, arm)
        if found is not None:
            path = Path(results) / f"matrices-{arm}-{seed}.json"
            text = json.dumps(found, indent=1) + "\n"
            replace_text(path, text)
            written.append(path)
    return written


def read_matrices(results: str | Path) -> list[dict[str, Any]]:
    """What was written, by arm and seed. Raises ResultFileError for another format."""
    rows = read_formatted(Path(results).glob("matrices-*.json"), FORMAT)
    return sorted(rows, key=lambda row: (row["arm"], row["seed"]))


def mean_likeness(rows: list[dict[str, Any]], name: str, key: str) -> float:
    """The mean of one number over seeds, of two tied twins over pairs; NaN where no row has it."""
    values: dict[Any, float] = {}
    for row in rows:
        if name in row["likeness"]:
            # Two seeds that are each other's nearest are one pair.
            of = frozenset((row["seed"], row["ceiling_seed"])) if name == CEILING else row["seed"]
            values[of] = row["likeness"][name][key]
    return float(np.mean(list(values.values()))) if values else float("nan")
