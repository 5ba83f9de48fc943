"""Continue a real model tied and untied on the same tokens, and measure both on the way."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lens.checkpoint.fingerprint import fingerprint
from lens.checkpoint.inputs import forward_arguments
from lens.checkpoint.plain_torch import in_plain_torch
from lens.checkpoint.untouched import untouched
from lens.corpus import read_corpus
from lens.errors import (
    ResultFileError,
    SelectionError,
    UnsupportedArchitectureError,
    UnsupportedModelStateError,
)
from lens.measuring.kept_folder import make_folder
from lens.measuring.required_readout import required_readout
from lens.measuring.statistics import Interval, bootstrap
from lens.study.continuation import OF_TIED, OF_UNTIED, Continuation, arms_of
from lens.study.continuing import ArmRun, ContinuedTexts, arm_is_finished, point_file
from lens.study.measured import rounded
from lens.study.run import LOG, RUN, Progress, claim, replace_text

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint

FORMAT = "lens-continued-1"
CONTINUED = "continued.json"
LOG_EVERY = 10
PAIRED = {
    "reading loss G": ("reading_loss", "positions"),
    "not there yet R": ("not_there_yet", "positions"),
    "held-out loss": ("loss", "targets"),
}
"""What `paired` compares: a sum by document and what it is divided by."""


@in_plain_torch
def continue_twins(
    model: "Checkpoint",
    corpus: Any,
    folder: str | Path,
    *,
    settings: Continuation | None = None,
    arms: tuple[str, ...] = (),
    progress: Callable[[Progress], None] | None = None,
) -> Path:
    """Continue a loaded model with the tie as it is and changed, and measure both on the way.

    A tied model goes on beside an untied copy (`lens.untie`: equal logits, bit for bit); an untied
    one beside tied ones with the values of W_U, W_E and their mean (`lens.tie`). All see the same
    windows in the same order, with the same optimiser. Each arm that is finished is a folder that
    `lens.load` reads (FOLDER/ARM/model); the file that comes back holds every point: held-out
    loss, KL, G, R and copying by layer, and how far the matrices went. A run that was stopped goes
    on; on a CPU it ends with the same bits. The model that is passed in is not changed.

    Raises CorpusError, ProvenanceError where the folder holds another run, TrainingDivergedError
    where the loss is no number any more, UnsupportedArchitectureError without a direct readout,
    UnsupportedModelStateError for weights that are not float32, SelectionError.

    >>> lens.continue_twins(model, "novels.jsonl", "continued")  # doctest: +SKIP
    """
    settings = settings or Continuation()
    _require_trainable(model)
    chosen = arms_of(tied=model.tie.is_tied, names=arms)
    texts = ContinuedTexts.of(model, read_corpus(corpus), settings)
    place = Path(folder)
    make_folder(place)
    named = {"model": model.origin.model_id, "class": type(model.model).__name__}
    identity = {
        "weights": fingerprint(model.model.parameters()),
        "tie": model.tie.verdict,
        "texts": texts.hash,
        "settings": asdict(settings) | {"measure_at": list(settings.points)},
        "device": model.device.type,
    }
    claim(place / RUN, identity, named)
    for arm in chosen:
        if arm_is_finished(place / arm.name, settings):
            continue
        run = ArmRun(arm, model, texts, settings, place / arm.name, progress)
        if arm.matrices == "untied":
            _require_same_start(run, model)
        run.run()
    return _write(place, texts)


def read_continued(path: str | Path) -> dict[str, Any]:
    """What `continue_twins` wrote. Raises ResultFileError."""
    try:
        row = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ResultFileError(f"{path} cannot be read as JSON: {error}.") from None
    if not isinstance(row, dict) or row.get("format") != FORMAT:
        found = row.get("format") if isinstance(row, dict) else None
        raise ResultFileError(f"{path} has format {found!r}, expected {FORMAT!r}.")
    return row


def paired(row: dict[str, Any], arm: str, less: str, quantity: str, *, at: int) -> Interval:
    """One arm less another after `at` steps, with the interval over the documents both read.

    G and R are means over the layers 1 to L - 1; bits a token. Raises SelectionError.
    """
    if quantity not in PAIRED:
        raise SelectionError(f"There is no {quantity!r}; there are {', '.join(PAIRED)}.")
    name, over = PAIRED[quantity]
    one, other = (_point(row, which, at)["by_document"] for which in (arm, less))
    sums = np.array([one[name], other[name], one[over]]).T

    def difference(totals: np.ndarray) -> np.ndarray:
        return (totals[..., :1] - totals[..., 1:2]) / totals[..., 2:]

    return bootstrap(sums, difference)


def summary(row: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Lines of a table, the heading first: arm, steps, loss, mean G and R, likeness, drift."""
    yield "arm", "steps", "held-out bits", "mean G", "mean R", "row cosine E, U", "moved"
    for arm, held in row["arms"].items():
        for point in held["points"]:
            pair = point["likeness"].get("E, U")
            yield (
                arm,
                f"{point['at']:,}",
                f"{point['held_out_bits']:.4f}",
                f"{np.mean(point['reading_loss'][1:-1]):.4f}",
                f"{np.mean(point['not_there_yet'][1:-1]):.4f}",
                "one matrix" if pair is None else f"{pair['row_cosine']:.5f}",
                ", ".join(f"{name} {value:.4f}" for name, value in point["moved"].items()),
            )


def _point(row: dict[str, Any], arm: str, at: int) -> dict[str, Any]:
    if arm not in row["arms"]:
        raise SelectionError(f"There is no arm {arm!r}; there are {', '.join(row['arms'])}.")
    points = {point["at"]: point for point in row["arms"][arm]["points"]}
    if at not in points:
        raise SelectionError(f"{arm} was not measured after {at} steps; {sorted(points)} were.")
    return points[at]


def _write(place: Path, texts: ContinuedTexts) -> Path:
    """Every finished arm of the folder in one file."""
    run = json.loads((place / RUN).read_text("utf-8"))
    points = run["settings"]["measure_at"]
    arms = {}
    for arm in (*OF_TIED, *OF_UNTIED):
        at = place / arm.name
        if not (at / LOG).is_file():
            continue
        losses = json.loads((at / LOG).read_text("utf-8"))["loss_nats"]
        arms[arm.name] = {
            "points": [json.loads(point_file(at, p).read_text("utf-8")) for p in points],
            "training_bits": [[s, v / math.log(2)] for s, v in losses[::LOG_EVERY]],
        }
    beside = {
        "window_tokens": texts.window_tokens,
        "training_windows": len(texts.windows),
        "lens": metadata.version("tied-lens"),
    }
    row = rounded({"format": FORMAT, **run, **beside, "arms": arms})
    text = json.dumps(row, separators=(",", ":")) + "\n"
    replace_text(place / CONTINUED, text)
    return place / CONTINUED


def _require_trainable(model: "Checkpoint") -> None:
    name = type(model.model).__name__
    required_readout(model, "A comparison of continued arms")
    if not model.causal or model.seq2seq:
        raise UnsupportedArchitectureError(
            f"{name} does not predict the next token of a text; only such models are continued."
        )
    if model.n_layers < 2:
        raise UnsupportedArchitectureError(
            f"{name} has {model.n_layers} block: there is no layer between the embedding and the "
            "output to read."
        )
    wrong = [n for n, p in model.model.named_parameters() if p.dtype != torch.float32 or p.is_meta]
    if wrong:
        raise UnsupportedModelStateError(
            f"{wrong[0]} is {model.model.get_parameter(wrong[0]).dtype}, and small steps would be "
            'lost in rounding. Load the model whole, with dtype="float32".'
        )


def _require_same_start(run: ArmRun, source: "Checkpoint") -> None:
    """Before step 1 the untied copy gives the tied model's logits, bit for bit."""
    windows = run.texts.batch(0, run.settings)
    inputs = source.inputs_of([w.ids.tolist() for w in windows])
    with torch.no_grad(), untouched(source.model):
        arguments = forward_arguments(source.model, inputs, seq2seq=False)
        theirs = source.model(**arguments).logits
        ours, _ = run.logits(0)
    if not torch.equal(ours, theirs):
        raise AssertionError("an untied copy gives the logits of the tied model, bit for bit")
