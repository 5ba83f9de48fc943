"""Train matched twins, and run the study that they are made for, row by row."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lens.checkpoint.plain_torch import in_plain_torch
from lens.errors import SelectionError
from lens.measuring.kept_folder import make_folder
from lens.study.arms import ARMS, CORE, PAIR, arm_of
from lens.study.drift import write_matrices
from lens.study.gap import GAP_SEEDS, write_gap
from lens.study.held_out import held_out_windows, ngram_losses
from lens.study.measured import measure_run, write_row
from lens.study.recipe import Recipe
from lens.study.run import Progress, replace_text, told, train
from lens.study.texts import StudyTexts, study_texts

CORE_SEEDS = 8
GATE = "gate.json"
OTHER_SEEDS = 3
"""Seeds of an arm that no claim is tested on: it is described, without p-values."""


@in_plain_torch
def train_twin(
    arm: str,
    folder: str | Path,
    corpus: Any = "sample",
    *,
    seed: int = 0,
    recipe: Recipe | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Path:
    """Train one arm of the study on a corpus; the folder gets a checkpoint for each branch.

    `corpus` is what `lens.read_corpus` takes; a quarter of its documents is held out. A run that
    was stopped goes on, and ends with the same bits. The last branch is the finished twin:
    `lens.load(folder / "branch-00900")` by the standard recipe.

    Raises SelectionError for an arm that is not there, CorpusError, ProvenanceError where the
    folder holds another run, TrainingDivergedError.

    >>> lens.train_twin("untied-copy", "twins/untied-copy-seed-0", "novels.jsonl")  # doctest: +SKIP
    """
    recipe = recipe or Recipe()
    texts = study_texts(corpus, d_vocab=recipe.d_vocab)
    return train(arm_of(arm), seed, texts, recipe, folder, progress=progress)


def study_rows() -> Iterator[tuple[str, int]]:
    """(arm, seed) of every run of the study, those that a claim is tested on first."""
    core = [arm.name for arm in CORE]
    for seed in range(CORE_SEEDS):
        yield from ((arm, seed) for arm in core)
    for seed in range(OTHER_SEEDS):
        yield from ((arm, seed) for arm in ARMS if arm not in core)


@in_plain_torch
def reproduce_study(
    corpus: Any,
    folder: str | Path,
    results: str | Path,
    *,
    rows: list[str] | None = None,
    recipe: Recipe | None = None,
    measuring: Mapping[str, int | float] | None = None,
    keep: bool = False,
    progress: Callable[[str], None] | None = None,
) -> list[Path]:
    """Train and measure runs of the study; each that is finished is written at once.

    `rows` are names of arms, or "ARM-seed-N"; None is the whole study. Runs lie in `folder` and go
    on where they stopped; rows that `results` holds already are measured again only when named.
    `recipe` are sizes, schedule and rates, the study's own where None. `measuring` replaces options
    of `lens.study.measured.measure_run`. Without `keep`, the checkpoints of a measured run but the
    last branch's are removed.

    Raises SelectionError for a row that is not there, CorpusError, ProvenanceError where a folder
    holds another run, TrainingDivergedError.
    """
    recipe = recipe or Recipe()
    texts = study_texts(corpus, d_vocab=recipe.d_vocab)
    write_gate(texts, recipe, results)
    written = []
    for arm, seed in _wanted(rows):
        name = f"{arm}-seed-{seed}"
        target = Path(results) / f"{name}.json"
        if rows is None and target.is_file():
            continue
        place = Path(folder) / name
        train(arm_of(arm), seed, texts, recipe, place, progress=told(progress))
        options: dict[str, Any] = dict(measuring or {})
        row = measure_run(place, texts, progress=progress, **options)
        write_matrices(folder, results, seed)
        if arm in PAIR and seed < GAP_SEEDS:
            write_gap(place, results, texts)
        # Last: a row that is there has all that belongs to it, and is not measured again.
        written.append(write_row(row, results))
        if not keep:
            _remove_early(place)
    return written


def write_gate(texts: StudyTexts, recipe: Recipe, folder: str | Path) -> Path:
    """What a twin's held-out loss must beat: n-gram models on the same tokens, as gate.json.

    Beside it, how many tokens are scored and the bytes of their texts: bits a token times the one
    over the other are bits a byte, which compare across vocabularies.
    """
    losses = ngram_losses(texts, window_tokens=recipe.window_tokens)
    windows = held_out_windows(texts, recipe.window_tokens)
    gate = {
        "texts": texts.hash,
        "training_tokens": len(texts.stream),
        "training_documents": len(texts.train),
        "held_out_documents": len(texts.held_out),
        "held_out_targets": sum(len(w) - 1 for w in windows),
        "held_out_bytes": sum(d.n_bytes for d in texts.held_out.documents),
        "sources": len(texts.train.sources),
        "bits": asdict(losses),
    }
    place = Path(folder)
    make_folder(place)
    text = json.dumps(gate, indent=1) + "\n"
    replace_text(place / GATE, text)
    return place / GATE


def _wanted(rows: list[str] | None) -> list[tuple[str, int]]:
    every = list(study_rows())
    if rows is None:
        return every
    found = []
    for row in rows:
        chosen = [(a, s) for a, s in every if row in (a, f"{a}-seed-{s}")]
        if not chosen:
            raise SelectionError(
                f"The study has no row {row!r}; a row is an arm ({', '.join(ARMS)}) or ARM-seed-N."
            )
        found += chosen
    return found


def _remove_early(place: Path) -> None:
    """The weights of all branches but the last; what was measured of them stays."""
    *early, _ = sorted(p for p in place.glob("branch-*") if p.is_dir())
    for branch in early:
        for path in branch.iterdir():
            if path.name != "measured.json":
                path.unlink()
