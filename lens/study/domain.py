"""Finished twins read on a text of another kind: what holds on novels may not hold elsewhere.

Translators are those of the study, fitted on its training documents; only what is measured is
another text, cut into runs of paragraphs, in the twins' own tokens.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lens.checkpoint.load import load
from lens.checkpoint.plain_torch import in_plain_torch
from lens.corpus import Corpus, read_corpus
from lens.errors import SelectionError
from lens.study.arms import PAIR, arm_of
from lens.study.held_out import held_out_loss_bits, ngram_losses
from lens.study.measured import (
    SAMPLE_POSITIONS,
    TUNING_RATE,
    TUNING_STEPS,
    finished_run,
    measure_checkpoint,
    write_json,
)
from lens.study.recipe import Recipe, recipe_of
from lens.study.run import branch_folder, read_formatted
from lens.study.texts import StudyTexts, study_texts

FORMAT = "lens-study-domain-1"
DOMAIN_DOCUMENTS = 64
DOMAIN_SEEDS = 3
MEASURING: dict[str, Any] = {
    "tuning_steps": TUNING_STEPS,
    "tuning_rate": TUNING_RATE,
    "sample_positions": SAMPLE_POSITIONS,
}
"""As the rows of the study are measured."""


def measure_domain(
    folder: str | Path, texts: StudyTexts, other: Corpus, *, domain: str, **measuring: Any
) -> dict[str, Any]:
    """The last branch of a finished run on all of `other`, as a row that `effect` can read.

    `domain` names the text; `measuring` replaces options in MEASURING. Raises ResultFileError
    where the run is not finished or belongs to other texts.
    """
    place = Path(folder)
    run = finished_run(place, texts)
    recipe = recipe_of(run)
    model = load(branch_folder(place, recipe.branch_at[-1]))
    options = MEASURING | measuring
    window = recipe.window_tokens
    found = measure_checkpoint(model, texts.train.in_runs(), other, window_tokens=window, **options)
    elsewhere = replace(texts, held_out=other)
    loss = held_out_loss_bits(model.model, elsewhere, window_tokens=window)
    return {
        "format": FORMAT,
        **run,
        "domain": {"name": domain, "text": other.name, "documents": len(other)},
        "options": options | {"measured_on": other.hash},
        "branches": [{"at": recipe.branch_at[-1], "loss_bits": loss} | found],
    }


@in_plain_torch
def reproduce_domain(
    corpus: Any,
    other: Any,
    folder: str | Path,
    results: str | Path,
    *,
    domain: str,
    arms: Sequence[str] = PAIR,
    seeds: int = DOMAIN_SEEDS,
    documents: int = DOMAIN_DOCUMENTS,
    recipe: Recipe | None = None,
    measuring: dict[str, Any] | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[Path]:
    """Measure finished runs of the study on `other`, a corpus they were not made for.

    `corpus` is the study's own, and `folder` holds its runs as `lens.reproduce_study` left them.
    `other` is cut into runs of paragraphs, and `documents` of them are taken, spread evenly. Each
    row is written at once as RESULTS/domain-NAME-ARM-N.json, NAME being `domain`; what is there is
    not measured again. A row also holds the n-grams of the gate on the same tokens. `recipe` is
    that of the runs, `seeds` how many of each arm, `measuring` as in `lens.reproduce_study`.

    Raises SelectionError for an arm that is not there or a name that a file cannot have,
    CorpusError, ResultFileError where a run has not finished.
    """
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", domain):
        raise SelectionError(f"A domain is named in small letters and digits, not {domain!r}.")
    targets = {
        (arm_of(arm).name, seed): Path(results) / f"domain-{domain}-{arm}-{seed}.json"
        for seed in range(seeds)
        for arm in arms
    }
    missing = {run: target for run, target in targets.items() if not target.is_file()}
    if not missing:
        return []
    recipe = recipe or Recipe()
    texts = study_texts(corpus, d_vocab=recipe.d_vocab)
    taken = read_corpus(other).in_runs().take(documents)
    grams = asdict(ngram_losses(replace(texts, held_out=taken), window_tokens=recipe.window_tokens))
    written = []
    for (arm, seed), target in missing.items():
        place = Path(folder) / f"{arm}-seed-{seed}"
        row = measure_domain(place, texts, taken, domain=domain, **(measuring or {}))
        written.append(write_json(row | {"ngram_bits": grams}, target))
        if progress is not None:
            progress(f"{arm}, seed {seed}: measured on {domain}")
    return written


def read_domains(results: str | Path) -> dict[str, list[dict[str, Any]]]:
    """What was written, by domain, then by arm and seed. Raises ResultFileError."""
    rows = read_formatted(Path(results).glob("domain-*.json"), FORMAT)
    found: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda r: (r["domain"]["name"], r["arm"]["name"], r["seed"])):
        found.setdefault(row["domain"]["name"], []).append(row)
    return found
