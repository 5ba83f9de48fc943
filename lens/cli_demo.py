"""`lens demo`: two models that differ in the tie alone, side by side, without any download."""

from pathlib import Path

from lens import cli_options as options
from lens.cli_files import made, require_folder

TWINS = {"tied": "tied-twin", "untied": "untied-twin"}
PROMPTS = (
    "Mr. Darcy had been at first",
    "She was very much pleased with the",
    "It is a truth universally acknowledged, that a",
)
DOCUMENTS = 12
"""Held-out documents of the sample that the report is measured on."""


def demo(output: options.Folder = Path("lens-demo"), debug: options.Debug = False) -> None:
    """Read a prompt with two models that come with lens, and report how far each lens goes.

    The twins began as one function and saw the same text; one kept a single matrix for lookup and
    unembedding, the other did not. Writes a heatmap of each and a report that compares them.
    """
    from lens import load
    from lens.cli_tables import emit, predictions_table, working

    require_folder(output)
    with working("Loading"):
        models = {name: load(twin) for name, twin in TWINS.items()}
    with made(output):
        for name, model in models.items():
            emit(f"{model!r}\n\nlens run {TWINS[name]} {PROMPTS[0]!r}")
            predictions = model.logit_lens(PROMPTS[0])
            last = len(predictions.input_ids) - 1
            emit(predictions_table(predictions.select(positions=[last])))
            predictions.save(output / f"{name}.html")
        with working("Measuring both lenses on held-out chapters"):
            written = _report(models, output / "report.html")
    emit(f"{written}\n")
    for name in models:
        emit(f"Heatmap, {name}: {(output / f'{name}.html').resolve()}")
    emit(f"Report of both: {(output / 'report.html').resolve()}")


def _report(models: dict, path: Path) -> str:
    from lens.corpus import read_corpus
    from lens.study.texts import split_by_source
    from lens.trust.report import report

    # The sample's chapters are those of the novels that the twins were trained on, in order.
    train, held_out = split_by_source(read_corpus("sample"))
    return str(
        report(
            models,
            held_out.take(DOCUMENTS),
            path,
            fit_on=train.take(DOCUMENTS),
            prompts=PROMPTS,
            sample_positions=256,
            repeat="lens demo",
        )
    )
