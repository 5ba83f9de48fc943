"""`lens twins`: train matched tied and untied models, and rerun the study made of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from typer import Option, Typer

from lens import cli_options as options
from lens.cli_errors import Command

twins = Typer(
    name="twins",
    help="Matched twins: models that differ in the tie and in nothing else.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Corpus = Annotated[
    str,
    Option("--corpus", metavar="FILE", help="Text as in lens measure; sample comes with lens."),
]
Novels = Annotated[
    str, Option("--corpus", metavar="FILE", help="The novels that docs/sample_corpus.py writes.")
]
Runs = Annotated[Path, Option("-o", "--out", metavar="DIR", help="Where the runs lie.")]
Rows = Annotated[Path, Option(metavar="DIR", help="Where each measured run is written as JSON.")]
Threads = Annotated[
    int, Option(min=1, help="Threads of torch; a run has the same bits for the same number.")
]


@twins.command(cls=Command, short_help="Train one arm with one seed.")
def train(
    arm: Annotated[str, Option(help="tied, untied-copy, untied-own; lens twins arms lists all.")],
    out: Annotated[
        Path,
        Option("-o", "--out", metavar="DIR", help="Folder of the run; one that stopped goes on."),
    ],
    seed: Annotated[int, Option(min=0, help="Begins trunk and W_E, and orders the data.")] = 0,
    corpus: Corpus = "sample",
    threads: Threads = 1,
    debug: options.Debug = False,
) -> None:
    """Train one arm of the study: a checkpoint for each branch, a log, and what it was made of."""
    import torch

    from lens.cli_tables import emit
    from lens.study.recipe import Recipe
    from lens.study.run import branch_folder
    from lens.study.twins import train_twin

    torch.set_num_threads(threads)
    with _bar() as report:
        place = train_twin(arm, out, corpus, seed=seed, progress=report)
    emit(f"{branch_folder(place, Recipe().branch_at[-1]).resolve()}")


@twins.command(cls=Command, short_help="The arms, and what each varies.")
def arms(debug: options.Debug = False) -> None:
    """List the arms of the study."""
    from lens.cli_tables import emit, summary_table
    from lens.study.arms import ARMS

    emit(summary_table([(name, arm.varies) for name, arm in ARMS.items()]))


@twins.command(cls=Command, short_help="Search an arm's learning rates.")
def rates(
    arm: Annotated[str, Option(help="The arm to search for.")],
    out: Annotated[Path, Option("-o", "--out", metavar="DIR", help="Points that were tried stay.")],
    corpus: Corpus = "sample",
    results: Annotated[
        Path | None, Option(metavar="DIR", help="Where rates-ARM.json is written besides.")
    ] = None,
    threads: Threads = 1,
    debug: options.Debug = False,
) -> None:
    """Search the rates of trunk and embedding matrices on a coarse grid, a quarter of the tokens.

    Each point is judged by its held-out loss, on a seed that the study does not use.
    """
    import torch

    from lens.cli_tables import emit
    from lens.study.arms import arm_of
    from lens.study.rates import tune_rates, write_rates
    from lens.study.recipe import Recipe
    from lens.study.texts import study_texts

    torch.set_num_threads(threads)
    recipe, chosen = Recipe(), arm_of(arm)

    def told(trunk: float, embedding: float, loss: float) -> None:
        emit(f"trunk x{trunk:g}, embedding x{embedding:g}: {loss:.4f} bits a token held out")

    texts = study_texts(corpus, d_vocab=recipe.d_vocab)
    found = tune_rates(chosen, texts, recipe, out, progress=told)
    if results is not None:
        write_rates(found, results)
    edge = f"; at the grid's edge: {', '.join(found.at_edge)}" if found.at_edge else ""
    emit(f"{arm}: trunk x{found.trunk:g}, embedding x{found.embedding:g}{edge}")


@twins.command(cls=Command, short_help="Rerun the study, or a row of it.")
def reproduce(
    corpus: Novels,
    out: Runs = Path("twins-runs"),
    results: Rows = Path("docs/study"),
    row: Annotated[
        list[str] | None, Option(metavar="ROW", help="An arm, or ARM-seed-N; repeatable.")
    ] = None,
    threads: Threads = 1,
    debug: options.Debug = False,
) -> None:
    """Train and measure the runs of the study; what is there already is not run again."""
    import torch

    from lens.cli_tables import emit
    from lens.study.twins import reproduce_study

    torch.set_num_threads(threads)
    for path in reproduce_study(corpus, out, results, rows=row, progress=emit):
        emit(f"{path}")


@twins.command(cls=Command, short_help="Twins of several sizes and vocabularies.")
def sweep(
    corpus: Novels,
    out: Runs = Path("twins-sweep"),
    results: Rows = Path("docs/study/sweep"),
    cell: Annotated[
        list[str] | None, Option(metavar="CELL", help="As v2048-d96-l6; repeatable; left out, all.")
    ] = None,
    seeds: Annotated[int, Option(min=1, help="Seeds of each cell.")] = 2,
    threads: Threads = 1,
    debug: options.Debug = False,
) -> None:
    """Train and measure tied and untied twins at three sizes and three vocabularies.

    Prints what untying does to loss and reading loss in each cell that has both, in bits a byte of
    the text, and its slope against log2(V d / N). What is there already is not run again.
    """
    import torch

    from lens.cli_tables import columns_table, emit
    from lens.study.sweep import read_sweep, reproduce_sweep, sweep_table, targets_per_byte

    torch.set_num_threads(threads)
    reproduce_sweep(corpus, out, results, cells=cell, seeds=seeds, progress=emit)
    heading, *rows = sweep_table(read_sweep(results), targets_per_byte(results))
    emit(columns_table(heading, rows))


@twins.command(cls=Command, short_help="Read finished twins on another text.")
def domain(
    corpus: Novels,
    other: Annotated[str, Option(metavar="FILE", help="The text to read them on.")],
    name: Annotated[str, Option(help="What it is called in the results, in small letters.")],
    out: Runs = Path("twins-runs"),
    results: Rows = Path("docs/study"),
    arm: Annotated[
        list[str] | None, Option(metavar="ARM", help="Repeatable; left out, tied and untied-copy.")
    ] = None,
    seeds: Annotated[int, Option(min=1, help="Seeds of each arm.")] = 3,
    documents: Annotated[int, Option(min=1, help="Runs of paragraphs to measure on.")] = 64,
    threads: Threads = 1,
    debug: options.Debug = False,
) -> None:
    """Measure the study's finished runs on a text that they were not made for.

    Translators stay those of the study's training documents. What is there is not measured again.
    """
    import torch

    from lens.cli_tables import emit
    from lens.study.arms import PAIR
    from lens.study.domain import reproduce_domain

    torch.set_num_threads(threads)
    for path in reproduce_domain(
        corpus,
        other,
        out,
        results,
        domain=name,
        arms=tuple(arm or PAIR),
        seeds=seeds,
        documents=documents,
        progress=emit,
    ):
        emit(f"{path}")


@twins.command("continue", cls=Command, short_help="Continue a real model tied and untied.")
def continue_(
    model: options.Model,
    corpus: Annotated[str, Option("--corpus", metavar="FILE", help="Text as in lens measure.")],
    out: Annotated[
        Path,
        Option("-o", "--out", metavar="DIR", help="Folder of the run; one that stopped goes on."),
    ],
    steps: Annotated[int, Option(min=1, help="Optimiser steps of each arm.")] = 300,
    measure_at: Annotated[
        str | None,
        Option(metavar="N,N,...", help="Steps to measure after; left out, 0,1,3,10,30,... ."),
    ] = None,
    rate: Annotated[float, Option(help="Learning rate of trunk and matrices.")] = 1e-4,
    embedding_rate: Annotated[
        float | None, Option(help="Another rate for the embedding matrices.")
    ] = None,
    window_tokens: Annotated[
        int | None, Option(min=2, help="Tokens of a window; 256 where the model takes them.")
    ] = None,
    batch: Annotated[int, Option(min=1, help="Windows of a step.")] = 8,
    documents: Annotated[int, Option(min=1, help="Held-out documents to measure on.")] = 24,
    fit_documents: Annotated[
        int, Option(min=1, help="Training documents to fit translators on.")
    ] = 48,
    arm: Annotated[
        list[str] | None,
        Option(metavar="ARM", help="tied, untied, tied-output, ...; repeatable; left out, all."),
    ] = None,
    seed: Annotated[int, Option(min=0, help="Orders the windows.")] = 0,
    device: options.Device = None,
    dtype: options.Dtype = None,
    threads: Threads = 1,
    debug: options.Debug = False,
) -> None:
    """Continue a checkpoint with its tie as it is and changed, on the same windows.

    A tied model goes on beside an untied copy with equal logits, an untied one beside tied ones
    with the values of W_U, of W_E and of their mean. Prints loss, reading loss G, what is not
    there yet R, and how far the matrices went; DIR/continued.json holds them by layer.
    """
    import torch

    from lens.cli_measure import loaded
    from lens.cli_tables import columns_table, emit
    from lens.cli_text import numbers_from
    from lens.study.continuation import Continuation
    from lens.study.continued import continue_twins, read_continued, summary

    torch.set_num_threads(threads)
    settings = Continuation(
        steps=steps,
        measure_at=tuple(numbers_from(measure_at, "--measure-at") or ()),
        trunk_rate=rate,
        embedding_rate=rate if embedding_rate is None else embedding_rate,
        window_tokens=window_tokens,
        batch_windows=batch,
        seed=seed,
        documents=documents,
        fit_documents=fit_documents,
    )
    checkpoint = loaded(model, device=device, dtype=dtype)
    with _bar() as report:
        path = continue_twins(
            checkpoint, corpus, out, settings=settings, arms=tuple(arm or ()), progress=report
        )
    heading, *rows = summary(read_continued(path))
    emit(columns_table(heading, rows))
    emit(f"{path.resolve()}")


@contextmanager
def _bar() -> Iterator[Callable[[Any], None]]:
    """On a terminal: the step, the loss, and the time that is left."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("Training", total=None)

        def report(p: Any) -> None:
            text = f"step {p.done:,} of {p.total:,}, {p.loss_bits:.3f} bits a token"
            bar.update(task, description=text, completed=p.done, total=p.total)

        yield report
