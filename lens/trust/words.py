"""Verdicts and reasons as sentences; plain text, nothing escaped."""

from collections.abc import Sequence

from lens.measuring.comparison import Comparison
from lens.measuring.known_profile import KnownProfile
from lens.measuring.statistics import MARGIN
from lens.trust.reasons import Reason
from lens.trust.verdict import Crossing, UseVerdict, layers_in_words, runs


def headline(name: str, found: Sequence[UseVerdict]) -> str:
    """One sentence: from which layer on the top-1, and from which on the probabilities."""
    by_key = {verdict.use.key: verdict.crossing() for verdict in found}
    top, whole = by_key["top-1"], by_key["distribution"]
    if str(top) == str(whole):
        return f"{name}: trust the lens {_granted(top)}, for top-1 token and probabilities alike"
    return (
        f"{name}: trust the lens for its top-1 token {_granted(top)}, "
        f"for its probabilities {_granted(whole)}"
    )


def verdict_line(verdict: UseVerdict) -> str:
    """One use, its condition and its verdict, for a terminal."""
    return f"{verdict.use.name} ({verdict.use.criterion()}): {verdict.crossing()}"


def why_not_before(found: Sequence[UseVerdict], given: Sequence[Reason]) -> str:
    """Why the layers before the probabilities' are not trusted, from the reasons that are shown."""
    crossing = next(v for v in found if v.use.key == "distribution").crossing()
    # Layer 0 is given apart everywhere, so that no headline leans on it.
    before = range(1, crossing.earliest)
    parts = [_reason_in_words(reason, before) for reason in given]
    told = [part for part in parts if part]
    if not len(before):
        return "No layer after the embedding is refuted."
    if not told:
        absent = [reason.kind.name for reason in given if reason.found is None]
        rest = f"; not measured: {', '.join(absent)}" if absent else ""
        return f"At {layers_in_words(before)} no reason that was measured stands out{rest}."
    return "Why not before: " + "; ".join(told) + "."


def known_line(known: KnownProfile, found: Sequence[UseVerdict]) -> str:
    """What a profile known before says, and whether this report agrees with it.

    It agrees on a layer that it neither refutes nor passes before its own is shown.
    """
    by_key = {verdict.use.key: verdict for verdict in found}
    guess, half = by_key["context"].crossing(0.0), by_key["top-1"].crossing(0.5)
    return (
        f"Known before, {known.date}: {_small(str(known))} By this report the guess is beaten "
        f"{guess} ({_agrees(guess, known.beats_a_guess_from)}), and half of the first tokens are "
        f"the model's {half} ({_agrees(half, known.agrees_from)})."
    )


def _agrees(crossing: Crossing, layer: int) -> str:
    latest = crossing.n_layers if crossing.proved is None else crossing.proved
    return "agrees" if crossing.earliest <= layer <= latest else "differs"


def _small(text: str) -> str:
    return text[0].lower() + text[1:]


def reason_line(reason: Reason) -> str:
    """The layers where a reason is shown, and where it is undecided."""
    if reason.found is None:
        return f"Not measured: {reason.why_absent}."
    shown, open_ = reason.layers("yes"), reason.layers("undecided")
    parts = []
    if shown:
        values = reason.found.estimate[shown]
        low, high = round(100 * float(values.min())), round(100 * float(values.max()))
        span = f"{low} %" if low == high else f"{low} to {high} %"
        parts.append(f"{layers_in_words(shown)} ({span})")
    if open_:
        parts.append(f"undecided at {layers_in_words(open_)}")
    text = "; ".join(parts) if parts else "at no layer"
    return f"{text[0].upper()}{text[1:]}."


def comparison_lines(comparison: Comparison) -> list[str]:
    """The headline difference, the skill verdict, and what the two may not be credited with."""
    a, b = comparison.first.name, comparison.second.name
    h = comparison.headline
    what = {"G": "reading loss G", "KL": "KL(final ‖ lens)"}[comparison.headline_of]
    sign = _sign(float(h.low[0]), float(h.high[0]))
    lines = [
        f"Mean {what} between the first and the last layer: {b} less {a} is "
        f"{h.estimate[0]:+.3f} {comparison.unit} [{h.low[0]:+.3f}, {h.high[0]:+.3f}]: {sign}."
    ]
    s = comparison.skill_difference
    if s is not None and comparison.verdict is not None:
        lines.append(
            f"Skill area: {s.estimate[0]:+.3f} [{s.low[0]:+.3f}, {s.high[0]:+.3f}]: "
            f"{_TOST[comparison.verdict].format(a=a, b=b, margin=MARGIN)}"
        )
    if told := comparison.depths_in_words():
        lines.append(
            "Prediction depth over the number of layers, by the entropy of the model's own "
            f"prediction: {'; '.join(told)}."
        )
    return lines


def comparison_headline(comparison: Comparison) -> str:
    """One sentence: whose lens reads better, or that it is undecided."""
    a, b = comparison.first.name, comparison.second.name
    h = comparison.headline
    what = {"G": "loses to reading (G)", "KL": "is off (KL)"}[comparison.headline_of]
    amount = f"{abs(float(h.estimate[0])):.2f} {comparison.unit}"
    span = f"[{h.low[0]:+.2f}, {h.high[0]:+.2f}]"
    if h.low[0] == h.high[0] == 0:
        return f"The lenses of {a} and {b} read alike: no difference in any document"
    if h.low[0] > 0:
        return f"The lens of {b} {what} {amount} more than that of {a} {span}"
    if h.high[0] < 0:
        return f"The lens of {b} {what} {amount} less than that of {a} {span}"
    return f"{b} against {a}: which lens {what} more is undecided {span} {comparison.unit}"


def _granted(crossing: Crossing) -> str:
    last = crossing.n_layers
    text = str(crossing)
    if crossing.proved is not None and crossing.proved < last:
        return text.replace(f"from layer {crossing.proved} on", f"{_from(crossing)} on")
    return text


def _from(crossing: Crossing) -> str:
    return f"from layer {crossing.proved} of {crossing.n_layers}"


def _reason_in_words(reason: Reason, before: range) -> str:
    shown = [layer for layer in reason.layers("yes") if layer in before]
    if not shown or reason.found is None:
        return ""
    whole = len(shown) == len(before) and len(runs(shown)) == 1
    where = "at every layer before" if whole and len(shown) > 1 else f"at {layers_in_words(shown)}"
    return f"{where} {_SAYS[reason.kind.key]}"


def _sign(low: float, high: float) -> str:
    if low == high == 0:
        return "no difference in any document"
    if low > 0:
        return "worse, the interval leaves 0 out"
    return "better, the interval leaves 0 out" if high < 0 else "the sign is undecided"


_SAYS = {
    "copying": "the lens mostly repeats the token that stands there",
    "marginal": "most of the distance is a wrong frequency of tokens, the same in every context",
    "temperature": "most of the distance is one wrong temperature",
    "basis": "most of the distance is another basis, which an affine translator undoes",
    "representation": "most of the distance is left by the affine translator too: not there yet, "
    "as far as that translator can tell",
}

_TOST = {
    "better": "the lens of {b} reads better, the 95 % interval leaves 0 out.",
    "worse": "the lens of {b} reads worse, the 95 % interval leaves 0 out.",
    "equivalent": "equivalent, the 90 % interval lies inside ±{margin} (two one-sided tests).",
    "undecided": "undecided, neither 0 nor a difference of {margin} is excluded.",
}
