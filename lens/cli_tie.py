"""The commands on ties: what one saves, and what it is made of."""

from pathlib import Path
from typing import Annotated, Any, Literal

from typer import BadParameter, Option, Typer

from lens import cli_options as options
from lens.cli_errors import Command

Vocab = Annotated[int | None, Option("--vocab", min=1, help="Rows of the embedding.")]
Width = Annotated[int | None, Option("--d-model", min=1, help="Width of the residual state.")]
Blocks = Annotated[int | None, Option("--layers", min=1, help="Number of blocks.")]
Context = Annotated[int, Option(min=0, help="Learned positions, 0 for none.")]
MlpWidth = Annotated[
    int | None, Option("--d-mlp", min=1, help="Width of an MLP; left out, four times d-model.")
]
Bytes = Annotated[float, Option("--bytes", min=0.1, help="Bytes per parameter: 4, 2, 1, 0.5.")]
Matrices = Annotated[
    int, Option(min=2, max=3, help="Matrices that could be one: 3 in an encoder-decoder.")
]
Config = Annotated[
    list[Path] | None,
    Option(metavar="FILE", help="A config.json, or its folder; several make a table."),
]

NewFolder = Annotated[
    Path, Option("-o", "--output", metavar="DIR", help="New folder for the model and tokenizer.")
]
Keep = Annotated[
    Literal["input", "output", "mean"],
    Option(help="Whose values the one matrix has: W_E, W_U or the mean of both."),
]
Corpus = Annotated[
    str, Option("--corpus", metavar="FILE", help="Text as in lens measure; sample comes with lens.")
]
Targets = Annotated[int, Option(min=1, help="Stop after this many scored tokens.")]
WindowTokens = Annotated[int | None, Option(min=2, help="Tokens that pass the model together.")]
MaskId = Annotated[
    int | None, Option(min=0, help="Mask token of a masked model; left out, its tokenizer's.")
]
Seed = Annotated[int, Option(min=0, help="Order of the batches.")]
RowSeed = Annotated[int, Option(min=0, help="Which rows are looked up, and how they are permuted.")]
WindowSeed = Annotated[int, Option(min=0, help="Which windows are scored.")]


def register(app: Typer) -> None:
    """Give the commands of this module to the application."""
    for command, short_help in (
        (plan, "What tying would save in a model of these sizes."),
        (gradients, "The paths by which the embedding matrices are trained."),
        (geometry, "The embedding against the unembedding, beside chance."),
        (frequency, "Where the frequency of tokens is kept."),
        (attribution, "Who writes a logit, block by block."),
        (surgery_sweep, "Lens and perplexity on the way from untied to tied."),
        (tie, "Save a copy with one matrix for lookup and unembedding."),
        (untie, "Save a copy with a matrix for each, and the same logits."),
    ):
        name = command.__name__.replace("_", "-")
        app.command(name, cls=Command, short_help=short_help)(command)


def plan(
    vocab: Vocab = None,
    d_model: Width = None,
    layers: Blocks = None,
    context: Context = 0,
    d_mlp: MlpWidth = None,
    bytes_per_parameter: Bytes = 4,
    matrices: Matrices = 2,
    config: Config = None,
    debug: options.Debug = False,
) -> None:
    """Tell what tying would save in a model of these sizes, and whether that is much.

    The blocks are counted as GPT-2's; with --config the model of that config is counted.
    """
    from lens.cli_tables import emit, summary_table

    if config:
        from lens.checkpoint.tie_scale import scale_table, table_text

        emit(table_text(scale_table(config)))
        return
    if vocab is None or d_model is None or layers is None:
        raise BadParameter("Give --vocab, --d-model and --layers, or --config.")
    from lens.checkpoint.tie_cost import plan_tie, worth

    cost = plan_tie(
        vocab,
        d_model,
        layers,
        d_mlp=d_mlp,
        n_ctx=context,
        bytes_per_parameter=bytes_per_parameter,
        n_matrices=matrices,
    )
    emit(summary_table([*cost.rows(), ("worth it?", worth(cost)), ("evidence", EVIDENCE)]))


EVIDENCE = (
    "small recurrent models gained from tying, in large transformers the sign depends on size and "
    "recipe; docs/when_to_tie.md has the numbers and their limits"
)


def gradients(
    model: options.Model,
    corpus: Corpus = "sample",
    max_targets: Targets = 8192,
    window_tokens: WindowTokens = None,
    mask_id: MaskId = None,
    seed: Seed = 0,
    device: options.Device = None,
    debug: options.Debug = False,
) -> None:
    """Take the training gradient of the embedding matrices apart by path.

    Norms, shares and angles, in all and for tokens by frequency.
    """
    from lens.cli_tables import emit, summary_table, working
    from lens.measuring.gradients import gradients as measure

    checkpoint = _loaded(model, device=device)
    with working("Measuring the gradients"):
        paths = measure(
            checkpoint,
            corpus,
            max_targets=max_targets,
            window_tokens=window_tokens,
            mask_id=mask_id,
            seed=seed,
        )
    emit(summary_table(paths.rows()))
    emit("")
    emit(summary_table(paths.group_rows_text()))


Sample = Annotated[int, Option(min=2, help="Rows to look up among all, for neighbours and copies.")]
Meaning = Annotated[
    str | None,
    Option(
        "--corpus",
        metavar="FILE",
        help="Also ask whether similar rows get similar probabilities in this text.",
    ),
]


def geometry(
    model: options.Model,
    sample: Sample = 512,
    corpus: Meaning = None,
    seed: RowSeed = 0,
    device: options.Device = None,
    debug: options.Debug = False,
) -> None:
    """Compare the rows and spaces of W_E and W_U; chance is the same with rows permuted."""
    from lens.cli_tables import emit, summary_table, working
    from lens.measuring.geometry import geometry as measure
    from lens.measuring.meaning import similarity_of_meaning

    checkpoint = _loaded(model, device=device)
    with working("Comparing the matrices"):
        rows = measure(checkpoint, sample=sample, seed=seed).rows()
    if corpus is not None:
        with working("Reading the corpus"):
            rows += similarity_of_meaning(checkpoint, corpus, seed=seed).rows()
    emit(summary_table(rows))


MaxPositions = Annotated[int, Option(min=2, help="Positions to score.")]
SomeLayers = Annotated[int, Option("--layers", min=2, help="How many layers to score, evenly.")]


def frequency(
    model: options.Model,
    corpus: Corpus = "sample",
    max_positions: MaxPositions = 512,
    layers: SomeLayers = 5,
    seed: WindowSeed = 0,
    device: options.Device = None,
    debug: options.Debug = False,
) -> None:
    """Tell which bias, direction or row length carries word frequency; zero all but lengths."""
    from lens.cli_tables import emit, summary_table, working
    from lens.measuring.frequency import frequency as measure

    checkpoint = _loaded(model, device=device)
    with working("Counting and reading"):
        found = measure(checkpoint, corpus, max_positions=max_positions, n_layers=layers, seed=seed)
    emit(summary_table(found.rows()))


Token = Annotated[
    str | None, Option(metavar="TOKEN", help="Whose logit; left out, the model's first choice.")
]
Against = Annotated[
    str | None, Option(metavar="TOKEN", help="Take the difference to this token's logit apart.")
]
Position = Annotated[int, Option(help="Where the prediction is made, -1 the last.")]
Neurons = Annotated[int, Option(min=0, help="How many neurons to name.")]


def attribution(
    model: options.Model,
    text: options.Text = None,
    token: Token = None,
    against: Against = None,
    position: Position = -1,
    neurons: Neurons = 5,
    ids: options.Ids = None,
    source: options.Source = None,
    device: options.Device = None,
    debug: options.Debug = False,
) -> None:
    """Take a logit apart into embedding, attentions, MLPs and a constant, which add up to it."""
    from lens.cli_tables import emit, summary_table, working
    from lens.cli_text import prompt_from, text_from
    from lens.measuring.attribution import attribution as measure

    prompt = prompt_from(text, ids, None)
    read = text_from(source, "--source")
    checkpoint = _loaded(model, device=device)
    with working("Taking the logit apart"):
        found = measure(
            checkpoint,
            prompt,
            token=token,
            against=against,
            position=position,
            top_neurons=neurons,
            source=read,
        )
    emit(summary_table(found.rows()))


Alphas = Annotated[
    str, Option(metavar="A,A,...", help="Shares of the way from W_U to W_E, from 0 to 1.")
]
Rotate = Annotated[
    bool, Option("--rotate", help="Go to W_E turned by the rotation that brings it nearest to W_U.")
]


def surgery_sweep(
    model: options.Model,
    corpus: Corpus = "sample",
    alphas: Alphas = "0,0.25,0.5,0.75,1",
    rotate: Rotate = False,
    window_tokens: WindowTokens = None,
    device: options.Device = None,
    debug: options.Debug = False,
) -> None:
    """Move the unembedding of an untied model to its embedding; measure lens and model."""
    from lens.cli_tables import emit, summary_table, working
    from lens.measuring.surgery_sweep import surgery_sweep as sweep

    try:
        numbers = [float(alpha) for alpha in alphas.split(",")]
    except ValueError as error:
        raise BadParameter(f"--alphas is {alphas!r}; expected numbers, as in 0,0.5,1.") from error
    checkpoint = _loaded(model, device=device)
    with working("Measuring the cuts"):
        found = sweep(checkpoint, corpus, numbers, rotate=rotate, window_tokens=window_tokens)
    emit(summary_table(found.rows()))


def untie(
    model: options.Model,
    output: NewFolder,
    device: options.Device = None,
    debug: options.Debug = False,
) -> None:
    """Save a copy in which the unembedding is a matrix of its own, with the same logits."""
    from lens.checkpoint.surgery import untie as cut

    _operate(model, output, cut, device=device)


def tie(
    model: options.Model,
    output: NewFolder,
    keep: Keep = "output",
    device: options.Device = None,
    debug: options.Debug = False,
) -> None:
    """Save a copy in which one matrix serves as lookup and as unembedding."""
    from lens.checkpoint.surgery import tie as join

    _operate(model, output, lambda checkpoint: join(checkpoint, keep=keep), device=device)


def _operate(model: str, output: Path, operation: Any, **how: Any) -> None:
    from lens.checkpoint.surgery import require_new_folder, save_checkpoint
    from lens.cli_tables import emit, summary_table, working

    require_new_folder(output)
    checkpoint = _loaded(model, **how)
    with working("Operating on a copy"):
        result = operation(checkpoint)
        save_checkpoint(result, output)
    emit(summary_table(result.tie.rows()))
    emit(f"Wrote {output}")


def _loaded(model: str, **how: Any) -> Any:
    # Inside, because lens.cli imports this module to register the commands.
    from lens.cli import _load

    return _load(model, **how)
