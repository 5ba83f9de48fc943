"""The commands `lens measure` and `lens compare`: a lens over a corpus, as tables and files."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from lens import cli_options as options
from lens.cli_options import Model
from lens.files import expanded, is_file, is_folder, require_writable, written_whole

Corpus = Annotated[
    str,
    Option(
        "--corpus",
        metavar="FILE",
        help="A .txt, .jsonl or .parquet file, a folder of texts, a dataset id of the hub, or "
        "sample, which comes with lens.",
    ),
]
MaxDocuments = Annotated[
    int | None, Option(min=2, help="Take this many documents, spread over the corpus.")
]
TextColumn = Annotated[str, Option(metavar="NAME", help="Column that holds the text of a row.")]
WindowTokens = Annotated[
    int | None, Option(min=2, help="Tokens that pass the model together; 256 where it takes them.")
]
Sampled = Annotated[
    int,
    Option(
        "--second-pass",
        min=0,
        max=4096,
        help="Positions to read again for JS, copy split, temperature and marginal bias.",
    ),
]
Folder = Annotated[
    Path | None,
    Option(metavar="DIR", help="Keep finished documents there; the same command continues."),
]
Written = Annotated[
    Path | None,
    Option(
        "-o",
        "--output",
        metavar="FILE",
        help="Write .parquet, .csv, .json, .html, .svg, .png or .pdf.",
    ),
]
Second = Annotated[str, Argument(metavar="MODEL2", help="The checkpoint to set beside the first.")]


def measure(
    model: Model,
    corpus: Corpus = "sample",
    max_documents: MaxDocuments = None,
    text_column: TextColumn = "text",
    window_tokens: WindowTokens = None,
    readout: options.Readout = "output",
    second_pass: Sampled = 0,
    folder: Folder = None,
    output: Written = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    debug: options.Debug = False,
) -> None:
    """Measure a lens over documents: KL, skill, cross-entropy, copying, depth, by layer.

    A fifth of the documents, of whole sources, is kept back to fit the context-free guess
    that skill is measured against.
    """
    from lens.cli_tables import emit
    from lens.corpus import read_corpus
    from lens.measuring.measure import measure as run

    _require_written(output)
    require_kept(folder)
    texts = read_corpus(corpus, text_column=text_column, max_documents=max_documents)
    fit, held_out = texts.split()
    checkpoint = loaded(model, device=device, dtype=dtype)
    with progress_bar() as report:
        profile = run(
            checkpoint,
            held_out,
            lens=readout,
            fit_on=fit,
            window_tokens=window_tokens,
            sample_positions=second_pass,
            folder=folder,
            progress=lambda p: report(model, p),
        )
    if output is not None:
        # Before anything is printed: a reader who goes away takes no result with him.
        _write_profile(profile, output)
    emit(_profile_table(profile))
    emit(_headline(profile))
    if output is not None:
        emit(f"Wrote {output}")


def compare(
    model: Model,
    second: Second,
    corpus: Corpus = "sample",
    max_documents: MaxDocuments = None,
    text_column: TextColumn = "text",
    window_tokens: WindowTokens = None,
    folder: Folder = None,
    output: Written = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    debug: options.Debug = False,
) -> None:
    """Compare the lenses of two checkpoints: signed differences, a verdict, the confounds."""
    from lens.cli_tables import emit
    from lens.corpus import read_corpus
    from lens.measuring.compare import compare as run

    _require_written(output)
    require_kept(folder)
    texts = read_corpus(corpus, text_column=text_column, max_documents=max_documents)
    fit, held_out = texts.split()
    names = names_of(model, second)
    models = {
        name: loaded(source, device=device, dtype=dtype)
        for name, source in zip(names, (model, second), strict=True)
    }
    with progress_bar() as report:
        comparison = run(
            models,
            held_out,
            fit_on=fit,
            window_tokens=window_tokens,
            folder=folder,
            progress=report,
        )
    if output is not None:
        _write_comparison(comparison, output)
    emit(_comparison_table(comparison))
    emit(str(comparison))
    if output is not None:
        emit(f"Wrote {output}")


def loaded(model: str, **how: Any) -> Any:
    """The checkpoint of that name, with the libraries kept quiet."""
    # Inside, because lens.cli imports this module to register the commands.
    from lens.cli import _load

    return _load(model, **how)


def names_of(first: str, second: str) -> tuple[str, str]:
    """The last parts of two names, numbered where they are alike."""
    a, b = (_last_part(name) for name in (first, second))
    return (a, b) if a != b else (f"{a} (1)", f"{b} (2)")


def _last_part(name: str) -> str:
    # ".." is a folder with a name of its own.
    path = expanded(name)
    return (path.resolve().name if is_folder(path) or is_file(path) else path.name) or name


def require_kept(folder: Path | None) -> None:
    """Raise ExportError where nothing could be kept in `folder`."""
    if folder is not None:
        from lens.cli_files import require_folder

        require_folder(folder)


_SUFFIXES = (".parquet", ".csv", ".json", ".html", ".svg", ".png", ".pdf")


def _require_written(path: Path | None) -> None:
    if path is None:
        return
    from lens.cli_files import require_picture
    from lens.errors import ExportError

    if path.suffix.lower() not in _SUFFIXES:
        raise ExportError(
            f"{path} has extension {path.suffix!r}; -o writes {', '.join(_SUFFIXES)}."
        )
    require_writable(path)
    require_picture(path)


def _write_profile(profile: Any, path: Path) -> None:
    from lens.show.curves import profile_curves

    if path.suffix.lower() == ".parquet":
        profile.save(path)
    else:
        _write(path, profile.to_frame(), lambda: profile_curves(profile))


def _write_comparison(comparison: Any, path: Path) -> None:
    from lens.show.curves import comparison_curves

    _write(path, comparison.to_frame(), lambda: comparison_curves(comparison))


def _write(path: Path, frame: Any, figure: Callable[[], Any]) -> None:
    with written_whole(path) as partial:
        kind = path.suffix.lower()
        if kind == ".csv":
            frame.to_csv(partial, index=False)
        elif kind == ".json":
            partial.write_text(
                frame.to_json(orient="records", indent=1, double_precision=15), encoding="utf-8"
            )
        elif kind == ".parquet":
            frame.to_parquet(partial, index=False)
        elif kind == ".html":
            partial.write_text(figure().to_html(include_plotlyjs=True), encoding="utf-8")
        else:
            from lens.show.pictures import picture

            partial.write_bytes(picture(figure(), kind.removeprefix(".")))


@contextmanager
def progress_bar() -> Iterator[Callable[[str, Any], None]]:
    """On a terminal: what is measured, how fast, and how long it will take still."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("Measuring", total=None)

        def report(name: str, done: Any) -> None:
            if done is None:
                bar.update(task, description=name)
                return
            left = f"{done.rate:,.0f} positions a second, {_time(done.seconds_left)} left"
            bar.update(task, description=f"{name}: {left}", completed=done.done, total=done.total)

        yield report


def _time(seconds: float) -> str:
    if seconds == float("inf"):
        return "unknown time"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"


def _profile_table(profile: Any) -> Any:
    frame = profile.to_frame()
    columns = {
        "layer": ("layer", "{:.0f}"),
        "mean_kl_bits": ("KL bits", "{:.3f}"),
        "kl_bits_low_95": ("95 % from", "{:.3f}"),
        "kl_bits_high_95": ("to", "{:.3f}"),
        "median_kl_bits": ("median", "{:.3f}"),
        "skill": ("skill", "{:+.3f}"),
        "usefulness_bits": ("X bits", "{:+.3f}"),
        "mean_agreement": ("top-1 agrees", "{:.3f}"),
        "mean_self_copy_mass": ("self-copy", "{:.3f}"),
        "ece": ("ECE", "{:.3f}"),
    }
    return _table(frame, {k: v for k, v in columns.items() if k in frame.columns})


def _comparison_table(comparison: Any) -> Any:
    frame = comparison.to_frame()
    columns = {"depth": ("depth", "{:.2f}")}
    for name in frame.columns[1:]:
        if "band" not in name:
            columns[name] = (name.replace("_", " "), "{:+.3f}")
    return _table(frame, columns)


def _table(frame: Any, columns: dict[str, tuple[str, str]]) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading, _ in columns.values():
        table.add_column(Text(heading), justify="right", no_wrap=True)
    for row in frame.to_dict("records"):
        table.add_row(*(Text(form.format(row[name])) for name, (_, form) in columns.items()))
    return table


def _headline(profile: Any) -> str:
    lines = [repr(profile)]
    if profile.n_readable > 1:
        found = profile.skill_area_interval()
        lines.append(
            f"Skill area over layers 1 to {profile.n_layers}: {found.estimate[0]:.3f} "
            f"[{found.low[0]:.3f}, {found.high[0]:.3f}], 95 % over {found.n_documents} documents"
        )
    lines.append(f"Mean prediction depth: {profile.mean_depth():.2f} of the layers")
    return "\n".join(lines)
