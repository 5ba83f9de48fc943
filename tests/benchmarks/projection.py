"""How fast the logit lens is, as a ratio to the bare matrix product, and how much memory it takes.

    python tests/benchmarks/projection.py                      all cells, for ten minutes
    python tests/benchmarks/projection.py --models smollm2 --lengths 128 512 --minutes 5
    python tests/benchmarks/projection.py --gate               exit code 1 over the limit

Times are CPU seconds of one thread. Each cell (model, prompts) runs in a process of its own, floor
and jobs in turn, so that a busy machine slows them alike; ratios are taken within a turn. Samples
collect in projection.json beside this file until --fresh; docs/performance.md is written from it.
"""

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import startup

HERE = Path(__file__).parent
SAMPLES = HERE / "projection.json"
ROUNDS = 5
GATE = {"lens": 1.30, "lens, torch alone": 1.60}
KINDS = ("time", "memory", "growth", "wall", "parts", "startup")
FIRST_PASS = "lens.measure, first pass"
SAMPLES_OF = {"lens": ROUNDS, "lens, torch alone": 3, FIRST_PASS: 3}
OWN = ("lens",)
OTHERS = (
    "lens, torch alone",
    "plain transformers loop",
    "TransformerLens, two calls",
    "TransformerLens, one call",
)


def main() -> int:
    arguments = _parser().parse_args()
    if arguments.child:
        print(json.dumps(_child(json.loads(arguments.child))))
        return 0
    if arguments.gate:
        return _gate(arguments.models[0] if arguments.models else "gpt2")
    samples = [] if arguments.fresh else _read()
    until = time.monotonic() + 60 * arguments.minutes
    for cell in _cells(arguments, samples):
        if time.monotonic() > until:
            break
        found = _run(cell, max(60.0, until - time.monotonic()))
        samples += found
        _write(samples)
        for sample in found:
            print({key: sample[key] for key in ("kind", "model", "shape", "who", "value")})
    from performance_page import write_page

    write_page(_read())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=("smollm2", "gpt2", "gemma3"))
    parser.add_argument("--lengths", nargs="+", choices=("128", "512", "1024", "4x256"))
    parser.add_argument("--who", nargs="+", choices=(*OWN, FIRST_PASS, *OTHERS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--fresh", action="store_true", help="forget the samples so far")
    parser.add_argument("--gate", action="store_true", help="GPT-2's shape at 128, exit 1 if slow")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser


def _cells(arguments: argparse.Namespace, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is to be measured, most wanted first: short before long, few samples before many."""
    models = arguments.models or ("smollm2", "gpt2", "gemma3")
    shapes = arguments.lengths or ("128", "512", "1024", "4x256")
    kinds = arguments.kinds or KINDS
    who = arguments.who or (*OWN, FIRST_PASS, *OTHERS)
    cells: list[dict[str, Any]] = []
    for shape in shapes:
        for model in models:
            for name in who:
                if name not in OWN and shape not in ("128", "512"):
                    continue
                if name == FIRST_PASS and (shape != "512" or "time" not in kinds):
                    continue
                if "time" in kinds:
                    samples_wanted = SAMPLES_OF.get(name, 1) if name in OWN or shape == "128" else 1
                    samples_wanted = SAMPLES_OF[name] if name == FIRST_PASS else samples_wanted
                    rounds = samples_wanted if shape == "128" else 1
                    times = samples_wanted // rounds
                    cell = {"kind": "time", "model": model, "shape": shape, "who": name}
                    cells += [cell | {"rounds": rounds}] * times
                if "memory" in kinds and name != FIRST_PASS and (shape == "512" or name in OWN):
                    cells.append({"kind": "memory", "model": model, "shape": shape, "who": name})
            if "wall" in kinds:
                cells.append({"kind": "wall", "model": model, "shape": shape, "who": "lens"})
            if "parts" in kinds and shape in ("128", "512"):
                cells.append({"kind": "parts", "model": model, "shape": shape, "who": "lens"})
    if "growth" in kinds:
        cells += [{"kind": "growth", "model": "random", "shape": "128", "who": "lens"}]
    if "startup" in kinds:
        for model in startup.MODELS:
            cells.append({"kind": "startup", "model": model, "shape": "-", "who": "lens run"})
    taken: dict[str, int] = {}
    for sample in samples:
        taken[_name(sample)] = taken.get(_name(sample), 0) + 1
    wanted = []
    for cell in cells:
        if taken.get(_name(cell), 0) > 0:
            taken[_name(cell)] -= cell.get("rounds", 1)
        else:
            wanted.append(cell)
    return wanted


def _name(cell: dict[str, Any]) -> str:
    return "/".join(cell[key] for key in ("kind", "model", "shape", "who"))


def _run(cell: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
    threads = "2" if cell["kind"] == "wall" else "1"
    environment = os.environ | {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(HERE.parents[1]),
    }
    command = [sys.executable, str(Path(__file__)), "--child", json.dumps(cell)]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=seconds + 240
        )
    except subprocess.TimeoutExpired:
        return [cell | {"value": None, "error": f"not done in {seconds + 240:.0f} s"}]
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["killed"])[-1]
        return [cell | {"value": None, "error": last[-200:]}]
    return [cell | found for found in json.loads(done.stdout.strip().splitlines()[-1])]


def _child(cell: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure one cell, in this process."""
    import torch

    sys.path.insert(0, str(HERE))
    import jobs
    import memory

    torch.set_num_threads(2 if cell["kind"] == "wall" else 1)
    stamp = {"date": time.strftime("%Y-%m-%d"), "machine": _machine(), "load": os.getloadavg()[0]}
    if cell["kind"] == "startup":
        return [stamp | found for found in startup.seconds(cell["model"])]
    if cell["kind"] == "growth":
        return [stamp | found for found in memory.growth()]
    checkpoint = jobs.load_model(cell["model"])
    ids = jobs.prompts(checkpoint, cell["shape"])
    if cell["kind"] == "memory":
        return [stamp | memory.peaks(checkpoint, ids, cell["who"])]
    floor, job = jobs.Floor(checkpoint, ids), jobs.JOBS[cell["who"]](checkpoint, ids)
    clock = time.perf_counter if cell["kind"] == "wall" else time.process_time
    job()  # compiles, fills caches
    if cell["kind"] == "parts":
        return [stamp | _parts(floor, job)]
    found = []
    for _ in range(cell.get("rounds", 3)):
        marks = [clock()]
        for work in (floor.forward, floor.product, job):
            work()
            marks.append(clock())
        forward, product, ours = (b - a for a, b in itertools.pairwise(marks))
        found.append(
            stamp
            | {
                "value": ours / (forward + product),
                "seconds": ours,
                "forward": forward,
                "product": product,
                "rows": len(floor.rows),
                "flops": 2 * len(floor.rows) * floor.weight.numel(),
            }
        )
    return found


def _parts(floor: Any, job: Any) -> dict[str, Any]:
    """Parts of one reading, beside the two of the floor; `value` is their sum over the floor."""
    import parts

    marks = [time.process_time()]
    for work in (floor.forward, floor.product):
        work()
        marks.append(time.process_time())
    forward, product = (b - a for a, b in itertools.pairwise(marks))
    seconds = parts.timed(job)
    value = sum(seconds.values()) / (forward + product)
    return {"value": value, "parts": seconds, "forward": forward, "product": product}


def _machine() -> dict[str, str]:
    import importlib.metadata as metadata

    names = ("torch", "numba", "transformers", "transformer-lens", "numpy")
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    versions = {name: metadata.version(name) for name in names}
    return {
        "cpu": cpu,
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
    } | versions


def _gate(model: str) -> int:
    """The median of five turns against the limits; 1 if one is passed."""
    worst = 0
    for who, limit in GATE.items():
        cell = {"kind": "time", "model": model, "shape": "128", "who": who, "rounds": ROUNDS}
        ratios = sorted(sample["value"] or 1e9 for sample in _run(cell, 300.0))
        ratio = ratios[len(ratios) // 2]
        verdict = "over" if ratio > limit else "within"
        print(f"{who}: {ratio:.2f} x floor, {verdict} the limit of {limit:.2f}")
        worst |= ratio > limit
    cell = {"kind": "growth", "model": "random", "shape": "128", "who": "lens"}
    peaks = {s["at"]: s["peak"] for s in _run(cell, 300.0) if s.get("axis") == "d_vocab"}
    limit = 1.2 * peaks[8192] + 8
    verdict = "over" if peaks[65536] > limit else "within"
    print(f"memory at 65,536 tokens: {peaks[65536]:.1f} MiB, {verdict} the limit of {limit:.1f}")
    return int(worst or peaks[65536] > limit)


def _read() -> list[dict[str, Any]]:
    return json.loads(SAMPLES.read_text()) if SAMPLES.exists() else []


def _write(samples: list[dict[str, Any]]) -> None:
    lines = ",\n".join(json.dumps(sample) for sample in samples)
    temporary = SAMPLES.with_suffix(".tmp")
    temporary.write_text(f"[\n{lines}\n]\n")
    temporary.rename(SAMPLES)


if __name__ == "__main__":
    sys.exit(main())
