"""Fills the size sweep of docs/study.md from docs/study/sweep: python docs/study_sweep.py.

`lens twins sweep` writes the rows; a cell that has not finished is left out.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from study_tables import with_section

from lens.errors import SelectionError
from lens.study.arms import PAIR
from lens.study.effects import Effect
from lens.study.sweep import (
    CELLS,
    SIZES,
    SWEPT,
    Cell,
    Slopes,
    read_sweep,
    slopes,
    sweep_effects,
    targets_per_byte,
)
from lens.study.twins import GATE

HERE = Path(__file__).parent
PAGE, ROWS = HERE / "study.md", HERE / "study" / "sweep"
BEGIN, END = "<!-- size sweep -->", "<!-- end of size sweep -->"
PICTURE = "![Loss and reading loss, untied less tied, by the share of the matrix](study_sweep.png)"

Rows = Mapping[str, list[dict[str, Any]]]


def section(rows: Rows) -> str:
    """Each cell, and the slopes over all."""
    per_byte = targets_per_byte(ROWS)
    effects = {quantity: sweep_effects(rows, quantity, per_byte) for quantity in SWEPT}
    done = next(iter(effects.values()))
    if not done:
        return "No cell has a tied and an untied run yet."
    absent = [name for name in CELLS if name not in done]
    first = next(iter(rows.values()))[0]
    branch = first["branches"][-1]
    made = ", ".join(f"{k} {v.split('+')[0]}" for k, v in first["versions"].items())
    parts = [
        PICTURE,
        f"{branch['tokens']:,} tokens a run; measured on {branch['n_documents']} held-out "
        f"documents, the loss on all; {made}."
        + (f" Not finished: {', '.join(absent)}." if absent else ""),
        cells(rows, effects),
        slope_table(effects),
    ]
    return "\n\n".join(part for part in parts if part)


def cells(rows: Rows, effects: Mapping[str, Mapping[str, Effect]]) -> str:
    """A line for each cell: losses, n-grams, G, R and their differences."""
    lines = [
        "| V | d, L | V d / N | seeds | tied loss | untied loss | below | tied G | untied G "
        f"| tied copies, l = 1 | {' | '.join(f'd {what}' for what in SWEPT.values())} |",
        "|--:|---|--:|--:|--:|--:|---|--:|--:|--:|" + "--:|" * len(SWEPT),
    ]
    for name, one in next(iter(effects.values())).items():
        cell = CELLS[name]
        losses = [mean(rows[name], arm, one.seeds, "loss_bits") for arm in PAIR]
        read = [mean(rows[name], arm, one.seeds, "reading_loss") for arm in PAIR]
        copies = mean(rows[name], "tied", one.seeds, "copy_rate", layer=1)
        values = [f"{v:.3f}" for v in losses] + [passed(cell, rows[name])]
        values += [f"{v:.3f}" for v in (*read, copies)]
        values += [f"{of[name].mean[0]:+.3f}" for of in effects.values()]
        lines.append(
            f"| {cell.d_vocab:,} | {cell.d_model}, {cell.n_layers} | {2**cell.log2_share:.3f} "
            f"| {len(one.seeds)} | " + " | ".join(values) + " |"
        )
    return "\n".join(
        [
            *lines,
            "",
            "Losses and G in bits a token of the cell's own vocabulary, means over seeds; "
            "differences, untied-copy less tied, in bits a byte of the text, the unit that "
            "vocabularies share. G over the layers 1 to L - 1, middle G over those from a quarter "
            "to three quarters of the depth, which the three depths share. Below: the best n-gram "
            "model (fitted on the same training text) that every run of the cell is better than.",
        ]
    )


def passed(cell: Cell, rows: list[dict[str, Any]]) -> str:
    """The best of the n-gram models that all runs of a cell are below."""
    bits = json.loads((ROWS / f"v{cell.d_vocab}" / GATE).read_text("utf-8"))["bits"]
    worst = max(row["branches"][-1]["loss_bits"] for row in rows)
    below = [n for n in ("trigram", "bigram", "unigram") if worst < bits[n]]
    return below[0] if below else "none"


def mean(
    rows: list[dict[str, Any]], arm: str, seeds: Any, key: str, *, layer: int | None = None
) -> float:
    """Over seeds, and over the layers 1 to L - 1 where a layer is not named."""
    values = [
        row["branches"][-1][key]
        for row in rows
        if row["arm"]["name"] == arm and row["seed"] in seeds
    ]
    if isinstance(values[0], float):
        return float(np.mean(values))
    return float(np.mean([v[1:-1] if layer is None else v[layer] for v in values]))


def slope_table(effects: Mapping[str, Mapping[str, Effect]]) -> str:
    """The change of each difference for a doubling of V d / N, and of V and N / d apart."""
    try:
        found = {q: (slopes(of), slopes(of, apart=True)) for q, of in effects.items()}
    except SelectionError:
        return ""
    n = next(iter(found.values()))[0].n_cells
    lines = [
        f"Change for each doubling in bits a byte, least squares over {n} cells, 95 % in brackets:",
        "",
        "| difference | of V d / N | R2 | of V | of N / d | R2 |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for quantity, (share, apart) in found.items():
        lines.append(
            f"| d {SWEPT[quantity]} | {slope(share, 0)} | {share.explained:.2f} "
            f"| {slope(apart, 0)} | {slope(apart, 1)} | {apart.explained:.2f} |"
        )
    return "\n".join(lines)


def slope(found: Slopes, term: int) -> str:
    """As "+0.1200 [+0.0800, +0.1600]"."""
    middle, half = found.slope[term], found.half_width[term]
    return f"{middle:+.4f} [{middle - half:+.4f}, {middle + half:+.4f}]"


def figure(rows: Rows) -> None:
    """d loss and mean dG against V d / N, a line for each size, written beside the page."""
    from lens.show.responses import Response, response_lines

    panels, per_byte = {}, targets_per_byte(ROWS)
    for quantity, heading in (("held-out loss", "d held-out loss"), ("middle dG", "d middle G")):
        effects = sweep_effects(rows, quantity, per_byte)
        groups = {}
        for d_model, n_layers in SIZES:
            of_size = [
                (CELLS[name], e)
                for name, e in effects.items()
                if (CELLS[name].d_model, CELLS[name].n_layers) == (d_model, n_layers)
            ]
            if not of_size:
                continue
            n = min(len(e.seeds) for _, e in of_size)
            groups[f"d {d_model}, {n_layers} layers"] = Response(
                dose=np.array([2**cell.log2_share for cell, _ in of_size]),
                values=np.column_stack([e.differences[:n, 0] for _, e in of_size]),
            )
        panels[f"{heading}, bits a byte"] = groups
    response_lines(
        panels,
        dose="V d / N",
        title=finding(rows),
        subtitle="untied-copy less tied; dots are seeds, lines join their means; below 0 the "
        "untied twin predicts better (left) and is read better (right)",
        logarithmic=True,
    ).write_image(HERE / "study_sweep.png", scale=2)


def finding(rows: Rows) -> str:
    """What a doubling of the share does to the loss, as far as the cells can tell."""
    try:
        found = slopes(sweep_effects(rows, "held-out loss", targets_per_byte(ROWS)))
    except SelectionError:
        return "Untied less tied, by the share of the matrix"
    if abs(found.slope[0]) < found.half_width[0]:
        return "The share of the matrix does not tell what untying does to the loss"
    moved = f"{found.slope[0]:+.4f} bits a byte"
    return f"Each doubling of V d / N moves d loss (untied less tied) by {moved}"


def filled(page: str, rows: Rows) -> str:
    """The page with its size sweep as these rows give it."""
    return with_section(page, BEGIN, END, section(rows))


def main() -> None:
    rows = read_sweep(ROWS)
    PAGE.write_text(filled(PAGE.read_text("utf-8"), rows), encoding="utf-8")
    if any(sweep_effects(rows, "mean dG")):
        figure(rows)


if __name__ == "__main__":
    main()
