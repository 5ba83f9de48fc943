"""The pieces of HTML that every section is made of; text is escaped here and nowhere else."""

from collections.abc import Iterable, Sequence

from lens.show.labels import for_html
from lens.trust.figures import Figure


def heading(level: int, text: str, *, anchor: str = "") -> str:
    """A heading of that level, which a link can lead to."""
    name = f' id="{for_html(anchor)}"' if anchor else ""
    return f"<h{level}{name}>{for_html(text)}</h{level}>"


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of plain text."""
    mark = f' class="{kind}"' if kind else ""
    return f"<p{mark}>{for_html(text)}</p>"


def bullets(texts: Iterable[tuple[str, str]]) -> str:
    """A list of (strong beginning, rest)."""
    items = "".join(f"<li><b>{for_html(a)}</b> {for_html(b)}</li>" for a, b in texts)
    return f"<ul>{items}</ul>"


def table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, kind: str = "", strong: int = -1
) -> str:
    """A table of plain texts; column `strong` stands out."""
    head = "".join(f"<th>{for_html(text)}</th>" for text in headings)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="verdict">{for_html(text)}</td>'
            if place == strong
            else f"<td>{for_html(text)}</td>"
            for place, text in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="table"><table class="plain {kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Labels beside their texts."""
    pairs = "".join(f"<dt>{for_html(a)}</dt><dd>{for_html(b)}</dd>" for a, b in rows)
    return f"<dl>{pairs}</dl>"


def figures(drawn: Iterable[Figure]) -> str:
    """Curves in a grid, each with its finding above it."""
    return '<div class="grid">' + "".join(map(_figure, drawn)) + "</div>"


def code(text: str) -> str:
    """Lines to be copied."""
    return f"<pre>{for_html(text)}</pre>"


def folded(summary: str, inside: str) -> str:
    """HTML that is shown on request."""
    return f"<details><summary>{for_html(summary)}</summary>{inside}</details>"


def _figure(figure: Figure) -> str:
    return (
        f"<figure><h3>{for_html(figure.finding)}</h3>{figure.legend}{figure.drawing}"
        f"<figcaption>{for_html(figure.caption)}</figcaption></figure>"
    )
