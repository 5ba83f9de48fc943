import unicodedata

import pytest

from lens.show.labels import FSI, PDI, for_html, for_plotly, id_label, label, labels, token_html
from tests.show.made import AWKWARD


@pytest.mark.parametrize("text", AWKWARD.values(), ids=AWKWARD.keys())
def test_every_label_is_visible_and_storable(text):
    shown = label(text)
    assert shown.strip()
    shown.encode("utf-8")
    hidden = {"Cc", "Cs", "Co", "Zs", "Zl", "Zp"}
    assert not [c for c in shown if unicodedata.category(c) in hidden]
    formats = [c for c in shown if unicodedata.category(c) == "Cf"]
    assert formats in ([], [FSI, PDI])


def test_the_raw_texts_are_what_that_check_rejects():
    assert not "\u00a0 \n\t".strip()
    assert unicodedata.category("\u200b") == "Cf"
    with pytest.raises(UnicodeEncodeError):
        AWKWARD["surrogate"].encode("utf-8")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" Paris", "␣Paris"),
        ("a\n", "a↵"),
        ("\t\t", "⇥⇥"),
        (" " * 9, "␣×9"),
        ("\r", "[U+000D]"),
        ("\u200b", "[U+200B]"),
        ("\ufeff", "[U+FEFF]"),
        ("\udce2", "[U+DCE2]"),
        ("", "[empty]"),
        ("\u0301", "◌\u0301"),
        ("e\u0301", "e\u0301"),
        ("東京", "東京"),
        ("שלום", FSI + "שלום" + PDI),
        ("aaaaa", "aaaaa"),
    ],
)
def test_label_of_each_kind(text, shown):
    assert label(text) == shown


def test_right_to_left_override_cannot_leave_its_label():
    assert "\u202e" not in label("\u202eevil")
    assert label("\u202eevil").startswith("[U+202E]")


def test_a_cut_label_fits_and_keeps_its_isolates():
    assert label("abcdefghij", max_chars=5) == "abcd…"
    assert label("東京都庁", max_chars=5) == "東京…"
    cut = label("שלום עולם", max_chars=4)
    assert cut[0] == FSI
    assert cut[-1] == PDI
    assert label("abcd", max_chars=4) == "abcd"


def test_ids_that_would_look_alike_carry_their_id():
    shown = labels({1: "\ufffd", 2: "\ufffd", 3: " a", 4: "␣a", 5: "b"})
    assert len(set(shown.values())) == 5
    assert shown[5] == "b"
    assert id_label(151700, shown) == "[id 151700]"


def test_escaping_leaves_no_markup_and_no_formula():
    escaped = for_plotly("<b>$$x$$</b>&lt;")
    assert not set("<>$") & set(escaped)
    assert escaped == "&lt;b&gt;&#36;&#36;x&#36;&#36;&lt;/b&gt;&amp;lt;"
    assert for_html('"><script>') == "&quot;&gt;&lt;script&gt;"
    assert for_html("\udce2") == "\\udce2"
    assert token_html("</code>") == "<code>&lt;/code&gt;</code>"
