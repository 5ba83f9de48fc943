"""Examine many architectures in a process of their own, which may crash or hang without harm."""

import dataclasses
import json
import multiprocessing
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from tests.architectures.build import Architecture
from tests.architectures.examine import CRASHED, Row

SECONDS_EACH = 60.0


def swept(architectures: Iterable[Architecture], *, kept: Path | None = None) -> Iterator[Row]:
    """A row for each architecture; with `kept`, rows already in that file are not made again.

    A class that ends its process or takes longer than SECONDS_EACH has the status CRASHED.
    """
    done = _read(kept)
    worker: _Worker | None = None
    try:
        for architecture in architectures:
            row = done.get(architecture)
            if row is None:
                worker = worker or _Worker()
                row = worker.examine(architecture)
                if row.status == CRASHED:
                    worker.stop()
                    worker = None
                if kept is not None:
                    with kept.open("a") as file:
                        file.write(json.dumps(dataclasses.asdict(row)) + "\n")
            yield row
    finally:
        if worker is not None:
            worker.stop()


class _Worker:
    """A process that examines what it is sent, one at a time."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there,), daemon=True)
        self._process.start()
        there.close()

    def examine(self, architecture: Architecture) -> Row:
        self._here.send(architecture)
        try:
            if self._here.poll(SECONDS_EACH):
                return self._here.recv()
            why = f"took longer than {SECONDS_EACH:.0f} s"
        except EOFError:
            self._process.join()
            why = f"ended its process with exit code {self._process.exitcode}"
        return Row(**dataclasses.asdict(architecture), status=CRASHED, why=why)

    def stop(self) -> None:
        self._here.close()
        self._process.kill()
        self._process.join()


def _serve(there: Connection) -> None:
    import logging
    import os
    import warnings

    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    import torch

    from tests.architectures.examine import examine

    torch.set_num_threads(1)
    while True:
        try:
            architecture = there.recv()
        except EOFError:
            return
        there.send(examine(architecture))


def _read(kept: Path | None) -> dict[Architecture, Row]:
    if kept is None or not kept.is_file():
        return {}
    rows = [Row(**json.loads(line)) for line in kept.read_text().splitlines()]
    return {Architecture(r.mapping, r.model_type, r.model_class): r for r in rows}
