"""The commands on ties: what one saves, and what it is made of."""

from pathlib import Path
from typing import Annotated

from typer import BadParameter, Option

from lens import cli_options as options

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
