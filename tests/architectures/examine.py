"""One architecture, taken apart and held against itself on inputs that the proof never saw."""

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lens.checkpoint.capturing import capture_parts
from lens.checkpoint.checkpoint import Checkpoint
from lens.checkpoint.inputs import Inputs, forward_arguments
from lens.checkpoint.origin import Origin
from lens.checkpoint.proof import same_numbers
from lens.checkpoint.readout import DirectReadout, Step
from lens.checkpoint.replay import logits_of
from lens.errors import LensError, UnsupportedArchitectureError
from tests.architectures.build import Architecture
from tests.architectures.shrink import D_VOCAB

EXACT, REFUSED, WRONG, UNBUILT = "exact", "refused", "WRONG", "not built"
CRASHED = "crashed"
_BATCH, _POS, _SOURCE = 2, 9, 6


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one class turned out to be; a row of docs/architectures.md."""

    mapping: str
    model_type: str
    model_class: str
    status: str
    readout: str = ""
    tied: str = ""
    b_U: str = ""
    scale: str = ""
    cap: str = ""
    projection: str = ""
    final_norm: str = ""
    layout: str = ""
    target: str = ""
    mid: str = ""
    why_no_mid: str = ""
    steps: str = ""
    why: str = ""
    seconds: float = 0.0


def examine(architecture: Architecture) -> Row:
    """Build the class at toy size, take it apart, and compare its readouts with the model.

    WRONG, which must never occur, is a readout that was accepted and yet differs.
    """
    who = dataclasses.asdict(architecture)
    started = time.perf_counter()
    try:
        model = architecture.build()
    except Exception as error:  # any class of any release: the reason goes into the table
        return Row(**who, status=UNBUILT, why=_one_line(error))
    try:
        point = Checkpoint.from_model(
            model, tokenizer=None, origin=Origin(model_id="tiny", format="memory")
        )
    except LensError as error:
        return Row(**who, status=REFUSED, why=_one_line(error))
    mid, why_no_mid, trouble = mid_of(point)
    trouble = trouble_of(point) or trouble
    seconds = time.perf_counter() - started
    return Row(
        **who,
        status=WRONG if trouble else EXACT,
        **_facts(point),
        mid=mid,
        why_no_mid=why_no_mid,
        why=trouble or point.summary().why_not_direct or "",
        seconds=round(seconds, 2),
    )


def some_inputs(point: Checkpoint) -> Inputs:
    """Ids of another batch size and length than the proof's, with a token twice."""
    generator = torch.Generator().manual_seed(3)
    n_ids = min(D_VOCAB - 20, point.n_ids)
    ids = torch.randint(6, n_ids, (_BATCH, _POS), generator=generator)
    ids[0, 4] = ids[0, 1]
    source = torch.randint(6, n_ids, (_BATCH, _SOURCE), generator=generator)
    return Inputs(ids=ids, source_ids=source if point.seq2seq else None)


def trouble_of(point: Checkpoint) -> str:
    """Empty where both readouts give the model's logits bit for bit, at two states."""
    inputs = some_inputs(point)
    last = point.capture(inputs, layers=[point.n_layers])[point.n_layers]
    generator = torch.Generator().manual_seed(5)
    random = 3 * torch.randn(last.shape, generator=generator)
    truth = _own_logits(point, inputs)
    with point.edit(point.n_layers, None, lambda _: random):
        forced = _own_logits(point, inputs)
    for state, logits, which in ((last, truth, "last"), (random, forced, "random")):
        if not same_numbers(point.replay.logits(state, inputs), logits):
            return f"replay differs at the {which} state"
        if isinstance(point.readout, DirectReadout) and not same_numbers(
            point.readout.logits(state), logits
        ):
            return f"direct differs at the {which} state"
    return ""


def mid_of(point: Checkpoint) -> tuple[str, str, str]:
    """Whether resid_mid is offered, why not, and what is wrong with it on unseen inputs."""
    try:
        _ = point.mid
    except UnsupportedArchitectureError as error:
        reason = str(error).partition(" has no resid_mid: ")[2].partition(". Missing step")[0]
        return "no", reason, "" if reason else f"refused without a reason: {error}"
    try:
        capture_parts(point, some_inputs(point), range(point.n_layers))
    except LensError as error:
        return "yes", "", f"resid_mid: {error}"
    return "yes", "", ""


def _own_logits(point: Checkpoint, inputs: Inputs) -> Tensor:
    arguments = forward_arguments(point.model, inputs, seq2seq=point.seq2seq)
    with torch.no_grad():
        return logits_of(point.model(**arguments))


def _facts(point: Checkpoint) -> dict[str, Any]:
    readout = point.readout
    facts = {
        "readout": readout.kind,
        "tied": "yes" if point.tie.is_tied else "no",
        "layout": point.trunk.describe(),
        "target": point.target,
    }
    if not isinstance(readout, DirectReadout):
        return facts
    names = [getattr(part, "name", type(part).__name__) for part in readout.preparation]
    numbers = ("mul", "div")
    steps = readout.unembedding.steps
    capped = [i for i, step in enumerate(steps) if step.kind == "tanh"]
    around = {j for i in capped for j in (i - 1, i + 1)}
    scales = [str(s) for i, s in enumerate(steps) if s.kind in numbers and i not in around]
    scales += [f"{name} before W_U" for name in names if name.split()[0] in numbers]
    bias = readout.unembedding.bias is not None or any(_is_bias(step) for step in steps)
    norms = [name for name in names if "norm" in name.lower()]
    return facts | {
        "b_U": "yes" if bias else "",
        "scale": ", ".join(scales),
        "cap": ", ".join(str(steps[i + 1].value) for i in capped if i + 1 < len(steps)),
        "projection": ", ".join(n for n in names if n == "Linear" or "Transform" in n),
        "final_norm": norms[0] if norms else "",
        "steps": readout.describe(),
    }


def _is_bias(step: Step) -> bool:
    return step.kind == "add" and isinstance(step.value, torch.Tensor | nn.Parameter)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
