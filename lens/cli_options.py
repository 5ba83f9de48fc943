"""The options of the commands: each declared once, with its help text."""

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

Model = Annotated[
    str,
    Argument(metavar="MODEL", help="A hub id, a folder, a .gguf file, or demo (needs no hub)."),
]
Revision = Annotated[str | None, Option(metavar="NAME", help="Branch, tag or commit of a hub id.")]
Device = Annotated[str | None, Option(metavar="NAME", help="cpu, cuda, cuda:1.")]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    Option(help="Dtype of the weights; left out, the checkpoint's own."),
]
NoCache = Annotated[bool, Option("--no-cache", help="Convert a GGUF file anew and keep nothing.")]
Trust = Annotated[
    bool, Option("--trust-remote-code", help="Run model code that comes with the files.")
]
Debug = Annotated[bool, Option("--debug", help="Show the traceback of an error.")]

Folder = Annotated[Path, Option("-o", "--output", metavar="DIR", help="Folder for the heatmap.")]

Text = Annotated[
    str | None,
    Argument(
        metavar="TEXT",
        help="The prompt; @FILE reads a file, @@ is a literal @, - reads standard input, "
        "-- ends the options. One final newline of a file or of standard input is dropped.",
    ),
]
Output = Annotated[
    Path | None,
    Option(
        "-o",
        "--output",
        metavar="FILE",
        help="Write .html, .csv, .json, .parquet, .png, .svg or .pdf; left out, print a table.",
    ),
]
TopK = Annotated[int, Option(min=1, help="Candidates for each cell.")]
Layers = Annotated[
    str | None,
    Option(
        metavar="N,N,...",
        help="Layers to read; 0 is the embedding, -1 the last, 3.5 lies within block 3.",
    ),
]
Points = Annotated[
    Literal["post", "mid", "all"],
    Option(help="Read the states after blocks, between their attention and MLP, or both."),
]
Positions = Annotated[
    str | None,
    Option(
        metavar="N,N,...",
        help="Positions to read, -1 the last. Left out: all for a file, the last for a table.",
    ),
]
Readout = Annotated[
    Literal["output", "input"],
    Option(help="Read through the unembedding W_U, or through the embedding W_E."),
]
Target = Annotated[
    list[str] | None,
    Option(
        metavar="NAME=TOKEN",
        help='A token whose probability each layer reports, as in right=" Paris"; '
        "one name given several times is a set.",
    ),
]
ColourOf = Annotated[
    Literal["probability", "entropy", "kl", "rank"],
    Option("--colour", help="What the colour of a heatmap's cell says."),
]
Ids = Annotated[str | None, Option(metavar="N,N,...", help="Token ids instead of TEXT.")]
Messages = Annotated[
    Path | None,
    Option(
        metavar="FILE",
        help='A JSON list of {"role": ..., "content": ...} instead of TEXT, '
        "through the model's chat template.",
    ),
]
Source = Annotated[
    str | None,
    Option(metavar="TEXT", help="What the encoder of an encoder-decoder reads."),
]
Truncate = Annotated[
    bool, Option("--truncate", help="Cut a prompt that is longer than the context.")
]
