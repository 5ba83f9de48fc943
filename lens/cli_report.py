"""The command `lens report`: how far the lens can be trusted, on one page."""

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from lens import cli_options as options
from lens.cli_measure import (
    Corpus,
    Folder,
    MaxDocuments,
    TextColumn,
    WindowTokens,
    loaded,
    names_of,
    progress_bar,
    require_kept,
)

Second = Annotated[
    str | None, Argument(metavar="MODEL2", help="A checkpoint to compare with the first.")
]
Page = Annotated[Path, Option("-o", "--output", metavar="FILE", help="The page to write, .html.")]
Prompt = Annotated[
    list[str] | None,
    Option(
        "--prompt",
        metavar="TEXT",
        help="A prompt to draw, several times for several; left out, the beginnings of three "
        "documents.",
    ),
]
TranslatorOf = Annotated[
    Literal["ridge", "tuned", "none"],
    Option(help="What tells reading loss from what is not there yet: ridge is quick."),
]
TuneSteps = Annotated[
    int, Option(min=1, help="Steps of the tuned translator, at most; each layer keeps its best.")
]
Sampled = Annotated[
    int,
    Option(
        "--second-pass",
        min=0,
        max=4096,
        help="Positions to read again for copy split, temperature and marginal bias.",
    ),
]

Decomposed = Annotated[
    int,
    Option(
        "--decompose",
        min=0,
        help="Positions to take the distance apart on, as lens.decompose does; 0 leaves it out.",
    ),
]


def report(
    model: options.Model,
    second: Second = None,
    corpus: Corpus = "sample",
    output: Page = Path("report.html"),
    max_documents: MaxDocuments = None,
    text_column: TextColumn = "text",
    window_tokens: WindowTokens = None,
    prompt: Prompt = None,
    translator: TranslatorOf = "ridge",
    tune_steps: TuneSteps = 200,
    second_pass: Sampled = 1024,
    decompose: Decomposed = 0,
    folder: Folder = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    debug: options.Debug = False,
) -> None:
    """Write one page on how far the lens of a checkpoint, or of two, can be trusted.

    The verdict comes first: from which layer on, for what, and why not before. A fifth of the
    documents, of whole sources, is kept back to fit the context-free guess and the translator.
    """
    from lens.cli_tables import emit
    from lens.corpus import read_corpus
    from lens.trust.report import report as write
    from lens.trust.report import require_page

    require_page(output)
    require_kept(folder)
    texts = read_corpus(corpus, text_column=text_column, max_documents=max_documents)
    sources = [model] if second is None else [model, second]
    names = names_of(model, second) if second is not None else (Path(model).name or model,)
    models = {
        name: loaded(source, device=device, dtype=dtype)
        for name, source in zip(names, sources, strict=True)
    }
    with progress_bar() as tell:
        written = write(
            models,
            texts,
            output,
            prompts=prompt or None,
            translator=translator,
            tune_steps=tune_steps,
            sample_positions=second_pass,
            gap_positions=decompose,
            window_tokens=window_tokens,
            folder=folder,
            repeat=_command(
                sources,
                corpus=corpus,
                max_documents=max_documents,
                text_column=None if text_column == "text" else text_column,
                window_tokens=window_tokens,
                translator=translator,
                tune_steps=tune_steps if translator == "tuned" else None,
                second_pass=second_pass,
                decompose=decompose or None,
                dtype=dtype,
                prompt=prompt,
                output=output.name,
            ),
            progress=tell,
        )
    emit(str(written))
    emit(f"Wrote {output}")


def _command(models: list[str], **given: Any) -> str:
    """The command that repeats this one."""
    words = ["lens", "report", *models]
    for name, value in given.items():
        for one in value if isinstance(value, list) else [value]:
            if one is not None:
                words += [f"--{name.replace('_', '-')}", str(one)]
    return shlex.join(words)
