"""A finished run, measured: one JSON row that every table and figure of the study reads."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lens.checkpoint.load import load
from lens.corpus import Corpus
from lens.errors import ResultFileError
from lens.measuring.adam_paths import AdamSettings
from lens.measuring.geometry import MEASURES, geometry
from lens.measuring.gradients import gradients
from lens.measuring.measure import measure
from lens.measuring.profile import LensProfile
from lens.study.held_out import held_out_loss_bits
from lens.study.recipe import Recipe, recipe_of
from lens.study.run import LOG, RUN, branch_folder, is_finished, read_formatted, replace_text
from lens.study.texts import StudyTexts
from lens.study.translators import best_affine
from lens.study.written import written_by

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint

FORMAT = "lens-study-1"
TRANSLATOR_DOCUMENTS = 48
"""Training documents (runs of paragraphs) that the translators are fitted on."""

GUESS_DOCUMENTS = 24
"""Training documents for the context-free guess that skill is against."""

EARLY_DOCUMENTS, LAST_DOCUMENTS = 24, 200
"""Held-out documents that an early branch and the last are measured on."""


TUNING_STEPS, TUNING_RATE = 200, 1e-2
"""Of the fit by KL of a translator."""

SAMPLE_POSITIONS = 2048


def measure_run(
    folder: str | Path,
    texts: StudyTexts,
    *,
    tuning_steps: int = TUNING_STEPS,
    tuning_rate: float = TUNING_RATE,
    sample_positions: int = SAMPLE_POSITIONS,
    gradient_targets: int = 8192,
    last_documents: int = LAST_DOCUMENTS,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Measure each branch of a finished run; branches measured before are kept beside them.

    The last branch is measured on `last_documents` held-out documents, others on fewer.
    Raises ResultFileError where the run is not finished, or belongs to other texts.
    """
    place = Path(folder)
    run = finished_run(place, texts)
    recipe = recipe_of(run)
    fit = texts.train.in_runs()
    options = {
        "tuning_steps": tuning_steps,
        "tuning_rate": tuning_rate,
        "sample_positions": sample_positions,
        "gradient_targets": gradient_targets,
    }
    counts = {"fit": TRANSLATOR_DOCUMENTS, "guess": GUESS_DOCUMENTS}
    counts |= {"early": EARLY_DOCUMENTS, "last": last_documents}
    made_with = options | {"documents": counts}
    branches = []
    for at in recipe.branch_at:
        path = branch_folder(place, at) / "measured.json"
        row: dict[str, Any] = _kept(path, made_with) or {}
        if not row or any(name not in row for name in BESIDE):
            last = at == recipe.branch_at[-1]
            documents = texts.held_out.take(last_documents if last else EARLY_DOCUMENTS)
            model = load(branch_folder(place, at))
            given = Given(model, texts, documents, recipe, gradient_targets)
            if not row:
                row = {"at": at, "tokens": (at + recipe.branch_steps) * recipe.tokens_per_step}
                row |= measure_checkpoint(
                    model,
                    fit,
                    documents,
                    window_tokens=recipe.window_tokens,
                    tuning_steps=tuning_steps,
                    tuning_rate=tuning_rate,
                    sample_positions=sample_positions,
                )
            for name, of in BESIDE.items():
                # What a later version measures besides is added to a row that is there.
                if name not in row:
                    row[name] = of(given)
            text = json.dumps(row | {"options": made_with})
            replace_text(path, text)
        branches.append(row)
        if progress is not None:
            progress(f"{run['arm']['name']}, seed {run['seed']}: branch at {at} measured")
    return {"format": FORMAT, **run, "options": made_with, "branches": branches} | _log_of(place)


def measure_checkpoint(
    model: "Checkpoint",
    fit: Corpus,
    held_out: Corpus,
    *,
    window_tokens: int,
    tuning_steps: int,
    tuning_rate: float,
    sample_positions: int,
) -> dict[str, Any]:
    """Reading loss, what is not there yet, usefulness and the rest, by layer, on held-out texts.

    Translators are fitted on `fit`; every number is of `held_out`. Bits a token.
    """
    translator, by_kl = best_affine(
        model,
        fit.take(TRANSLATOR_DOCUMENTS),
        steps=tuning_steps,
        learning_rate=tuning_rate,
        window_tokens=window_tokens,
    )
    profile = measure(
        model,
        held_out,
        fit_on=fit.take(GUESS_DOCUMENTS),
        window_tokens=window_tokens,
        sample_positions=sample_positions,
    )
    affine = measure(model, held_out, lens=translator, window_tokens=window_tokens)
    row = _of_profile(profile) | {
        "not_there_yet": numbers(affine.mean("kl_bits")),
        "reading_loss": numbers(profile.mean("kl_bits") - affine.mean("kl_bits")),
        "affine_nll": numbers(affine.mean("nll_bits")),
        "translator_by_kl": numbers(by_kl),
    }
    if model.tie.verdict not in ("shared parameter", "shared storage"):
        through = measure(model, held_out, lens="input", window_tokens=window_tokens)
        row["input_lens_kl"] = numbers(through.mean("kl_bits"))
    return row


@dataclass(frozen=True)
class Given:
    """What a part of a row is measured on; `gradient_targets` targets at most for gradients."""

    model: "Checkpoint"
    texts: StudyTexts
    documents: Corpus
    recipe: Recipe
    gradient_targets: int


def _loss(given: Given) -> float:
    """Bits a token over all held-out documents, as the n-grams of the gate are scored."""
    return held_out_loss_bits(
        given.model.model, given.texts, window_tokens=given.recipe.window_tokens
    )


def _paths(given: Given) -> dict[str, Any]:
    """What comes to the matrices by the output, of the gradient and of the twins' Adam step."""
    found = gradients(
        given.model,
        given.documents,
        window_tokens=given.recipe.window_tokens,
        max_targets=given.gradient_targets,
        batch_size=16,
        adam=AdamSettings(beta_1=given.recipe.beta1, beta_2=given.recipe.beta2),
    )
    return {
        "output_share": found.output_share,
        "additive_share": found.additive_share,
        "cosine": found.cosine,
        "output_share_by_decile": numbers(found.group_output_share[:10]),
        "adam_output_share": found.adam.output_share,
        "adam_additive_share": found.adam.additive_share,
        "adam_output_share_by_decile": numbers(found.adam.group_output_share[:10]),
    }


def _shape(given: Given) -> dict[str, Any]:
    """E against U, as they are and centred."""
    shape = geometry(given.model)
    values = {name: numbers(shape.values[i]) for i, name in enumerate(MEASURES)}
    return values | {"copy score": shape.copy_score}


def _written(given: Given) -> dict[str, float]:
    return written_by(given.model, given.documents, window_tokens=given.recipe.window_tokens)


BESIDE: dict[str, Callable[[Given], Any]] = {
    "loss_bits": _loss,
    "gradients": _paths,
    "geometry": _shape,
    "written": _written,
}
"""Parts of a row that do not depend on a lens, by name."""


def _of_profile(profile: LensProfile) -> dict[str, Any]:
    calibration = profile.calibration
    return {
        "held_out_bits": float(profile.mean("nll_bits")[-1]),
        "n_positions": profile.n_positions,
        "n_documents": len(profile.documents),
        "tie": profile.provenance.reading.tie,
        "kl": numbers(profile.mean("kl_bits")),
        "median_kl": numbers(profile.median_kl_bits),
        "usefulness": numbers(profile.usefulness_bits),
        "entropy": numbers(profile.mean("entropy_bits")),
        "agreement": numbers(profile.mean("agreement")),
        "copy_rate": numbers(profile.mean("copies")),
        "copy_mass": numbers(profile.mean("self_copy_mass")),
        "copy_bits": numbers(profile.mean("copy_bits")),
        "rest_bits": numbers(profile.mean("rest_bits")),
        "skill": numbers(profile.skill),
        "skill_area": profile.skill_area,
        "marginal_bias": numbers(profile.marginal_bias_bits),
        "temperature": numbers(profile.best_temperature),
        "ece": numbers(calibration.ece),
        "mean_depth": profile.mean_depth(),
    }


def read_rows(folder: str | Path) -> list[dict[str, Any]]:
    """The rows that were written into a folder, by arm and seed. Raises ResultFileError."""
    rows = read_formatted(Path(folder).glob("*-seed-*.json"), FORMAT)
    return sorted(rows, key=lambda row: (row["arm"]["name"], row["seed"]))


def write_row(row: dict[str, Any], folder: str | Path) -> Path:
    """One measured run as ARM-seed-N.json; a number in it is rounded to six digits."""
    return write_json(row, Path(folder) / f"{row['arm']['name']}-seed-{row['seed']}.json")


def write_json(row: dict[str, Any], path: Path) -> Path:
    """A row as one line of JSON, its numbers rounded to six digits; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(rounded(row), separators=(",", ":")) + "\n")
    return path


def rounded(value: Any) -> Any:
    """The same, each float in it to six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, list | tuple) else value


def finished_run(place: Path, texts: StudyTexts) -> dict[str, Any]:
    """What a folder's run is. Raises ResultFileError: it is not finished, or of other texts."""
    if not is_finished(place):
        raise ResultFileError(f"{place} holds no finished run. Train it to its end first.")
    run = json.loads((place / RUN).read_text("utf-8"))
    if run["texts"] != texts.hash:
        raise ResultFileError(
            f"{place} was trained on other texts ({run['texts']}) than these ({texts.hash})."
        )
    return run


def _kept(path: Path, options: dict[str, Any]) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    row = json.loads(path.read_text("utf-8"))
    return row if row.pop("options", None) == options else None


def _log_of(place: Path) -> dict[str, Any]:
    """The training loss every tenth step, in bits, and the realised updates."""
    log = json.loads((place / LOG).read_text("utf-8"))
    return {
        "training_bits": [
            [name, step, loss / float(np.log(2))]
            for name, step, loss in log["loss_nats"]
            if step % 10 == 0
        ],
        "updates": log["updates"],
    }


def numbers(values: Any) -> list[float]:
    """An array as floats of Python."""
    return [float(v) for v in np.asarray(values, dtype=np.float64)]
