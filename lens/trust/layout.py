"""The whole page: one checkpoint, or two with what differs between them."""

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from string import Template

from lens.measuring.comparison import Comparison
from lens.measuring.confounds import Confound, caution
from lens.show.labels import for_html
from lens.show.ribbons import HATCH
from lens.trust import appendix, markup, sections
from lens.trust.figures import differences
from lens.trust.gap import gap_section
from lens.trust.sections import Findings
from lens.trust.subject import Plan
from lens.trust.words import comparison_headline, comparison_lines

FEW_DOCUMENTS = 200
"""Below this many documents the page says that there are few."""


def page_of_one(findings: Findings, plan: Plan) -> str:
    """The report on one checkpoint: verdict, reasons, curves, tie, prompts, words, sources."""
    body = [
        _opening(findings.headline, findings.why_not_before, [findings], plan),
        _links(_chapters("")),
        *_chapter(findings, "", level=2),
        *_back([findings], plan, two=False),
    ]
    return _page(findings.headline, body)


def page_of_two(
    findings: Sequence[Findings],
    comparison: Comparison,
    confounds: Sequence[Confound],
    plan: Plan,
) -> str:
    """The comparison first, then each checkpoint as on a page of its own."""
    title = comparison_headline(comparison)
    first, second = (f.subject.name for f in findings)
    body = [
        _opening(title, " ".join(comparison_lines(comparison)), findings, plan),
        _links([("what differs", "differs"), (first, "m1"), (second, "m2"), *_BACK]),
        markup.paragraph(
            f"These are two checkpoints, not one with and without the tie. Besides the tie they "
            f"differ in {len(confounds)} things, listed below, and no difference on this page "
            "can be credited to any one of them."
            if confounds
            else caution([])
        ),
        *(
            markup.heading(3, f.headline) + sections.verdict_figure(f)
            for f in findings
        ),
        _differences(comparison),
        *_what_else(first, second, confounds),
    ]  # fmt: skip
    for number, found in enumerate(findings, 1):
        body.append(markup.heading(2, found.subject.name, anchor=f"m{number}"))
        body.append(markup.paragraph(f"{found.headline}. {found.why_not_before}", "lead"))
        body.extend(_chapter(found, f"-{number}", level=3))
    body.extend(_back(findings, plan, two=True))
    return _page(title, body)


def _what_else(first: str, second: str, confounds: Sequence[Confound]) -> list[str]:
    if not confounds:
        return []
    rows = [(c.what, c.first, c.second) for c in confounds]
    return [
        markup.heading(2, "What else differs", anchor="confounds"),
        markup.table(("", first, second), rows, strong=0),
    ]


_BACK = [("words", "words"), ("sources", "sources"), ("repeat", "repeat")]


def _chapters(suffix: str) -> list[tuple[str, str]]:
    names = (("why not before", "why"), ("layer by layer", "curves"), ("closing it", "gap"))
    more = (("tie", "tie"), ("prompts", "prompts"))
    return [*((text, at + suffix) for text, at in (*names, *more)), *_BACK]


def _chapter(found: Findings, suffix: str, *, level: int) -> list[str]:
    subject = found.subject
    table = appendix.layer_table(subject)
    return [
        *([sections.verdict_figure(found)] if not suffix else []),
        sections.verdict_table(found),
        sections.reasons_section(found, level=level, anchor=f"why{suffix}"),
        sections.curves_section(found, level=level, anchor=f"curves{suffix}"),
        gap_section(
            subject.decomposition,
            why=subject.why_not_decomposed,
            level=level,
            anchor=f"gap{suffix}",
        ),
        markup.folded("Every number, layer by layer (bits where nothing else is said)", table),
        sections.tie_section(subject, level=level, anchor=f"tie{suffix}"),
        sections.prompts_section(subject, level=level, anchor=f"prompts{suffix}"),
    ]


def _differences(comparison: Comparison) -> str:
    text = (
        "Second less first, on the same documents: above 0 the second is worse. G is what the "
        "lens loses, R what is not there yet; a difference in R is none of the lens."
        if comparison.separates_lens_from_representation
        else "Second less first, on the same documents: above 0 the second is worse. No translator "
        "was fitted, so reading loss and what is not there yet are not told apart."
    )
    return (
        markup.heading(2, "What differs", anchor="differs")
        + markup.paragraph(text)
        + markup.figures(differences(comparison))
    )


def _opening(title: str, lead: str, findings: Sequence[Findings], plan: Plan) -> str:
    lines = "".join(
        markup.paragraph(line, "facts")
        for found in findings
        for line in (_facts(found), found.known_line)
        if line
    )
    few = min(len(found.subject.output.documents) for found in findings)
    note = f"Few documents: {few}. Below about {FEW_DOCUMENTS} the intervals are wide and rough."
    return "".join(
        [
            markup.paragraph(f"Lens report, {datetime.now(UTC):%d %B %Y}", "kicker"),
            markup.heading(1, title),
            markup.paragraph(lead, "lead"),
            lines,
            markup.paragraph(note, "note") if few < FEW_DOCUMENTS else "",
        ]
    )


def _facts(found: Findings) -> str:
    profile = found.subject.output
    source = profile.provenance
    reading = source.reading
    return (
        f"{found.subject.name}: {reading.model_class}, {reading.n_layers} layers, d_model "
        f"{reading.d_model}, {reading.d_vocab:,} tokens, {reading.tie}, {reading.readout} readout. "
        f"{profile.n_positions:,} positions of {len(profile.documents)} documents "
        f"(sources: {len(set(profile.sources))}) of {source.corpus_name}."
    )


def _links(places: Sequence[tuple[str, str]]) -> str:
    links = "".join(f'<a href="#{at}">{for_html(text)}</a>' for text, at in places)
    return f"<nav>{links}</nav>"


def _back(findings: Sequence[Findings], plan: Plan, *, two: bool) -> list[str]:
    sources = [
        (markup.heading(3, found.subject.name) if two else "")
        + appendix.provenance(found.subject, plan)
        for found in findings
    ]
    convention = findings[0].subject.output.provenance.reading.layer_convention
    return [
        markup.heading(2, "What the words mean", anchor="words"),
        appendix.definitions(convention, two=two),
        markup.heading(2, "Where this comes from", anchor="sources"),
        *sources,
        markup.heading(2, "How to repeat it", anchor="repeat"),
        markup.code(plan.repeat),
        markup.paragraph(
            "The same weights, documents and versions give the same numbers; the hashes above "
            "tell whether they are the same."
        ),
    ]


def _page(title: str, body: Sequence[str]) -> str:
    shape = Template((files("lens.trust") / "page.html").read_text(encoding="utf-8"))
    return shape.substitute(title=for_html(title), body=HATCH + "\n".join(body))
