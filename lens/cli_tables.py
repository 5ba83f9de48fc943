"""What the command prints: tables on standard output, progress on standard error."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from rich import box
from rich.console import Console, RenderableType
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from lens.lenses.predictions import LayerPredictions

UNBOUNDED = 4096
"""Columns of a pipe or a file: nothing is wrapped there."""


def emit(content: RenderableType) -> None:
    """Print text as it stands, or a table; to a pipe without colours, wrapping or padding."""
    if isinstance(content, str):
        print(content)
        return
    terminal = sys.stdout.isatty()
    console = Console(width=None if terminal else UNBOUNDED, highlight=False, no_color=not terminal)
    with console.capture() as captured:
        console.print(content)
    print("\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n")))


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show on a terminal that work is going on, and for how long; leaves no trace."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        bar.add_task(what, total=None)
        yield


def summary_table(rows: list[tuple[str, str]]) -> Table:
    """Labels beside their texts."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(Text(label), Text(text))
    return table


def columns_table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Rows of texts beneath their headings; all columns but the first to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(heading):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def predictions_table(predictions: "LayerPredictions") -> Table:
    """A row for each layer; for each position its top-1 with probability, entropy, KL, targets."""
    from lens.show.labels import id_label, labels

    shown = labels(predictions.vocabulary, max_chars=24)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("layer", justify="right", no_wrap=True)
    for position in predictions.positions:
        token = id_label(int(predictions.input_ids[position]), shown)
        table.add_column(Text(f"after {position} {token}"), no_wrap=True)
        for heading in ("p", "entropy bits", "KL bits", *_more_headings(predictions)):
            table.add_column(Text(heading), justify="right", no_wrap=True)
    for row, layer in enumerate(predictions.layer_names):
        cells = [Text(layer)]
        for column in range(len(predictions.positions)):
            top = id_label(int(predictions.top_ids[row, column, 0]), shown)
            cells += [Text(top), *map(Text, _numbers(predictions, row, column))]
        table.add_row(*cells)
    return table


def _more_headings(predictions: "LayerPredictions") -> list[str]:
    """Of rows of no token, where there are any, and of target sets."""
    names = predictions.set_names
    headings = [] if predictions.padding_mass is None else ["p(no token)"]
    headings += [f"p({name})" for name in names]
    if len(names) == 2:
        headings.append(f"{names[0]} - {names[1]}, bits")
    return headings


def _numbers(predictions: "LayerPredictions", row: int, column: int) -> list[str]:
    probability = float(np.exp2(predictions.top_logprob_bits[row, column, 0]))
    numbers = [
        f"{probability:.3f}",
        f"{predictions.entropy_bits[row, column]:.2f}",
        f"{predictions.kl_bits[row, column]:.2f}",
    ]
    if predictions.padding_mass is not None:
        numbers.append(f"{predictions.padding_mass[row, column]:.3g}")
    names = predictions.set_names
    numbers += [f"{predictions.set_probability(name)[row, column]:.3f}" for name in names]
    if len(names) == 2:
        numbers.append(f"{predictions.logit_difference(*names)[row, column]:+.2f}")
    return numbers
