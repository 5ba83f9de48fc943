"""The sections of a report on one checkpoint: verdict, reasons, curves, tie, prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lens.show.finding import finding
from lens.show.ribbons import Ribbon, ribbon_key, ribbons
from lens.show.table import MOST_COLUMNS, prediction_table
from lens.trust import markup
from lens.trust.figures import curves
from lens.trust.reasons import Reason, reasons
from lens.trust.subject import Subject
from lens.trust.verdict import UseVerdict, verdicts
from lens.trust.words import headline, known_line, reason_line, why_not_before


@dataclass(frozen=True)
class Findings:
    """A checkpoint with its verdicts and reasons, each worked out once."""

    subject: Subject

    @cached_property
    def verdicts(self) -> tuple[UseVerdict, ...]:
        """The verdict on every use."""
        return verdicts(self.subject.output)

    @cached_property
    def reasons(self) -> tuple[Reason, ...]:
        """Every reason with its share by layer."""
        return reasons(self.subject.output, self.subject.translated)

    @property
    def headline(self) -> str:
        """One sentence."""
        return headline(self.subject.name, self.verdicts)

    @property
    def why_not_before(self) -> str:
        """One sentence."""
        return why_not_before(self.verdicts, self.reasons)

    @property
    def known_line(self) -> str:
        """What the shipped profile of this model says beside this report; empty without one."""
        known = self.subject.known
        return "" if known is None else known_line(known, self.verdicts)


def verdict_figure(findings: Findings) -> str:
    """A row for each use, a cell for each layer."""
    rows = [_use_ribbon(verdict) for verdict in findings.verdicts]
    words = {
        "yes": "holds (95 %, all layers at once)",
        "undecided": "undecided: the band straddles the threshold",
        "no": "does not hold",
    }
    drawing = ribbons(rows, alt=findings.headline)
    return f'<figure class="wide">{ribbon_key("good", words)}{drawing}</figure>'  # type: ignore[arg-type]


def verdict_table(findings: Findings) -> str:
    """Each use with its question, its condition, the verdict, and that at other thresholds."""
    rows = []
    for verdict in findings.verdicts:
        use = verdict.use
        others = "; ".join(f"{use.limit(t)}: {verdict.crossing(t)}" for t in use.others)
        rows.append((use.name, use.asks, use.criterion(), str(verdict.crossing()), others))
    headings = ("to read", "the question", "condition", "trusted", "with another threshold")
    return markup.table(headings, rows, strong=3)


def reasons_section(findings: Findings, *, level: int, anchor: str) -> str:
    """What the distance is made of before the lens can be trusted."""
    measured = [reason for reason in findings.reasons if reason.found is not None]
    n_layers = findings.subject.output.n_layers
    drawing = ribbons([_reason_ribbon(r, n_layers) for r in measured], alt="why not before")
    words = {
        "yes": "more than half",
        "undecided": "undecided",
        "no": "less than half",
    }
    texts = [
        (
            f"{_begun(reason.kind.name)}.",
            f"{reason_line(reason)} Measured: {reason.kind.share}. Where it is most: "
            f"{reason.kind.means}.",
        )
        for reason in findings.reasons
    ]
    return "".join(
        [
            markup.heading(level, "Why not before", anchor=anchor),
            markup.paragraph(
                "Shares in per cent, at each layer below the output. Another basis and not there "
                "yet divide the distance between them; the first three are further looks at the "
                "same distance and may overlap."
            ),
            f'<figure class="wide">{ribbon_key("bad", words)}{drawing}</figure>',  # type: ignore[arg-type]
            markup.bullets(texts),
        ]
    )


def curves_section(findings: Findings, *, level: int, anchor: str) -> str:
    """Every curve with its interval."""
    drawn = curves(findings.subject, findings.verdicts)
    return "".join(
        [
            markup.heading(level, "Layer by layer", anchor=anchor),
            markup.paragraph(
                "Shaded around a curve: the 95 % interval over documents, at each layer by itself. "
                "Shaded to the right: the layers at which the use is granted. Dotted across: its "
                "threshold. Position 0 of each window is in no curve."
            ),
            markup.figures(drawn),
        ]
    )


def tie_section(subject: Subject, *, level: int, anchor: str) -> str:
    """What the tensors say of the tie."""
    return markup.heading(level, "The tie", anchor=anchor) + markup.facts(subject.tie_rows)


def prompts_section(subject: Subject, *, level: int, anchor: str) -> str:
    """Heatmaps of some prompts."""
    tables = "".join(
        f'<div class="heat">{markup.heading(level + 1, finding(found))}{prediction_table(found)}'
        "</div>"
        for found in subject.predictions
    )
    note = markup.paragraph(
        "Each cell: the top token that the layer predicts from the token at the head of its "
        f"column, darker where it is likelier; framed: the model's own final one; ↺: the layer "
        f"mostly repeats its input. Of a longer prompt the last {MOST_COLUMNS} positions.",
        "note",
    )
    title = "Prompts, read layer by layer" if len(subject.predictions) != 1 else "A prompt"
    return markup.heading(level, title, anchor=anchor) + note + tables


def _begun(text: str) -> str:
    return text[0].upper() + text[1:]


def _use_ribbon(verdict: UseVerdict) -> Ribbon:
    use, found = verdict.use, verdict.found
    entries: Sequence[int] = range(len(found.estimate))
    return Ribbon(
        name=f"{use.name} ({use.unit})",
        states=verdict.states(),
        texts=tuple(_short(use.short, float(v)) for v in found.estimate),
        hints=tuple(
            f"layer {i}: {use.quantity} {use.form.format(found.estimate[i])}, joint 95 % band "
            f"{use.form.format(found.band_low[i])} to {use.form.format(found.band_high[i])}; "
            f"condition {use.criterion()}"
            for i in entries
        ),
    )


def _reason_ribbon(reason: Reason, n_layers: int) -> Ribbon:
    found = reason.found
    if found is None:
        raise ValueError("a reason that was not measured has no row")
    return Ribbon(
        name=reason.kind.name,
        # At the output there is no distance, so nothing to explain.
        states=(*reason.states, "absent"),
        texts=(*(f"{100 * v:.0f}" if abs(v) < 9.995 else "" for v in found.estimate), ""),
        hints=(
            *(
                f"layer {i}: {reason.kind.share}: {found.estimate[i]:.2f}, joint 95 % band "
                f"{found.band_low[i]:.2f} to {found.band_high[i]:.2f}"
                for i in range(n_layers)
            ),
            f"layer {n_layers}: the output, no distance",
        ),
        tone="bad",
    )


def _short(form: str, value: float) -> str:
    """A number for a narrow cell: no more than four characters."""
    text = form.format(value).replace("%", "").replace("-0.0", "0.0")
    text = text.removeprefix("0") if text.startswith("0.") and len(text) > 3 else text
    return text if len(text) <= 4 else f"{value:.0f}"
