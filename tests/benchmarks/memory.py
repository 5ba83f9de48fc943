"""Peak memory of a job in this process, and how time and memory grow with the work."""

import ctypes
import gc
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MIB = 2**20


def peak_bytes() -> int:
    """The highest resident set since `forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> int:
    """Start anew; gives the resident set now, without what the heap keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}; memory is measured on Linux only.")


def peaks(checkpoint: Any, ids: Tensor, who: str) -> dict[str, Any]:
    """MiB above the loaded model: of the job, and of the forward without its head alone."""
    import jobs

    short = ids[:, :8]
    base = checkpoint.model.base_model
    jobs.JOBS[who](checkpoint, short)()  # loads code, compiles
    with torch.no_grad():
        base(short)
    before = forget_peak()
    with torch.no_grad():
        base(ids)
    forward = peak_bytes() - before
    job = jobs.JOBS[who](checkpoint, ids)
    before = forget_peak()
    result = job()
    peak = peak_bytes() - before
    return {"value": peak / MIB, "forward": forward / MIB, "results": _size(result) / MIB}


def _size(result: Any) -> int:
    """Bytes of the arrays of our results."""
    import numpy as np

    results = result if isinstance(result, list) else [result]
    arrays = (
        value for each in results if hasattr(each, "__dict__") for value in vars(each).values()
    )
    return sum(value.nbytes for value in arrays if isinstance(value, np.ndarray))


def growth() -> list[dict[str, Any]]:
    """Projections of random states, one dimension at a time; seconds, and MiB above the inputs."""
    found = []
    usual = {"positions": 128, "layers": 16, "d_vocab": 32768}
    steps = {
        "positions": (64, 128, 256, 512),
        "layers": (8, 16, 32, 64),
        "d_vocab": (8192, 32768, 65536, 262144),
    }
    _projected(**usual | {"positions": 8})
    for axis, values in steps.items():
        for value in values:
            seconds, peak = zip(
                *(_projected(**usual | {axis: value}) for _ in range(3)), strict=True
            )
            found.append({"axis": axis, "at": value, "value": min(seconds), "peak": max(peak)})
    return found


def _projected(
    positions: int, layers: int, d_vocab: int, d_model: int = 256
) -> tuple[float, float]:
    from lens.checkpoint.readout import DirectReadout, Unembedding
    from lens.lenses.projection import project

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(d_vocab, d_model, generator=generator) / 8
    states = torch.randn(layers, positions, d_model, generator=generator)
    ids = torch.randint(0, d_vocab, (positions,), generator=generator)
    norm = torch.nn.RMSNorm(d_model)
    readout = DirectReadout((norm,), Unembedding(weight), d_model)
    before = forget_peak()
    begin = time.process_time()
    project(readout, states, final_states=states[-1], input_ids=ids, target_ids=ids.roll(-1))
    return time.process_time() - begin, (peak_bytes() - before) / MIB
