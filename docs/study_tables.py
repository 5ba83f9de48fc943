"""Tables of docs/study.md beside those of the core arms: dose, conditions, texts, gap, depth."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lens.errors import SelectionError
from lens.measuring.depth import ENTROPY_EDGES
from lens.study.arms import PAIR
from lens.study.domain import read_domains
from lens.study.effects import CONTRASTS, QUANTITIES, Effect, effect, student_t
from lens.study.gap import depth_by_entropy, read_gaps

DOSE_PICTURE = "![Reading loss, KL and loss by the share of the other gradient](study_dose.png)"
CHANGE_PICTURE = "![G, KL and loss along training, the tie changed at half](study_change.png)"
CHANGED = {
    "tied": "tied",
    "tied-then-untied": "tied, untied at half",
    "untied-then-tied": "untied, tied at half",
    "untied-copy": "untied",
}
DOSED = {
    0.0: "untied-copy",
    0.25: "mixed-0.25-0.25",
    0.5: "mixed-0.5-0.5",
    0.75: "mixed-0.75-0.75",
    1.0: "tied",
}
CORE = ("tied", "untied-copy", "untied-own")
ONE_SEED = "One seed: an interaction of a bit lies within what two seeds of a pair differ by."
COMPARED = {
    "held-out loss": "held-out loss",
    "mean dG": "mean G",
    "mean dR": "mean R",
    "copy term": "copy term, l = 0",
}
"""What the tables of differences show: quantity of `effect`, and its heading."""

STARTS = {"GPT-2": "", "Granite": "granite-", "Granite, sqrt(d) at the lookup": "scaled-"}
BEGUN = {
    "held-out loss": "held-out loss",
    "mean dG": "mean G",
    "last dG": "G, l = L - 1",
    "mean dR": "mean R",
}
"""Classes with an arm untied-own, by the prefix of its arms; and what is shown of it."""

CONDITIONS = (
    ("the core pair", "untied-copy", "tied"),
    ("at equal parameters (wider MLPs)", "untied-copy", "tied-matched"),
    ("a head bias (Phi)", "biased-untied-copy", "biased-tied"),
    ("LayerNorm (StableLM)", "layernorm-untied-copy", "layernorm-tied"),
    ("RMSNorm (Llama)", "rmsnorm-untied-copy", "rmsnorm-tied"),
    ("weight decay on the matrices", "decayed-untied-copy", "decayed-tied"),
    ("Granite", "granite-untied-copy", "granite-tied"),
    ("Granite, sqrt(d) at the lookup", "scaled-untied-copy", "scaled-tied"),
    ("untied at half of training, not", "tied-then-untied", "tied"),
    ("not, tied at half of training", "untied-copy", "untied-then-tied"),
    ("control, both tied: stopped at half and resumed, not", "tied-resumed", "tied"),
)
"""A pair of arms that differ in the tie, and what they share that the core pair has not."""

LAST_COLUMNS: dict[str, Callable[[dict[str, Any]], float]] = {
    "held-out bits": lambda b: b["loss_bits"],
    "KL, l = 0": lambda b: b["kl"][0],
    "mean G": lambda b: QUANTITIES["mean dG"](b)[0],
    "mean R": lambda b: QUANTITIES["mean dR"](b)[0],
    "self-copy, l = 0": lambda b: b["copy_rate"][0],
    "l = 1": lambda b: b["copy_rate"][1],
    "row cosine E, U": lambda b: b["geometry"]["row cosine"][0],
}
"""Columns of the tables of further arms and of doses, from a run's last branch."""


def last_columns(rows: list[dict[str, Any]]) -> str:
    """The cells of LAST_COLUMNS, means over these runs."""
    branches = [row["branches"][-1] for row in rows]
    return " | ".join(f"{np.mean([of(b) for b in branches]):.3f}" for of in LAST_COLUMNS.values())


def doses(rows: list[dict[str, Any]]) -> dict[float, list[dict[str, Any]]]:
    """The rows of each k in g_E = g_in + k g_out, g_U = g_out + k g_in, for seeds that have all."""
    of_dose = {k: [r for r in rows if r["arm"]["name"] == name] for k, name in DOSED.items()}
    found = {k: of_arm for k, of_arm in of_dose.items() if of_arm}
    if len(found) < 3:
        return {}
    seeds = set.intersection(*({r["seed"] for r in of_arm} for of_arm in found.values()))
    kept = {k: [r for r in of_arm if r["seed"] in seeds] for k, of_arm in found.items()}
    return kept if seeds else {}


def dose(rows: list[dict[str, Any]]) -> str:
    """Loss, G, R and copying by the share k of the other path's gradient."""
    found = doses(rows)
    if not found:
        return ""
    n = len(next(iter(found.values())))
    lines = [
        "### The dose: how much of the other gradient each matrix gets",
        "",
        DOSE_PICTURE,
        "",
        "Two copied matrices, g_E = g_in + k g_out and g_U = g_out + k g_in: k = 0 is untied-copy, "
        f"k = 1 the tied run, bit for bit. Seeds: {n}.",
        "",
        f"| k | {' | '.join(LAST_COLUMNS)} |",
        "|--:|" + "--:|" * len(LAST_COLUMNS),
        *(f"| {k:g} | {last_columns(of_arm)} |" for k, of_arm in found.items()),
    ]
    return "\n".join(lines)


def scale(rows: list[dict[str, Any]]) -> str:
    """What untying does with sqrt(d) at the lookup, less what it does without: Granite's class."""
    names = [f"{family}-{start}" for family in ("granite", "scaled") for start in PAIR]
    seeds = set.intersection(
        *({r["seed"] for r in rows if r["arm"]["name"] == name} for name in names)
    )
    if not seeds:
        return ""
    kept = [r for r in rows if r["seed"] in seeds]
    lines = [
        "### Tie and scale",
        "",
        "Granite's class, with sqrt(d) at the lookup and first values divided by it (scaled), and "
        "without (granite): untied-copy less tied in each, and the difference of the two, which "
        "says what of the effect hangs on the scale."
        + (
            f" Seeds: {len(seeds)}; half of the 95 % interval over seeds in brackets."
            if len(seeds) > 1
            else f" {ONE_SEED}"
        ),
        "",
        "| untied-copy less tied | without the scale | with it | interaction |",
        "|---|--:|--:|--:|",
    ]
    arm, less = CONTRASTS["constraint"]
    for quantity, name in COMPARED.items():
        plain, scaled = (
            effect(kept, f"{family}-{arm}", f"{family}-{less}", quantity).differences[:, 0]
            for family in ("granite", "scaled")
        )
        cells = [mean_and_half(v) for v in (plain, scaled, scaled - plain)]
        lines.append(f"| d {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def starts(rows: list[dict[str, Any]]) -> str:
    """What a W_U with first values of its own does, in each class that was trained with one."""
    arm, less = CONTRASTS["initialisation"]
    lines = []
    for label, prefix in STARTS.items():
        found = [attempt(rows, prefix + arm, prefix + less, quantity) for quantity in BEGUN]
        if found[0] is None:
            continue
        cells = [with_half_width(e) for e in found if e is not None]
        lines.append(f"| {label} | {len(found[0].seeds)} | {' | '.join(cells)} |")
    if len(lines) < 2:
        return ""
    return "\n".join(
        [
            "### A W_U with first values of its own, by class",
            "",
            "untied-own less untied-copy of the same seeds; half of the 95 % interval over seeds "
            "in brackets, where there are two.",
            "",
            f"| class | seeds | {' | '.join(f'd {name}' for name in BEGUN.values())} |",
            "|---|--:|" + "--:|" * len(BEGUN),
            *lines,
        ]
    )


def changed(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of the arms in CHANGED, for seeds that have all; empty where there is none."""
    of_name = {name: [r for r in rows if r["arm"]["name"] == name] for name in CHANGED}
    seeds = set.intersection(*({r["seed"] for r in found} for found in of_name.values()))
    kept = {name: [r for r in found if r["seed"] in seeds] for name, found in of_name.items()}
    return kept if seeds else {}


def changes(rows: list[dict[str, Any]]) -> str:
    """The arms whose tie changes at half of training, beside those that keep it."""
    kept = changed(rows)
    if not kept:
        return ""
    branches = kept["tied"][0]["branches"]
    lines = [
        "### The tie changed at half of training",
        "",
        CHANGE_PICTURE,
        "",
        f"After {branches[-1]['at'] // 2} steps of the stable rate the one matrix becomes two "
        "copies, or two become their mean, with the state of Adam. Mean G over the layers 1 to "
        f"L - 1, bits a token, by steps before the decay. Seeds: {len(kept['tied'])}.",
        "",
        f"| | {' | '.join(str(b['at']) for b in branches)} |",
        "|---|" + "--:|" * len(branches),
    ]
    for name, of_arm in kept.items():
        values = np.mean(
            [[QUANTITIES["mean dG"](b)[0] for b in r["branches"]] for r in of_arm], axis=0
        )
        lines.append(f"| {CHANGED[name]} | {' | '.join(f'{v:.3f}' for v in values)} |")
    return "\n".join(lines)


def conditions(rows: list[dict[str, Any]]) -> str:
    """What untying does where something else is different too, from pairs that differ in it."""
    lines = []
    for label, arm, less in CONDITIONS:
        found = [attempt(rows, arm, less, quantity) for quantity in COMPARED]
        if found[0] is None:
            continue
        cells = [with_half_width(e) for e in found if e is not None]
        lines.append(f"| {label} | {arm} | {less} | {len(found[0].seeds)} | {' | '.join(cells)} |")
    if not lines:
        return ""
    return "\n".join(
        [
            "### Untying where something else is different too",
            "",
            "Each line is an untied arm less a tied one of the same seeds (the last one is a "
            "control); half of the 95 % interval over seeds in brackets, where there are two.",
            "",
            f"| | arm | less | seeds | {' | '.join(f'd {name}' for name in COMPARED.values())} |",
            "|---|---|---|--:|" + "--:|" * len(COMPARED),
            *lines,
        ]
    )


def domains(folder: Path) -> str:
    """The core pair on texts of another kind, with the n-grams on the same tokens."""
    found = read_domains(folder)
    if not found:
        return ""
    arm, less = CONTRASTS["constraint"]
    compared = [f"d {name}" for name in COMPARED.values()]
    lines = [
        "### On texts of another kind",
        "",
        "The finished twins, read on texts that neither they nor their tokenizer were made from "
        "(optional, not needed to rerun the study); translators are those of the novels. Half of "
        "the 95 % interval over seeds in brackets.",
        "",
        f"| text | documents | bigram | trigram | {less}, bits | {arm}, bits | {less} G | {arm} G "
        f"| seeds | {' | '.join(compared)} |",
        "|---|" + "--:|" * (8 + len(compared)),
    ]
    for name, rows in found.items():
        effects = [effect(rows, arm, less, quantity) for quantity in COMPARED]
        grams = rows[0]["ngram_bits"]
        kept = {
            each: [r["branches"][-1] for r in rows if r["arm"]["name"] == each]
            for each in (less, arm)
        }
        values = [grams["bigram"], grams["trigram"]]
        for key in ("held-out bits", "mean G"):
            values += [float(np.mean([LAST_COLUMNS[key](b) for b in of])) for of in kept.values()]
        cells = [f"{v:.3f}" for v in values] + [str(len(effects[0].seeds))]
        cells += [with_half_width(e) for e in effects]
        lines.append(f"| {name} | {rows[0]['domain']['documents']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def with_half_width(found: Effect) -> str:
    """A difference of one number, and half of its interval where there is one."""
    return mean_and_half(found.differences[:, 0])


def mean_and_half(values: np.ndarray) -> str:
    """The mean over seeds, and half of its 95 % interval in brackets for more than one."""
    n = len(values)
    if n == 1:
        return f"{values[0]:+.3f}"
    half = student_t(n - 1) * values.std(ddof=1) / n**0.5
    return f"{values.mean():+.3f} ({half:.3f})"


def attempt(rows: list[dict[str, Any]], arm: str, less: str, quantity: str) -> Effect | None:
    """The effect; None where no seed has both arms."""
    try:
        return effect(rows, arm, less, quantity)
    except SelectionError:
        return None


def taken_apart(folder: Path) -> str:
    """What closes the gap of the logit lens, term by term, for the arms that were taken apart."""
    rows = read_gaps(folder)
    if not rows:
        return ""
    first = rows[0]
    parts = [
        "### What closes the gap",
        "KL(final ‖ logit lens), and by how much it falls as each term is freed in turn, fitted by "
        "KL on other documents: temperature, a bias over the vocabulary (frequency), a shift of "
        "the state, a diagonal map (scale), a rotated one, any. What a term takes depends on what "
        "was freed before it, so both orders are shown: the readout first, and the map first. "
        "Means over seeds "
        f"({', '.join(f'{arm} {len(of_arm(rows, arm))}' for arm in PAIR)}), "
        f"{first['positions']:,} positions each, fitted on {first['fit_positions']:,}.",
        *("\n".join(gap_table(rows, order)) for order in first["orders"]),
    ]
    return "\n\n".join(parts)


def gap_table(rows: list[dict[str, Any]], order: str) -> Iterator[str]:
    """One order of freeing: a line for each arm and layer."""
    terms, layers = rows[0]["orders"][order]["terms"], rows[0]["layers"]
    at = terms.index("temperature") + 1
    yield f"| {order} | layer | KL | {' | '.join(terms)} | what is left | temperature |"
    yield "|---|--:|--:|" + "--:|" * (len(terms) + 2)
    for arm in PAIR:
        found = [row["orders"][order] for row in of_arm(rows, arm)]
        if not found:
            continue
        kl = np.mean([f["kl"] for f in found], axis=0)
        fitted = np.exp(np.mean(np.log([[t[at] for t in f["temperature"]] for f in found]), axis=0))
        for place, layer in enumerate(layers):
            cells = [kl[place, 0], *np.diff(kl[place]), kl[place, -1]]
            shown = [f"{cells[0]:.3f}", *(f"{v:+.3f}" for v in cells[1:-1]), f"{cells[-1]:.3f}"]
            shown.append(f"{fitted[place]:.2f}" if fitted[place] < 100 else "over 100: uniform")
            yield f"| {arm} | {layer} | {' | '.join(shown)} |"


def depths(folder: Path) -> str:
    """How early the first choice is settled, among predictions that are as sure."""
    rows = read_gaps(folder)
    if not rows:
        return ""
    edges = [f"{e:g}" for e in ENTROPY_EDGES]
    bins = [f"under {edges[0]}", *(f"{a} to {b}" for a, b in pairwise(edges))]
    bins.append(f"over {edges[-1]}")
    lines = [
        "### How early the first choice is settled, by the model's own entropy",
        "",
        "The mean layer from which the lens' first choice is the model's own and stays so, over "
        "the number of layers; in brackets the share of positions with that entropy. Means over "
        "seeds.",
        "",
        "| arm | " + " | ".join(f"{name} bits" for name in bins) + " |",
        "|---|" + "--:|" * len(bins),
    ]
    for arm in PAIR:
        found = [depth_by_entropy(row) for row in of_arm(rows, arm)]
        if found:
            mean, share = (np.mean(part, axis=0) for part in zip(*found, strict=True))
            cells = (f"{m:.3f} ({s:.2f})" for m, s in zip(mean, share, strict=True))
            lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def of_arm(rows: list[dict[str, Any]], arm: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["arm"] == arm]


def with_section(page: str, begin: str, end: str, text: str) -> str:
    """The page with this text between two marks."""
    before, rest = page.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def last(rows: list[dict[str, Any]], arm: str, of: Any) -> np.ndarray:
    return np.array([of(row["branches"][-1]) for row in rows if row["arm"]["name"] == arm])
