"""The short answer at the head of docs/study.md, from the rows of the core arms and of others."""

from typing import Any

import numpy as np
from study_tables import CONDITIONS, CORE, attempt, last

from lens.study.effects import CONTRASTS, QUANTITIES, Effect

LEFT_OUT = ("tied-resumed", "rmsnorm-untied-copy")
"""A control, and a class whose numbers are another's (Granite's)."""

CONDITIONS_ANCHOR = "untying-where-something-else-is-different-too"


def answer(rows: list[dict[str, Any]]) -> str:
    """What untying does to the lens: by how much, at which layers, with what certainty."""
    arm, less = CONTRASTS["constraint"]
    mean_gap, by_layer = (attempt(rows, arm, less, q) for q in ("mean dG", "reading loss G"))
    if mean_gap is None or by_layer is None:
        return ""
    n_layers = len(by_layer.mean) - 1
    kind = "better" if mean_gap.mean[0] < 0 else "worse"
    alike = int((np.sign(mean_gap.differences[:, 0]) == np.sign(mean_gap.mean[0])).sum())
    return "\n".join(
        [
            f"In {len(mean_gap.seeds)} pairs of small twins that differ in the tie alone, the "
            f"logit lens of the untied one reads **{kind}**: untied less tied, the reading loss "
            f"differs by {told(mean_gap)} bits a token in the mean over the layers 1 to "
            f"{n_layers - 1}, with that sign in {alike} pairs of {len(mean_gap.seeds)}. In "
            "brackets are 95 % intervals over seeds.",
            "",
            "| bits a token | " + " | ".join(f"l = {i}" for i in range(n_layers + 1)) + " |",
            "|---|" + "--:|" * (n_layers + 1),
            *means(rows, "KL(final ‖ lens)", "KL"),
            "| reading loss, untied less tied | "
            + " | ".join(told(by_layer, i) for i in range(n_layers + 1))
            + " |",
            *means(rows, "share of positions where the lens repeats its input", "self-copy rate"),
            "",
            *beside(rows),
        ]
    )


def beside(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each of the other questions that have runs."""
    arm, less = CONTRASTS["constraint"]
    kept, loss = (attempt(rows, arm, less, q) for q in ("mean dR", "held-out loss"))
    equal = attempt(rows, arm, "tied-matched", "held-out loss")
    start = attempt(rows, *CONTRASTS["initialisation"], "mean dG")
    lines = []
    if kept is not None:
        lines.append(
            f"- What no affine map recovers from the states differs by {told(kept)} bits: these "
            "twins differ in what the lens reads, hardly in what the layers hold."
            if abs(kept.mean[0]) < 0.05
            else f"- What no affine map recovers from the states differs by {told(kept)} bits."
        )
    if loss is not None:
        beyond = "" if equal is None else f"; at equal parameters by {told(equal)}"
        lines.append(f"- The held-out loss differs by {told(loss)} bits, untied less tied{beyond}.")
    if start is not None:
        lines.append(
            "- How W_U begins (drawn, less a copy of W_E) changes the reading loss by "
            f"{told(start)} bits."
        )
    others = [p for _, *p in CONDITIONS if tuple(p) != (arm, less) and p[0] not in LEFT_OUT]
    found = [e for pair in others if (e := attempt(rows, *pair, "mean dG")) is not None]
    if found:
        values = np.concatenate([e.differences[:, 0] for e in found])
        averages = [e.mean[0] for e in found]
        lines.append(
            f"- Under [{len(found)} other conditions](#{CONDITIONS_ANCHOR}) (other classes, a "
            "scale, a bias, weight decay, equal parameters, the tie changed at half) the reading "
            f"loss differs by {max(averages):+.1f} to {min(averages):+.1f} bits, and is the "
            f"smaller untied in {(values < 0).sum()} pairs of {len(values)}."
        )
    return lines


def means(rows: list[dict[str, Any]], title: str, quantity: str) -> list[str]:
    """A line of the table for each of the two arms."""
    return [
        f"| {title}, {arm.removesuffix('-copy')} | "
        + " | ".join(f"{v:.2f}" for v in last(rows, arm, QUANTITIES[quantity]).mean(axis=0))
        + " |"
        for arm in CORE[:2]
    ]


def told(found: Effect, entry: int = 0) -> str:
    """A difference with its interval over seeds, where there is one."""
    mean, half = found.mean[entry], found.half_width[entry]
    if mean == half == 0:
        return "0"
    digits = 2 if abs(mean) >= 0.2 else 3
    if np.isnan(half):
        return f"{mean:+.{digits}f}"
    return f"{mean:+.{digits}f} [{mean - half:+.{digits}f}, {mean + half:+.{digits}f}]"
