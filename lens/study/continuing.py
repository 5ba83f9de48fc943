"""One arm of a continued model, step by step, going on from disk wherever it was stopped."""

import copy
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from lens.checkpoint.inputs import Inputs, forward_arguments
from lens.checkpoint.surgery import save_checkpoint, tie, untie
from lens.corpus import Corpus
from lens.errors import CorpusError, TrainingDivergedError
from lens.measuring.passes import place_in_pass
from lens.measuring.windows import NO_TOKEN, Window, windows_of
from lens.study.continuation import Continuation, ContinuedArm
from lens.study.dose import dose, held, is_finite, response
from lens.study.optimising import mix_gradients, optimiser_of, set_rates
from lens.study.run import LOG, SAVE_EVERY, STATE, Progress, readable, replace_file, replace_text
from lens.study.texts import split_by_source

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint

MODEL = "model"
"""The folder beneath an arm's with the finished model."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ContinuedTexts:
    """What every arm is trained, fitted and measured on: windows do not cross documents."""

    windows: tuple[Window, ...]
    fit: Corpus
    held_out: Corpus
    window_tokens: int
    hash: str

    @classmethod
    def of(cls, model: "Checkpoint", corpus: Corpus, settings: Continuation) -> "ContinuedTexts":
        """One document in four of each source is held out. Raises CorpusError for too few."""
        train, held_out = split_by_source(corpus)
        cut = windows_of(model, train, window_tokens=settings.window_tokens)
        windows = tuple(w for of_document in cut.by_document for w in of_document)
        if len(windows) < settings.batch_windows:
            raise CorpusError(
                f"{train.name} gives {len(windows)} windows of {cut.window_tokens} tokens, fewer "
                f"than the {settings.batch_windows} of one step. Take more text or a smaller batch."
            )
        return cls(
            windows=windows,
            fit=train.in_runs().take(settings.fit_documents),
            held_out=held_out.take(settings.documents),
            window_tokens=cut.window_tokens,
            hash=corpus.hash,
        )

    def batch(self, step: int, settings: Continuation) -> list[Window]:
        """The windows of one step: a function of step and seed alone, so the same for each arm."""
        first, count = step * settings.batch_windows, len(self.windows)
        numbers = range(first, first + settings.batch_windows)
        return [self.windows[place_in_pass(n, count, settings.seed)] for n in numbers]


def begun(arm: ContinuedArm, source: "Checkpoint") -> "Checkpoint":
    """An arm's model at step 0: a copy of the loaded one, by surgery where the tie changes."""
    if arm.matrices == "untied":
        return untie(source)
    if arm.matrices == "as loaded":
        return again(copy.deepcopy(source.model), source)
    return tie(source, keep=arm.matrices)


def again(model: Any, like: "Checkpoint") -> "Checkpoint":
    """A model taken apart anew, under the name and with the tokenizer of another checkpoint."""
    return type(like).from_model(model, tokenizer=like.tokenizer, origin=like.origin)


class ArmRun:
    """One arm in training; the folder gets a file for each point, and the model at the end."""

    def __init__(
        self,
        arm: ContinuedArm,
        source: "Checkpoint",
        texts: ContinuedTexts,
        settings: Continuation,
        place: Path,
        progress: Callable[[Progress], None] | None = None,
    ):
        self.arm, self.source, self.texts = arm, source, texts
        self.settings, self.place, self.progress = settings, place, progress
        self.checkpoint = begun(arm, source)
        self.model = self.checkpoint.model
        # Dropout off: an arm would draw its own, and a resumed run another.
        self.model.eval()
        self.model.requires_grad_(True)
        self.first, self.loaded = held(self.matrices), (source.W_E.detach(), source.W_U.detach())
        if source.tie.is_tied:
            self.loaded = (self.loaded[0], self.loaded[0])
        self.optimiser = optimiser_of(self.model, self.matrices, settings)
        self.step, self.losses = 0, []
        self.began = time.monotonic()

    @property
    def matrices(self) -> tuple[Any, Any]:
        """(W_E, W_U), the parameters themselves."""
        return self.checkpoint.W_E, self.checkpoint.W_U

    def logits(self, step: int) -> tuple[Tensor, Int[Tensor, "batch pos"]]:
        """The logits of a step's windows, and what each position is scored against."""
        windows = self.texts.batch(step, self.settings)
        inputs = self.checkpoint.inputs_of([w.ids.tolist() for w in windows])
        arguments = forward_arguments(self.model, inputs, seq2seq=False)
        return self.model(**arguments).logits, _targets(windows, inputs)

    def run(self, *, stop_after: int | None = None) -> None:
        """To the end, or for that many steps.

        Raises TrainingDivergedError where the loss is no number any more.
        """
        self.place.mkdir(parents=True, exist_ok=True)
        self._resume()
        first = self.step
        while True:
            if self.step in self.settings.points:
                self._measure()
            if self.step == self.settings.steps:
                break
            if stop_after is not None and self.step - first == stop_after:
                return
            self._one_step()
            stopping = stop_after is not None and self.step - first == stop_after
            if stopping or self.step in self.settings.points or self.step % SAVE_EVERY == 0:
                self._save()
        if not (self.place / MODEL).is_dir():
            save_checkpoint(self.checkpoint, self.place / MODEL)
        text = json.dumps({"loss_nats": list(enumerate(self.losses))})
        replace_text(self.place / LOG, text)
        (self.place / STATE).unlink(missing_ok=True)

    def _one_step(self) -> None:
        logits, targets = self.logits(self.step)
        loss = cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=NO_TOKEN)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise self._diverged(f"the loss is {value}")
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        mix_gradients(self.matrices, self.arm.mixing)
        set_rates(self.optimiser, self.settings.rate_factor(self.step))
        self.optimiser.step()
        self.losses.append(value)
        self.step += 1
        self._report(value)

    def _measure(self) -> None:
        """The point of this step, unless it is there."""
        path = point_file(self.place, self.step)
        if path.is_file():
            return
        if not is_finite(self.model):
            raise self._diverged("weights are no numbers any more")
        # Proved anew: what a checkpoint remembers of its model is of the weights it was made with.
        model = again(self.model, self.checkpoint)
        one = self.matrices[0] is self.matrices[1]
        texts = self.texts
        row = {"at": self.step} | response(
            model, texts.fit, texts.held_out, window_tokens=texts.window_tokens
        )
        row |= dose(held(self.matrices), self.first, self.loaded, one=one)
        text = json.dumps(row)
        replace_text(path, text)

    def _diverged(self, what: str) -> TrainingDivergedError:
        rates = (self.settings.trunk_rate, self.settings.embedding_rate)
        return TrainingDivergedError(
            f"{self.arm.name} diverged: {what} after {self.step} steps at rates {rates}. Take "
            "lower rates and another folder."
        )

    def _save(self) -> None:
        state = {
            "step": self.step,
            "losses": self.losses,
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
        }
        replace_file(self.place / STATE, lambda path: torch.save(state, path))

    def _resume(self) -> None:
        path = self.place / STATE
        if not path.is_file():
            return
        with readable(path):
            found = torch.load(path, weights_only=True, map_location=self.checkpoint.device)
            self.model.load_state_dict(found["model"])
            self.optimiser.load_state_dict(found["optimiser"])
            self.step, self.losses = found["step"], found["losses"]

    def _report(self, loss_nats: float) -> None:
        if self.progress is None:
            return
        self.progress(
            Progress(
                arm=self.arm.name,
                seed=self.settings.seed,
                done=self.step,
                total=self.settings.steps,
                loss_bits=loss_nats / math.log(2),
                seconds=time.monotonic() - self.began,
            )
        )


def point_file(place: Path, at: int) -> Path:
    """Where an arm's point after `at` steps is kept."""
    return place / f"point-{at:05}.json"


def arm_is_finished(place: Path, settings: Continuation) -> bool:
    """Whether an arm has its log, written when its model is, and every point."""
    points = all(point_file(place, at).is_file() for at in settings.points)
    return points and (place / LOG).is_file() and not (place / STATE).exists()


def _targets(windows: list[Window], inputs: Inputs) -> Int[Tensor, "batch pos"]:
    targets = torch.full(inputs.ids.shape, NO_TOKEN, dtype=torch.long)
    for row, window in enumerate(windows):
        targets[row, : len(window.targets)] = torch.from_numpy(window.targets)
    return targets.to(inputs.ids.device)
