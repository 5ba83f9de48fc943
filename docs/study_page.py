"""Fills the results of docs/study.md from docs/study/*.json: python docs/study_page.py.

Every number between the two marks of the page is written here; a run that is not finished leaves
its cells empty.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from study_answer import answer
from study_figures import change_figure, core_figure, dose_figure
from study_tables import (
    CORE,
    LAST_COLUMNS,
    attempt,
    changes,
    conditions,
    depths,
    domains,
    dose,
    last,
    last_columns,
    scale,
    starts,
    taken_apart,
    with_section,
)

from lens.errors import SelectionError
from lens.measuring.statistics import holm
from lens.study.arms import ARMS
from lens.study.drift import mean_likeness, read_matrices
from lens.study.effects import CONTRASTS, at_equal_loss, student_t
from lens.study.measured import read_rows
from lens.study.rates import Tuned, read_rates
from lens.study.written import DOCUMENTS as WRITTEN_DOCUMENTS

HERE = Path(__file__).parent
PAGE, ROWS = HERE / "study.md", HERE / "study"
BEGIN, END = "<!-- results -->", "<!-- end of results -->"
ANSWER, END_OF_ANSWER = "<!-- answer -->", "<!-- end of answer -->"
PICTURE = "![KL, reading loss and what is not there yet by layer, for each arm](study.png)"
SHOWN = (
    "reading loss G",
    "not there yet R",
    "KL",
    "copy term",
    "rest term",
    "median KL",
    "usefulness X",
    "self-copy rate",
)
HYPOTHESES = (
    ("1. Constraint, mean dG", "untied-copy", "tied", "mean dG"),
    ("2. Initialisation, mean dG", "untied-own", "untied-copy", "mean dG"),
    ("3. Copy term at l = 0, untied-copy less tied", "untied-copy", "tied", "copy term"),
    ("4. Constraint, mean dR", "untied-copy", "tied", "mean dR"),
    ("5. Constraint, held-out loss", "untied-copy", "tied", "held-out loss"),
)


def results(rows: list[dict[str, Any]], gate: dict[str, Any]) -> str:
    parts = [
        PICTURE,
        finished(rows),
        competence(rows, gate),
        rates(),
        hypotheses(rows),
        layers(rows),
    ]
    for name, (arm, less) in CONTRASTS.items():
        parts += [contrast(rows, name, arm, less), equal_loss(rows, name, arm, less)]
    parts += [
        further(rows),
        dose(rows),
        changes(rows),
        conditions(rows),
        scale(rows),
        starts(rows),
        domains(ROWS),
    ]
    parts += [taken_apart(ROWS), depths(ROWS), beside(rows), matrices(), training(rows)]
    return "\n\n".join(part for part in parts if part)


def finished(rows: list[dict[str, Any]]) -> str:
    counts = Counter(row["arm"]["name"] for row in rows)
    versions = rows[0]["versions"]
    made = ", ".join(f"{k} {v.split('+')[0]}" for k, v in versions.items())
    named = ", ".join(f"{arm} {n}" for arm, n in counts.items())
    return (
        f"Finished runs, seeds by arm: {named}. Texts {rows[0]['texts']}; {made}. "
        "Arms of `lens twins arms` that are not named here were not run; mixed-0-0 and mixed-1-1 "
        "are untied-copy and tied, bit for bit, by a test."
    )


def competence(rows: list[dict[str, Any]], gate: dict[str, Any]) -> str:
    bits = gate["bits"]
    lines = [
        "### Competence",
        "",
        f"Held-out bits a token: unigram {bits['unigram']:.3f}, bigram {bits['bigram']:.3f}, "
        f"interpolated trigram {bits['trigram']:.3f}.",
        "",
        "| arm | seeds | held-out bits | SD over seeds | below |",
        "|---|--:|--:|--:|---|",
    ]
    for arm in dict.fromkeys(row["arm"]["name"] for row in rows):
        losses = last(rows, arm, lambda b: b["loss_bits"])
        below = [n for n in ("trigram", "bigram") if losses.max() < bits[n]]
        lines.append(
            f"| {arm} | {len(losses)} | {losses.mean():.3f} | {spread(losses)} "
            f"| {below[0] if below else 'neither: no claim'} |"
        )
    return "\n".join(lines)


def rates() -> str:
    """The points of the grid, and where each arm is best."""
    lines = [
        "### Rates",
        "",
        "Held-out bits a token after a quarter of the tokens, seed 1000, by factor on the rate of "
        "the trunk and on that of the embedding matrices; from the least factor on until the loss "
        "has risen.",
        "",
        "| arm | trunk | embedding | held-out bits |",
        "|---|--:|--:|--:|",
    ]
    found = read_rates(ROWS)
    for one in found:
        lines += [f"| {one.arm} | {t:g} | {e:g} | {loss:.3f} |" for t, e, loss in one.losses]
    for one in found:
        edge = f", at the edge of the grid: {', '.join(one.at_edge)}" if one.at_edge else ""
        lines += [
            "",
            f"Best for {one.arm}: trunk x{one.trunk:g}, embedding x{one.embedding:g}{edge}. "
            f"The study trains at x1, x1: {given_away(one)} bits above it.",
        ]
    return "\n".join(lines)


def given_away(found: Tuned) -> str:
    """How much worse the rates of the study are than an arm's best, where both were tried."""
    losses = {(t, e): loss for t, e, loss in found.losses}
    if (1.0, 1.0) not in losses:
        return "not tried, so unknown,"
    return f"{losses[1.0, 1.0] - losses[found.trunk, found.embedding]:.3f}"


def hypotheses(rows: list[dict[str, Any]]) -> str:
    found = [(name, attempt(rows, *what)) for name, *what in HYPOTHESES]
    if all(e is None for _, e in found):
        return ""
    # Holm over the five that were named before the runs; one without runs has shown nothing.
    adjusted = holm([1.0 if e is None else float(e.p[0]) for _, e in found])
    lines = [
        "### The five hypotheses",
        "",
        "| hypothesis | seeds | difference, bits | 95 % over seeds | SD | p | least p | Holm |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for (name, e), p in zip(found, adjusted, strict=True):
        if e is None:
            lines.append(f"| {name} | 0 | - | - | - | - | - | - |")
            continue
        n, mean, half = len(e.seeds), e.mean[0], e.half_width[0]
        lines.append(
            f"| {name} | {n} | {mean:+.3f} | {between(mean - half, mean + half)} "
            f"| {number(e.spread[0])} | {e.p[0]:.4f} | {2 / 2**n:.4f} | {p:.4f} |"
        )
    return "\n".join([*lines, "", "Least p: what so many seeds can give at best."])


def layers(rows: list[dict[str, Any]]) -> str:
    arms = [arm for arm in CORE if any(row["arm"]["name"] == arm for row in rows)]
    lines = ["### By layer, mean over seeds, bits a token", "", "KL = G + R at each layer.", ""]
    for title, key in (
        ("KL(final ‖ logit lens)", "kl"),
        ("Not there yet, R", "not_there_yet"),
        ("Reading loss, G", "reading_loss"),
        ("Self-copy rate (share of positions)", "copy_rate"),
        ("Top-1 agrees with the model (share)", "agreement"),
    ):
        values = {arm: last(rows, arm, lambda b, key=key: b[key]).mean(axis=0) for arm in arms}
        n_layers = len(values[arms[0]])
        lines += [
            f"| {title} | " + " | ".join(f"l = {i}" for i in range(n_layers)) + " |",
            "|---|" + "--:|" * n_layers,
            *(f"| {a} | " + " | ".join(f"{v:.3f}" for v in of) + " |" for a, of in values.items()),
            "",
        ]
    return "\n".join(lines).rstrip()


def contrast(rows: list[dict[str, Any]], name: str, arm: str, less: str) -> str:
    found = {quantity: attempt(rows, arm, less, quantity) for quantity in SHOWN}
    if found["KL"] is None:
        return ""
    n = len(found["KL"].mean)
    lines = [
        f"### {name.capitalize()} effect: {arm} less {less}, by layer",
        "",
        f"Seeds: {len(found['KL'].seeds)}; half of the 95 % interval over seeds in brackets. Below "
        f"0, {arm} has the smaller value: for G and KL, the better reading. d KL is dG and dR, and "
        "also the copy term and the rest term.",
        "",
        "| difference | " + " | ".join(f"l = {i}" for i in range(n)) + " |",
        "|---|" + "--:|" * n,
    ]
    for quantity, e in found.items():
        assert e is not None
        cells = [f"{m:+.3f} ({number(h)})" for m, h in zip(e.mean, e.half_width, strict=True)]
        lines.append(f"| d {quantity} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def equal_loss(rows: list[dict[str, Any]], name: str, arm: str, less: str) -> str:
    quantities = ("mean dG", "mean dR")
    try:
        found = {q: at_equal_loss(rows, arm, less, q) for q in quantities}
    except SelectionError:
        return ""
    points, _ = found[quantities[0]]
    lines = [
        f"At equal held-out loss ({name}), mean over the layers 1 to L - 1 and over seeds, half of "
        "the 95 % interval over seeds in brackets; between the branches that were measured on the "
        "same documents. The arms then differ in the tokens they have seen.",
        "",
        "| held-out bits | " + " | ".join(f"{p:.2f}" for p in points) + " |",
        "|---|" + "--:|" * len(points),
    ]
    for quantity, (_, values) in found.items():
        n = len(values)
        halves = student_t(n - 1) * values[:, :, 0].std(axis=0, ddof=1 if n > 1 else 0) / n**0.5
        cells = [
            f"{m:+.3f} ({number(h)})" for m, h in zip(values.mean((0, 2)), halves, strict=True)
        ]
        lines.append(f"| {quantity} | {' | '.join(cells)} |")
    of_arm = {
        each: {r["seed"]: r for r in rows if r["arm"]["name"] == each} for each in (less, arm)
    }
    seeds = set(of_arm[arm]) & set(of_arm[less])
    for each, runs in of_arm.items():
        tokens = np.mean([tokens_to(runs[seed], points) for seed in seeds], axis=0)
        lines.append(f"| tokens, {each} | " + " | ".join(f"{t:,.0f}" for t in tokens) + " |")
    return "\n".join(lines)


def tokens_to(row: dict[str, Any], bits: np.ndarray) -> np.ndarray:
    """Tokens of training to each held-out loss, between branches linear in the loss."""
    points = sorted((b["loss_bits"], b["tokens"]) for b in row["branches"])
    losses, tokens = zip(*points, strict=True)
    return np.interp(bits, losses, tokens)


def further(rows: list[dict[str, Any]]) -> str:
    """The arms that no claim is tested on, beside the core arms of the same seeds."""
    of_arm: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        of_arm.setdefault(row["arm"]["name"], []).append(row)
    others: dict[tuple[int, ...], list[str]] = {}
    for name in ARMS:
        if name in of_arm and name not in CORE:
            others.setdefault(tuple(sorted(r["seed"] for r in of_arm[name])), []).append(name)
    if not others:
        return ""
    lines = [
        "### Further arms, described without a test",
        "",
        "Arms with the same seeds stand together, the core arms of those seeds before them: "
        "compare within a block. mixed-k1-k2: two copied matrices, g_E = g_in + k1 g_out and "
        "g_U = g_out + k2 g_in; (0, 0) is untied-copy and (1, 1) is tied, bit for bit. "
        "`lens twins arms` says what each varies.",
        "",
        f"| arm | seeds | {' | '.join(LAST_COLUMNS)} |",
        "|---|---|" + "--:|" * len(LAST_COLUMNS),
    ]
    for seeds, names in sorted(others.items()):
        for name in [*(arm for arm in CORE if arm in of_arm), *names]:
            kept = [r for r in of_arm[name] if r["seed"] in seeds]
            if len(kept) == len(seeds):
                told = ", ".join(str(seed) for seed in seeds)
                lines.append(f"| {name} | {told} | {last_columns(kept)} |")
    return "\n".join(lines)


def beside(rows: list[dict[str, Any]]) -> str:
    lines = [
        "### Beside it",
        "",
        "| arm | skill area | mean depth | ECE, layer L - 1 | temperature, l = 1 "
        "| output share of the gradient | of Adam's step | row cosine E, U | Procrustes E, U "
        "| copy score | written by the embedding | by attention | by the MLPs | by the last MLP |",
        "|---|" + "--:|" * 13,
    ]
    for arm in dict.fromkeys(row["arm"]["name"] for row in rows):
        columns = [
            last(rows, arm, of).mean()
            for of in (
                lambda b: b["skill_area"],
                lambda b: b["mean_depth"],
                lambda b: b["ece"][-2],
                lambda b: b["temperature"][1],
                lambda b: b["gradients"]["output_share"],
                lambda b: b["gradients"]["adam_output_share"],
                lambda b: b["geometry"]["row cosine"][0],
                lambda b: b["geometry"]["Procrustes cosine"][0],
                lambda b: b["geometry"]["copy score"],
                lambda b: b["written"]["embedding"],
                lambda b: b["written"]["attention"],
                lambda b: b["written"]["mlp"],
                lambda b: b["written"]["last mlp"],
            )
        ]
        lines.append(f"| {arm} | " + " | ".join(f"{v:.3f}" for v in columns) + " |")
    return "\n".join(
        [
            *lines,
            "",
            "Skill: 1 less the KL over that of a context-free guess; its area is the mean over "
            "layers. Depth: the first layer from which the first choice stays, over L. ECE: "
            "confidence less accuracy, in bins, of the layer below the output. Temperature: the "
            "best single one. Output share: |g_out| / (|g_in| + |g_out|) of what reaches the "
            "matrices. Procrustes: the cosine after the best rotation. Copy score: the share of "
            "tokens whose embedding, unembedded, has itself first. Written: the share of each kind "
            "of part in the logit of the model's own first choice, under the frozen final norm, at "
            f"one position of each of {WRITTEN_DOCUMENTS} documents.",
        ]
    )


def matrices() -> str:
    """Which matrix of the untied twin the tied one is like, and where training took each."""
    found = read_matrices(ROWS)
    arms = [arm for arm in ("untied-copy", "untied-own") if any(r["arm"] == arm for r in found)]
    if not arms:
        return ""
    lines = ["### The matrices, within and across twins of a seed", ""]
    lines += [
        "| compared | " + " | ".join(f"{arm}: row cosine | Procrustes" for arm in arms) + " |"
    ]
    lines += ["|---|" + "--:|" * (2 * len(arms))]
    keys = ("row_cosine", "procrustes")
    for name in found[0]["likeness"]:
        cells = []
        for arm in arms:
            of_arm = [row for row in found if row["arm"] == arm]
            cells += [
                f"{mean_likeness(of_arm, name, key):.3f} "
                f"({mean_likeness(of_arm, name, f'chance_{key}'):.3f})"
                for key in keys
            ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    counts = ", ".join(f"{arm} {sum(row['arm'] == arm for row in found)}" for arm in arms)
    moved = {
        name: np.mean([row["moved"][name] for row in found if row["arm"] == arms[0]])
        for name in found[0]["moved"]
    }
    far = ", ".join(f"{name} {value:.1f}" for name, value in moved.items())
    return "\n".join(
        [
            *lines,
            "",
            f'Mean over seeds ({counts}); in brackets the same with permuted rows. "Moved" is '
            "W - W_0. Two tied twins of different seeds are the ceiling (each pair once): they "
            "begin with different matrices, so that only a rotation can match them. "
            f"|W - W_0| / |W_0|, {arms[0]}: {far}.",
        ]
    )


def training(rows: list[dict[str, Any]]) -> str:
    lines = [
        "### Along training, mean over seeds",
        "",
        "| arm | | " + " | ".join(f"{b['at']}" for b in rows[0]["branches"]) + " |",
        "|---|---|" + "--:|" * len(rows[0]["branches"]),
    ]
    for arm in dict.fromkeys(row["arm"]["name"] for row in rows):
        of_arm = [row for row in rows if row["arm"]["name"] == arm]
        for title, of in (
            ("held-out bits", lambda b: b["loss_bits"]),
            ("KL at l = 0", lambda b: b["kl"][0]),
            ("mean G, 1 to L - 1", lambda b: float(np.mean(b["reading_loss"][1:-1]))),
            ("output share of the gradient", lambda b: b["gradients"]["output_share"]),
            ("output share of Adam's step", lambda b: b["gradients"]["adam_output_share"]),
        ):
            values = np.array([[of(b) for b in row["branches"]] for row in of_arm]).mean(axis=0)
            lines.append(f"| {arm} | {title} | " + " | ".join(f"{v:.3f}" for v in values) + " |")
    early, final = (rows[0]["options"]["documents"][which] for which in ("early", "last"))
    return "\n".join(
        [
            *lines,
            "",
            "Columns: steps of the trunk before the branch that decays. The loss is over all "
            f"held-out documents; the rest over {early} of them, of the last branch {final}.",
        ]
    )


def number(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.3f}"


def between(low: float, high: float) -> str:
    return "-" if np.isnan(low) else f"{low:+.3f} to {high:+.3f}"


def spread(values: np.ndarray) -> str:
    return f"{values.std(ddof=1):.3f}" if len(values) > 1 else "-"


def filled(page: str, rows: list[dict[str, Any]]) -> str:
    """The page with its results as these rows give them."""
    gate = json.loads((ROWS / "gate.json").read_text("utf-8"))
    page = with_section(page, ANSWER, END_OF_ANSWER, answer(rows))
    return with_section(page, BEGIN, END, results(rows, gate))


def main() -> None:
    rows = read_rows(ROWS)
    PAGE.write_text(filled(PAGE.read_text("utf-8"), rows), encoding="utf-8")
    core_figure(rows, HERE)
    dose_figure(rows, HERE)
    change_figure(rows, HERE)


if __name__ == "__main__":
    main()
