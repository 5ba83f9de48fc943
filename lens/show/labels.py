"""Token text made visible, and escaped for the place where it is shown."""

import html
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from typing import SupportsInt

ELLIPSIS = "…"
FSI, PDI = "\u2068", "\u2069"

_PICTURES = {" ": "␣", "\n": "↵", "\t": "⇥"}
_RIGHT_TO_LEFT = {"R", "AL", "AN"}
# Cc control, Cf format (zero-width, bidi), Cs lone surrogate, Co private, Cn unassigned, Z* spaces
_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zs", "Zl", "Zp"}
# A letter that Unicode counts as visible but fonts draw as nothing.
_BLANK_LETTERS = {"\u115f", "\u1160", "\u2800", "\u3164", "\uffa0", "\u034f"}


def label(text: str, *, max_chars: int | None = None) -> str:
    """The visible form of a token's text, as plain text: not yet escaped for any place.

    A space becomes ␣, a newline ↵, a tab ⇥; all else that has no width or no shape (zero-width and
    control characters, other spaces, lone surrogates) its number, [U+200B]: few fonts have the
    control pictures. Four or more equal invisible ones in a row are counted, `␣×8`; no text at
    all is [empty]. U+FFFD, what a tokenizer gives for half a character, stays as it is: `labels`
    adds the id that tells such tokens apart. Right-to-left text is isolated, so that it does not
    turn what stands beside it. Longer than `max_chars` is cut with "…".

    >>> label(" Paris\\n"), label("\\u200b"), label(""), label(" " * 8)
    ('␣Paris↵', '[U+200B]', '[empty]', '␣×8')
    """
    if not text:
        return "[empty]"
    pieces = []
    for run in re.finditer(r"(.)\1*", text, re.DOTALL):
        character, count = run.group(1), len(run.group(0))
        shown = _visible(character)
        invisible = shown != character
        pieces.extend([f"{shown}×{count}"] if invisible and count > 3 else [shown] * count)
    if unicodedata.category(text[0]).startswith("M") and pieces[0] == text[0]:
        pieces.insert(0, "◌")  # a combining mark needs something to stand on
    visible = _cut(pieces, max_chars)
    if any(unicodedata.bidirectional(character) in _RIGHT_TO_LEFT for character in visible):
        return f"{FSI}{visible}{PDI}"
    return visible


def labels(vocabulary: Mapping[int, str], *, max_chars: int | None = None) -> dict[int, str]:
    """A label for each id; where two ids would look the same, each carries its id.

    The first use is half a character: hundreds of byte tokens decode to the same U+FFFD.

    >>> labels({5: " a", 447: "\\ufffd", 448: "\\ufffd"})
    {5: '␣a', 447: '�[447]', 448: '�[448]'}
    """
    whole = {token: label(text) for token, text in vocabulary.items()}
    seen = Counter(whole.values())
    shown = {}
    for token, text in vocabulary.items():
        suffix = f"[{token}]" if seen[whole[token]] > 1 or "\ufffd" in text else ""
        shown[token] = label(text, max_chars=max_chars) + suffix
    return shown


def id_label(token_id: SupportsInt, shown: Mapping[int, str]) -> str:
    """The label of an id; ids that the tokenizer does not know are named by number.

    Padded vocabularies have rows without a token: Qwen2's unembedding has 151,936 rows and its
    tokenizer 151,665 tokens.

    >>> id_label(151700, {})
    '[id 151700]'
    """
    return shown.get(int(token_id), f"[id {int(token_id)}]")


def for_plotly(text: str) -> str:
    """Escape for plotly's titles, ticks, cell texts and hovers, which read a dialect of HTML.

    `$` goes as a character reference too: a page with MathJax would typeset `$$` as a formula,
    and plotly looks for the dollars before it decodes references.

    >>> for_plotly("<b>$$ & co")
    '&lt;b&gt;&#36;&#36; &amp; co'
    """
    return html.escape(text, quote=False).replace("$", "&#36;")


def for_html(text: str) -> str:
    """Escape for the text of an HTML element or a quoted attribute.

    Characters that UTF-8 cannot hold (lone surrogates) go as `\\udc80`.

    >>> for_html('</script>"')
    '&lt;/script&gt;&quot;'
    """
    return html.escape(text.encode("utf-8", "backslashreplace").decode("utf-8"), quote=True)


def token_html(text: str) -> str:
    """A label as an HTML element that MathJax leaves alone, wherever the page goes.

    Jupyter typesets `$...$` in HTML output after references are decoded, so escaping is not
    enough; MathJax skips <code>.

    >>> token_html("$$")
    '<code>$$</code>'
    """
    return f"<code>{for_html(text)}</code>"


def _visible(character: str) -> str:
    if character in _PICTURES:
        return _PICTURES[character]
    if unicodedata.category(character) in _INVISIBLE or character in _BLANK_LETTERS:
        return f"[U+{ord(character):04X}]"
    if "\ufe00" <= character <= "\ufe0f" or "\U000e0100" <= character <= "\U000e01ef":
        return f"[U+{ord(character):04X}]"  # variation selectors draw nothing by themselves
    return character


def _cut(pieces: list[str], max_chars: int | None) -> str:
    """Join whole pieces, so that no [U+200B] is cut in the middle; marks stay on their letter."""
    if max_chars is None or sum(map(_width, pieces)) <= max_chars:
        return "".join(pieces)
    pieces = [piece.strip("[]") if _width(piece) > max_chars else piece for piece in pieces]
    if len(pieces) == 1:
        return pieces[0]
    kept, used = [], 1
    for piece in pieces:
        used += _width(piece)
        if used > max_chars and kept:
            break
        kept.append(piece)
    return "".join(kept) + ELLIPSIS


def _width(piece: str) -> int:
    """Columns that a piece takes: East Asian wide characters two, combining marks none."""
    total = 0
    for character in piece:
        if unicodedata.category(character) in ("Mn", "Me"):
            continue
        total += 2 if unicodedata.east_asian_width(character) in "WF" else 1
    return total
