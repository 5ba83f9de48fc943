"""Train one twin: segment by segment, going on from disk wherever it was stopped, bit for bit."""

import copy
import json
import math
import os
import pickle
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from lens.errors import (
    CorruptCheckpointError,
    ProvenanceError,
    ResultFileError,
    TrainingDivergedError,
)
from lens.files import is_file
from lens.measuring.kept_folder import make_folder
from lens.study.arms import Arm
from lens.study.building import build, matrices
from lens.study.changing import changed
from lens.study.optimising import mix_gradients, optimiser_of, relative_updates, set_rates
from lens.study.recipe import Recipe, Segment
from lens.study.texts import StudyTexts

RUN, STATE, LOG = "run.json", "state.pt", "log.json"
N_DECILES = 10
LOG_EVERY = 20
SAVE_EVERY = 100


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is, in steps of all segments, and its loss in bits a token."""

    arm: str
    seed: int
    done: int
    total: int
    loss_bits: float
    seconds: float


@dataclass
class _Running:
    """A model in training: what a step reads and changes."""

    arm: Arm
    model: PreTrainedModel
    optimiser: torch.optim.AdamW

    def state(self) -> dict[str, Any]:
        return {
            "tied": bool(self.model.config.tie_word_embeddings),
            "model": copy.deepcopy(self.model.state_dict()),
            "optimiser": copy.deepcopy(self.optimiser.state_dict()),
        }


def _running(arm: Arm, model: PreTrainedModel, recipe: Recipe) -> _Running:
    optimiser = optimiser_of(model, matrices(model), recipe, decayed=arm.decayed)
    return _Running(arm, model, optimiser)


def train(
    arm: Arm,
    seed: int,
    texts: StudyTexts,
    recipe: Recipe,
    folder: str | Path,
    *,
    progress: Callable[[Progress], None] | None = None,
    stop_after: int | None = None,
) -> Path:
    """Train an arm with a seed into a folder: a checkpoint for each branch, run.json, log.json.

    A run that was stopped goes on from its last saved step and ends with the same bits, for the
    same number of threads; a finished one is not run again. `stop_after` stops it after that
    many steps of this call, saved.

    Raises ProvenanceError where the folder holds another run, CorruptCheckpointError where what
    it holds cannot be read, TrainingDivergedError at the step where the loss is no number.
    """
    place = Path(folder)
    make_folder(place)
    _claim(place, arm, seed, texts, recipe)
    if is_finished(place):
        return place
    session = _Session(arm, seed, texts, recipe, place, progress, stop_after)
    session.resume()
    session.run()
    return place


def told(
    progress: Callable[[str], None] | None, *, of: str = ""
) -> Callable[[Progress], None] | None:
    """Every hundredth step as a line of text, `of` before it; None where nobody listens."""
    if progress is None:
        return None

    def report(p: Progress) -> None:
        if p.done % 100 == 0 or p.done == p.total:
            progress(
                f"{of}{p.arm}, seed {p.seed}: step {p.done:,} of {p.total:,}, "
                f"{p.loss_bits:.3f} bits a token, {p.seconds:,.0f} s"
            )

    return report


def branch_folder(folder: str | Path, at: int) -> Path:
    """Where the checkpoint lies that decayed off the trunk after `at` steps."""
    return Path(folder) / f"branch-{at:05}"


class _Session:
    """One call of `train`."""

    def __init__(
        self,
        arm: Arm,
        seed: int,
        texts: StudyTexts,
        recipe: Recipe,
        place: Path,
        progress: Callable[[Progress], None] | None,
        stop_after: int | None,
    ):
        self.arm, self.seed, self.texts, self.recipe, self.place = arm, seed, texts, recipe, place
        self.progress, self.stop_after = progress, stop_after
        self.began, self.steps_here = time.monotonic(), 0
        self.groups = frequency_groups(texts, recipe.d_vocab)
        model = build(arm, recipe, seed)
        self.running = _running(arm, model, recipe)
        self.segment, self.step = 0, 0
        self.trunk: dict[str, Any] | None = None
        self.log: dict[str, list[Any]] = {"loss_nats": [], "updates": []}

    def resume(self) -> None:
        path = self.place / STATE
        if not path.is_file():
            return
        with readable(path):
            found = torch.load(path, weights_only=True)
            self.segment, self.step = found["segment"], found["step"]
            self.trunk, self.log = found["trunk"], found["log"]
            self._restore(found["running"])

    def run(self) -> None:
        segments = self.recipe.segments
        while self.segment < len(segments):
            segment = segments[self.segment]
            for step in range(max(self.step, segment.first), segment.last):
                self._one_step(segment, step)
                self.step = step + 1
                self.steps_here += 1
                if self.steps_here == self.stop_after:
                    self._save()
                    return
                if self.steps_here % SAVE_EVERY == 0:
                    self._save()
            self._end_of(segment)
            self.segment += 1
            self._save()
        (self.place / STATE).unlink(missing_ok=True)

    def _one_step(self, segment: Segment, step: int) -> None:
        recipe = self.recipe
        if segment.kind == "trunk" and step == recipe.branch_at[-1] // 2:
            self._change()
        running = self.running
        rows = torch.from_numpy(
            self.texts.batch(
                step,
                windows=recipe.batch_windows,
                window_tokens=recipe.window_tokens,
                seed=self.seed,
            )
        )
        logits = running.model(input_ids=rows[:, :-1]).logits
        loss = cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        running.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        mix_gradients(matrices(running.model), running.arm.mixing)
        set_rates(running.optimiser, recipe.rate_factor(segment, step))
        before = None
        if step % LOG_EVERY == 0:
            before = [m.detach().clone() for m in matrices(running.model)]
        running.optimiser.step()
        value = float(loss.detach())
        self.log["loss_nats"].append([segment.name, step, value])
        if not math.isfinite(value):
            raise self._diverged(segment, step, value)
        if before is not None:
            moved = [
                relative_updates(b, a.detach(), self.groups)
                for b, a in zip(before, matrices(running.model), strict=True)
            ]
            self.log["updates"].append([segment.name, step, *moved])
        self._report(value)

    def _diverged(self, segment: Segment, step: int, loss: float) -> TrainingDivergedError:
        losses = [nats / math.log(2) for _, _, nats in self.log["loss_nats"][:-1]]
        before = f", and was {losses[-1]:.3f} bits a token the step before" if losses else ""
        recipe = self.recipe
        return TrainingDivergedError(
            f"{self.arm.name}, seed {self.seed}: the loss is {loss} at step {step} "
            f"({segment.name}){before}. The rates are {recipe.trunk_rate:g} for the trunk and "
            f"{recipe.embedding_rate:g} for the embedding matrices. Train it with lower ones, or a "
            "longer warm-up, in another folder."
        )

    def _change(self) -> None:
        """What an arm does to its matrices at half of the trunk."""
        if self.arm.change == "none":
            return
        tied = {"untie": False, "tie": True}.get(self.arm.change)
        self._restore(changed(self.running.state(), self.running.model, tied=tied))

    def _end_of(self, segment: Segment) -> None:
        if segment.kind == "trunk":
            self.trunk = self.running.state()
            return
        self._write(branch_folder(self.place, segment.first))
        if self.trunk is None:
            raise AssertionError("a branch begins from a trunk")
        self._restore(self.trunk)
        self.step, self.trunk = segment.first, None

    def _restore(self, state: dict[str, Any]) -> None:
        """Give model and optimiser the values of a state, in the form (one matrix, two) it has."""
        tied = state["tied"]
        model = self.running.model
        if bool(model.config.tie_word_embeddings) != tied:
            start = "tied" if tied else "copy"
            model = build(replace(self.arm, start=start), self.recipe, self.seed)
        model.load_state_dict(state["model"])
        self.running = _running(self.arm, model, self.recipe)
        self.running.optimiser.load_state_dict(copy.deepcopy(state["optimiser"]))

    def _write(self, target: Path) -> None:
        partial = target.with_name(f".{target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        self.running.model.save_pretrained(partial)
        self.texts.tokenizer.save_pretrained(partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.replace(target)

    def _save(self) -> None:
        state = {
            "segment": self.segment,
            "step": self.step,
            "running": self.running.state(),
            "trunk": self.trunk,
            "log": self.log,
        }
        replace_file(self.place / STATE, lambda path: torch.save(state, path))
        text = json.dumps(self.log)
        replace_text(self.place / LOG, text)

    def _report(self, loss_nats: float) -> None:
        if self.progress is None:
            return
        segments = self.recipe.segments
        done = sum(s.last - s.first for s in segments[: self.segment])
        done += self.step + 1 - segments[self.segment].first
        self.progress(
            Progress(
                arm=self.arm.name,
                seed=self.seed,
                done=done,
                total=sum(s.last - s.first for s in segments),
                loss_bits=loss_nats / math.log(2),
                seconds=time.monotonic() - self.began,
            )
        )


def frequency_groups(texts: StudyTexts, d_vocab: int) -> list[Int[Tensor, " row"]]:
    """Ten groups of the tokens that occur in training, most frequent first."""
    counts = np.bincount(texts.stream, minlength=d_vocab)
    order = np.argsort(-counts, kind="stable")[: int((counts > 0).sum())]
    return [torch.from_numpy(part) for part in np.array_split(order, N_DECILES)]


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raise CorruptCheckpointError in place of what a damaged state makes torch raise."""
    try:
        yield
    except (
        *(RuntimeError, LookupError, EOFError, ValueError, OSError, TypeError),
        pickle.UnpicklingError,
    ) as error:
        raise CorruptCheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {error}). Remove it to begin this "
            "run again."
        ) from error


def is_finished(folder: str | Path) -> bool:
    """Whether a run's last branch has been written."""
    place = Path(folder)
    if not is_file(place / RUN) or not is_file(place / LOG) or (place / STATE).exists():
        return False
    # A log is written along the way too; the last branch comes at the end.
    last = _run_file(place / RUN)["recipe"]["branch_at"][-1]
    return branch_folder(place, last).is_dir()


def _claim(place: Path, arm: Arm, seed: int, texts: StudyTexts, recipe: Recipe) -> None:
    """Write down what is trained here; refuse a folder that holds another run."""
    identity = {
        "arm": asdict(arm) | {"mixing": list(arm.mixing)},
        "seed": seed,
        "recipe": asdict(recipe) | {"branch_at": list(recipe.branch_at)},
        "texts": texts.hash,
    }
    beside = {
        "corpus": {"name": texts.train.name, "train": texts.train.hash},
        "held_out": {"documents": len(texts.held_out), "hash": texts.held_out.hash},
        "stream_tokens": len(texts.stream),
    }
    claim(place / RUN, identity, beside)


def claim(path: Path, identity: Mapping[str, Any], beside: Mapping[str, Any]) -> None:
    """Write a run's file: what it is, with versions and what is told beside it.

    Raises ProvenanceError where the file is there and is another run's, CorruptCheckpointError
    where it cannot be read.
    """
    if path.is_file():
        found = _run_file(path)
        for key, value in identity.items():
            if found.get(key) != value:
                raise ProvenanceError(
                    f"{path.parent} holds another run: its {key} is {found.get(key)!r}, asked for "
                    f"{value!r}. Name another folder."
                )
        return
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "tokenizers")}
    run = {**identity, "versions": versions, "threads": torch.get_num_threads(), **beside}
    text = json.dumps(run, indent=1)
    replace_text(path, text)


def _run_file(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise CorruptCheckpointError(f"{path} is not JSON: {error}.") from None
    if not isinstance(found, dict):
        raise CorruptCheckpointError(f"{path} is no run's file: it holds {type(found).__name__}.")
    return found


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file beside its place and move it there, so that none is ever half written."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        write(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_formatted(paths: Iterable[Path], expected: str) -> Iterator[dict[str, Any]]:
    """The JSON rows of these files. Raises ResultFileError where one is not of that format."""
    for path in paths:
        try:
            row = json.loads(path.read_text("utf-8"))
        except ValueError as error:
            raise ResultFileError(f"{path} is not JSON: {error}.") from None
        found = row.get("format") if isinstance(row, dict) else None
        if found != expected:
            raise ResultFileError(f"{path} has format {found!r}, expected {expected!r}.")
        yield row


def replace_text(path: Path, text: str) -> None:
    """`replace_file` with a text, in UTF-8."""
    replace_file(path, lambda partial: partial.write_text(text, encoding="utf-8"))
