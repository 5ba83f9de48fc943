"""The command `lens tune`: a tuned lens fitted on a corpus, in a folder."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Option, Typer

from lens import cli_options as options
from lens.cli_errors import Command
from lens.cli_measure import Corpus, MaxDocuments, TextColumn, WindowTokens

LensFolder = Annotated[
    Path,
    Option(
        "-o",
        "--output",
        metavar="DIR",
        help="Folder for the lens. A fit that was stopped continues there.",
    ),
]
Steps = Annotated[int, Option(min=1, help="Steps, at most.")]
Positions = Annotated[int, Option(min=1, help="Positions that each step sees.")]
Optimiser = Annotated[Literal["adam", "muon"], Option(help="Muon moves the matrices alone.")]
Rate = Annotated[
    float | None, Option(min=0, help="Learning rate; 0.001 with adam, 0.01 with muon.")
]
CheckEvery = Annotated[
    int, Option(min=1, help="Steps between two looks at the held-out documents, and two saves.")
]
Patience = Annotated[int, Option(min=1, help="Looks without a gain after which it ends.")]
Seed = Annotated[int, Option(min=0, help="Which documents are held out, and the order.")]


def register(app: Typer) -> None:
    """Give the command to the application."""
    app.command(cls=Command, short_help="Fit a tuned lens: a translator for each layer.")(tune)


def tune(
    model: options.Model,
    output: LensFolder,
    corpus: Corpus = "sample",
    max_documents: MaxDocuments = None,
    text_column: TextColumn = "text",
    window_tokens: WindowTokens = None,
    steps: Steps = 200,
    positions: Positions = 256,
    optimiser: Optimiser = "adam",
    learning_rate: Rate = None,
    check_every: CheckEvery = 20,
    patience: Patience = 5,
    seed: Seed = 0,
    device: options.Device = None,
    dtype: options.Dtype = None,
    debug: options.Debug = False,
) -> None:
    """Fit a translator for every layer by KL against the model's own prediction.

    A tenth of the documents is held out to tell when to stop; each layer keeps what did best
    there. Measure on other documents than these.
    """
    from lens.cli import _load
    from lens.cli_files import require_folder
    from lens.cli_tables import emit
    from lens.corpus import read_corpus
    from lens.measuring.tuning import tune as fit

    require_folder(output)
    texts = read_corpus(corpus, text_column=text_column, max_documents=max_documents)
    checkpoint = _load(model, device=device, dtype=dtype)
    with _progress() as report:
        lens = fit(
            checkpoint,
            texts,
            steps=steps,
            positions=positions,
            optimiser=optimiser,
            learning_rate=learning_rate,
            window_tokens=window_tokens,
            check_every=check_every,
            patience=patience,
            seed=seed,
            folder=output,
            progress=report,
        )
    emit(_table(lens))
    emit(f"{lens.source.options['steps_taken']} steps; wrote {output}")


@contextmanager
def _progress() -> Iterator[Callable[[Any], None]]:
    """On a terminal: how many steps are done, and the held-out KL."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("Fitting", total=None)

        def report(now: Any) -> None:
            told = f"Fitting: held-out KL {now.held_out_kl_bits:.3f} bits"
            bar.update(task, description=told, completed=now.step, total=now.steps)

        yield report


def _table(lens: Any) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("layer", "logit lens, KL bits", "tuned, KL bits"):
        table.add_column(heading, justify="right", no_wrap=True)
    told = lens.source.options
    columns = (told["logit_lens_kl_bits"], told["held_out_kl_bits"])
    for layer, (before, after) in enumerate(zip(*columns, strict=True)):
        table.add_row(str(layer), f"{before:.3f}", f"{after:.3f}")
    return table
