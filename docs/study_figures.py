"""Figures of docs/study.md, drawn by lens.show and written beside the page."""

from pathlib import Path
from typing import Any

import numpy as np
from study_tables import CHANGED, CORE, LAST_COLUMNS, changed, doses, last

from lens.show.arms import Panel, arm_curves
from lens.show.responses import Response, response_lines
from lens.study.effects import QUANTITIES, effect


def core_figure(rows: list[dict[str, Any]], folder: Path) -> None:
    """KL, R and G of the core arms by layer, written beside the page."""
    arms = [arm for arm in CORE if any(row["arm"]["name"] == arm for row in rows)]
    panels = [
        Panel(
            heading=heading,
            arms={arm: last(rows, arm, lambda b, key=key: b[key]) for arm in arms},
            logarithmic=logarithmic,
        )
        for heading, key, logarithmic in (
            ("KL(final ‖ logit lens), bits", "kl", True),
            ("reading loss G, bits", "reading_loss", True),
            ("not there yet R, bits", "not_there_yet", False),
        )
    ]
    found = effect(rows, "untied-copy", "tied", "mean dG")
    word = "worse" if found.mean[0] > 0 else "better"
    arm_curves(
        *panels,
        title=f"Untied, the lens reads {word}: mean dG {found.mean[0]:+.2f} bits a token",
        subtitle=f"untied-copy less tied, layers 1 to L - 1, seeds: {len(found.seeds)}; "
        "thin lines are seeds; by law 0 at the last layer",
    ).write_image(folder / "study.png", scale=2)


def dose_figure(rows: list[dict[str, Any]], folder: Path) -> None:
    """G, KL at the embedding and loss against the dose, written beside the page."""
    found = doses(rows)
    if not found:
        return
    panels = {}
    for heading, column in (
        ("mean G, bits", "mean G"),
        ("KL at l = 0, bits", "KL, l = 0"),
        ("held-out bits a token", "held-out bits"),
    ):
        of = LAST_COLUMNS[column]
        values = np.array([[of(r["branches"][-1]) for r in of_arm] for of_arm in found.values()]).T
        panels[heading] = {"both gradients": Response(dose=np.array(list(found)), values=values)}
    response_lines(
        panels,
        dose="k",
        title="Between untied (k = 0) and tied (k = 1)",
        subtitle="two copied matrices, each with its own gradient and k times the other's; "
        "dots are seeds",
    ).write_image(folder / "study_dose.png", scale=2)


def change_figure(rows: list[dict[str, Any]], folder: Path) -> None:
    """What is read along training where the tie changes at half of it, beside arms that keep it."""
    kept = changed(rows)
    if not kept:
        return
    of: dict[str, Any] = {
        "mean G, bits": lambda b: QUANTITIES["mean dG"](b)[0],
        "KL at l = 0, bits": lambda b: b["kl"][0],
        "held-out bits a token": lambda b: b["loss_bits"],
    }
    panels = {
        heading: {
            CHANGED[name]: Response(
                dose=np.array([b["at"] for b in of_arm[0]["branches"]]),
                values=np.array([[value(b) for b in r["branches"]] for r in of_arm]),
            )
            for name, of_arm in kept.items()
        }
        for heading, value in of.items()
    }
    response_lines(
        panels,
        dose="steps before the decay",
        title="What is read where the tie changes at half of training",
        subtitle=f"after {kept['tied'][0]['branches'][-1]['at'] // 2} steps, matrices copied or "
        f"their mean taken, with their Adam state; seeds: {len(kept['tied'])}",
    ).write_image(folder / "study_change.png", scale=2)
