"""The `lens` command: exit code 0 is good, 1 a failed check or an error, 2 a wrong call."""

import logging
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from lens import __version__, cli_demo, cli_measure, cli_report, cli_tie, cli_tune
from lens import cli_options as options
from lens.cli_errors import Command, exit_code
from lens.cli_text import (
    layers_from,
    messages_from,
    numbers_from,
    prompt_from,
    sets_from,
    text_from,
)
from lens.cli_twins import twins

app = typer.Typer(
    name="lens",
    help="Read what a language model predicts at each of its layers.",
    epilog="Exit codes: 0 good, 1 an error or a failed check, 2 a wrong call.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command with these arguments (the process's own where None); gives the exit code."""
    return exit_code(lambda: app(arguments, prog_name="lens"))


def _version(asked: bool) -> bool:
    if asked:
        typer.echo(f"lens {__version__}")
        raise typer.Exit
    return asked


@app.callback()
def _lens(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


app.command(cls=Command, short_help="Try it: two twins, one tied, read and compared.")(
    cli_demo.demo
)


@app.command(cls=Command, short_help="Sizes, tie and readout of a checkpoint.")
def inspect(
    model: options.Model,
    revision: options.Revision = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    no_cache: options.NoCache = False,
    trust_remote_code: options.Trust = False,
    debug: options.Debug = False,
) -> None:
    """Tell a checkpoint's sizes, whether it is tied, and how its readout was proved."""
    from lens.cli_tables import emit, summary_table

    checkpoint = _load(
        model,
        revision=revision,
        device=device,
        dtype=dtype,
        cache=not no_cache,
        trust_remote_code=trust_remote_code,
    )
    emit(summary_table(checkpoint.summary().rows()))


@app.command(cls=Command, short_help="Read one prompt: a table, a heatmap or a file.")
def run(
    model: options.Model,
    text: options.Text = None,
    output: options.Output = None,
    top_k: options.TopK = 5,
    layers: options.Layers = None,
    points: options.Points = "post",
    positions: options.Positions = None,
    readout: options.Readout = "output",
    target: options.Target = None,
    colour: options.ColourOf = "probability",
    ids: options.Ids = None,
    messages: options.Messages = None,
    source: options.Source = None,
    truncate: options.Truncate = False,
    revision: options.Revision = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    no_cache: options.NoCache = False,
    trust_remote_code: options.Trust = False,
    debug: options.Debug = False,
) -> None:
    """Read one prompt with the logit lens: a table, or a heatmap or data file with -o."""
    prompt = prompt_from(text, ids, messages, source=source)
    asked = numbers_from(positions, "--positions")
    reading: dict[str, Any] = {
        "messages": messages_from(messages),
        "layers": layers_from(layers, "--layers"),
        "points": points,
        "positions": [-1] if asked is None and output is None else asked,
        "source": text_from(source, "--source"),
        "targets": sets_from(target),
        "top_k": top_k,
        "lens": readout,
        "truncate": truncate,
    }
    if output is not None:
        from lens.cli_files import require_picture
        from lens.show.export import require_exportable

        require_exportable(output)
        require_picture(output)
    checkpoint = _load(
        model,
        revision=revision,
        device=device,
        dtype=dtype,
        cache=not no_cache,
        trust_remote_code=trust_remote_code,
    )
    _read(checkpoint, prompt, reading, output=output, colour=colour)


app.command(cls=Command, short_help="A lens over a corpus: quality by layer.")(cli_measure.measure)
app.command(cls=Command, short_help="Two checkpoints' lenses over the same documents.")(
    cli_measure.compare
)
app.command(cls=Command, short_help="One page: how far the lens can be trusted.")(cli_report.report)

cli_tie.register(app)
cli_tune.register(app)
app.add_typer(twins, short_help="Matched twins: train them, rerun the study.")


def _read(
    checkpoint: Any, prompt: Any, reading: dict[str, Any], *, output: Path | None, colour: str
) -> None:
    """Read the prompt; print a table, or write the file and say so."""
    from lens.cli_tables import emit, predictions_table, working

    with working("Reading the prompt"):
        predictions = checkpoint.logit_lens(prompt, **reading)
    if output is None:
        emit(predictions_table(predictions))
    else:
        from lens.show.export import export

        with working(f"Writing {output.name}"):
            export(predictions, output, colour=colour)
        emit(f"Wrote {output}")
    if reading["lens"] == "output":
        from lens.measuring.known_profile import known_profile

        if (known := known_profile(checkpoint)) is not None:
            emit(str(known))


def _load(model: str, **how: Any) -> Any:
    """The checkpoint; the libraries keep quiet, because lens says itself what goes wrong."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # transformers imports torchao where it is installed, and both report on their kernels.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    from lens.cli_tables import working

    with working(f"Loading {model}"):
        import transformers

        import lens

        transformers.utils.logging.disable_progress_bar()
        return lens.load(model, **how)
