"""Where a reading's time goes: seconds of its parts, each without what it calls of the others."""

import contextlib
import functools
import pkgutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

PARTS = {
    "forward": "lens.checkpoint.checkpoint.Checkpoint.capture",
    "product": "lens.lenses.tiles.DirectRows.tile",
    "reduction": "lens.lenses.reduction.FusedReduction.update",
    "guess": "lens.lenses.projection.guess_final_top",
    "norm": "lens.lenses.chunks.Reader.load",
    "chosen logits": "lens.lenses.chunks.Chunk.chosen",
}
"""The part's name, and what is timed: `guess` takes its own products."""

REST = "the rest"


class Clock:
    """Seconds by part; a part that begins within another stops the other's clock."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._running: list[str] = [REST]
        self._since = time.process_time()

    def _switch(self) -> None:
        now = time.process_time()
        self.seconds[self._running[-1]] += now - self._since
        self._since = now

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Within, the time is this part's; within the guess all of it is the guess'."""
        self._switch()
        self._running.append("guess" if "guess" in self._running else name)
        try:
            yield
        finally:
            self._switch()
            self._running.pop()

    def stop(self) -> dict[str, float]:
        """The seconds of each part, and of the rest."""
        self._switch()
        return {name: self.seconds[name] for name in (*PARTS, REST)}


def timed(job: Callable[[], Any]) -> dict[str, float]:
    """Run a job of one thread, and tell its parts."""
    clock = Clock()
    with contextlib.ExitStack() as stack:
        for name, path in PARTS.items():
            original = pkgutil.resolve_name(path)
            stack.enter_context(mock.patch(path, _within(clock, name, original)))
        job()
    return clock.stop()


def _within(clock: Clock, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*given: Any, **named: Any) -> Any:
        with clock.part(name):
            return original(*given, **named)

    return call
