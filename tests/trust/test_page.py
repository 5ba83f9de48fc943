"""The page: what stands on it, that it is all in it, and that no text gets out of its place."""

import re
from dataclasses import replace

import numpy as np
import pytest

from lens.measuring.comparison import compared
from lens.measuring.confounds import Confound
from lens.measuring.correction import ORDERS
from lens.show.labels import for_html, labels
from lens.trust.layout import page_of_one, page_of_two
from lens.trust.sections import Findings
from tests.show.made import AWKWARD, made
from tests.trust.made import gap, plan, subject

CONFOUNDS = (
    Confound(what="layers", first="30", second="2"),
    Confound(what="training data and recipe", first="unknown", second="unknown"),
)
HACKED = "window.hacked === undefined"
# An attribute inside a tag; the same letters in a text are escaped, and no tag.
LOADS = re.compile(
    r"""<[^<>]*\s(?:src|href|srcset|poster|data)\s*=\s*["']?(?!\#|data:)[^"'\s>]|url\((?!\#)"""
)


def two() -> str:
    findings = [Findings(subject("tied")), Findings(subject("untied", seed=3))]
    sides = [found.subject.side for found in findings]
    comparison = compared(*sides, confounds=tuple(map(str, CONFOUNDS)))
    return page_of_two(findings, comparison, CONFOUNDS, plan())


@pytest.fixture(scope="module")
def one_page() -> str:
    return page_of_one(Findings(subject()), plan())


@pytest.fixture(scope="module")
def two_page() -> str:
    return two()


def test_the_verdict_comes_first(one_page: str) -> None:
    title = re.search(r"<h1>(.*?)</h1>", one_page)
    assert title is not None
    assert title[1] == (
        "made/up: trust the lens for its top-1 token from layer 5 of 6 on, for its probabilities "
        "from layer 5 of 6 on"
    ) or title[1].endswith("from layer 5 of 6 on, for top-1 token and probabilities alike")
    body = one_page.split("<body>")[1]
    places = [body.index(f">{text}<") for text in ("Why not before", "Layer by layer", "The tie")]
    assert body.index("<h1>") < places[0] < places[1] < places[2]


def test_the_reasons_are_told_with_their_layers(one_page: str) -> None:
    lead = re.search(r'<p class="lead">(.*?)</p>', one_page)
    assert lead is not None
    assert "at layer 1 the lens mostly repeats the token that stands there" in lead[1]
    assert "at layers 3 to 4 most of the distance is another basis" in lead[1]
    assert "at layers 1 to 2 most of the distance is left by the affine translator too" in lead[1]


@pytest.mark.parametrize("which", ["one_page", "two_page"])
def test_nothing_is_loaded_and_nothing_runs(which: str, request: pytest.FixtureRequest) -> None:
    page = request.getfixturevalue(which)
    assert LOADS.findall(page) == []
    assert "<script" not in page
    assert "default-src 'none'" in page
    assert len(page) < 1_500_000


@pytest.mark.parametrize(
    "bad", ['<img src="http://a/b">', "<a href=//x>", "url(http://x)", '<object data="x">']
)
def test_a_page_that_loads_would_be_seen(bad: str) -> None:
    assert LOADS.findall(bad)


@pytest.mark.parametrize("name", ["script", "image", "bold"])
def test_a_name_cannot_leave_its_place(name: str) -> None:
    named = replace(subject(), name=AWKWARD[name])
    page = page_of_one(Findings(named), plan(repeat=AWKWARD[name]))
    assert AWKWARD[name] not in page.split("</style>")[1]
    assert "<script" not in page


def test_every_awkward_token_stands_there_as_text() -> None:
    ids = np.arange(len(AWKWARD))
    base = made(prompt=len(AWKWARD), layers=2, awkward=False, k=1)
    gallery = replace(
        base,
        input_ids=ids,
        top_ids=np.tile(ids[None, :, None], (2, 1, 1)),
        target_ids=np.append(ids[1:], -1),
        vocabulary=dict(enumerate(AWKWARD.values())),
    )
    page = page_of_one(Findings(replace(subject(), predictions=(gallery,))), plan())
    for text in labels(gallery.vocabulary, max_chars=12).values():
        assert for_html(text) in page
    assert "<script" not in page
    assert AWKWARD["bold"] not in page


def test_the_distance_is_taken_apart_where_that_was_asked_for(one_page: str) -> None:
    assert "Not taken apart: it was not asked for" in one_page
    page = page_of_one(Findings(replace(subject(), decomposition=gap())), plan())
    assert "Not taken apart" not in page
    for order in ORDERS:
        assert f"{order}, drops in bits" in page
    assert page.count("<td>+1.00 [+1.00, +1.00]</td>") == 2 * 2 * 5
    assert page.count("<td>-0.50 [-0.50, -0.50]</td>") == 2 * 2
    # A drop below 0 has no room in the bar: five terms and the rest.
    assert page.count('<rect class="part p') == 2 * 6 + 7


def test_few_documents_are_told(one_page: str) -> None:
    assert "Few documents: 40" in one_page
    many = page_of_one(Findings(subject(documents=200)), plan())
    assert "Few documents" not in many


def test_without_a_translator_the_page_says_so_and_draws_no_parts() -> None:
    alone = replace(subject(), translated=None, translator="none was fitted")
    page = page_of_one(Findings(alone), plan())
    assert "no translator was fitted" in page
    assert "G, reading loss" not in re.sub("<dl>.*?</dl>", "", page)


def test_two_checkpoints_are_set_side_by_side_and_the_tie_is_not_credited(two_page: str) -> None:
    assert "because of" not in two_page
    assert "not one with and without the tie" in two_page
    for confound in CONFOUNDS:
        assert f'<td class="verdict">{confound.what}</td><td>{confound.first}</td>' in two_page
    for text in ("dG", "dR", "dX", "dKL", "two one-sided tests", "untied less tied"):
        assert text in two_page
    assert two_page.count('<figure class="wide">') == 4


def test_every_link_of_the_page_leads_to_a_place_on_it(one_page: str, two_page: str) -> None:
    for page in (one_page, two_page):
        links = set(re.findall(r'href="#([\w-]+)"', page))
        anchors = re.findall(r' id="([\w-]+)"', page)
        assert links <= set(anchors)
        assert len(anchors) == len(set(anchors))


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser_it_is_whole_quiet_and_readable(
    scheme: str,
    two_page: str,
    opened,
) -> None:
    tab = opened(two_page, ready="h1", width=700, color_scheme=scheme)
    assert tab.evaluate(HACKED)
    assert tab.faults == []
    assert len(tab.requests) == 1
    assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    ink, ground = tab.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    light = [sum(map(int, re.findall(r"\d+", colour)[:3])) / 3 for colour in (ink, ground)]
    assert abs(light[0] - light[1]) > 150
    assert (light[1] < 80) is (scheme == "dark")


@pytest.mark.browser
def test_an_unescaped_token_would_run(opened) -> None:
    """The twin: without the page's policy and its escaping the same text does something."""
    tab = opened(AWKWARD["script"].replace("</script>", "", 1), ready=None)
    tab.wait_for_function("window.hacked === 1", timeout=10_000)
