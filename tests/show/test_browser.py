"""What a reader sees and a page does, in a real browser."""

import re
from dataclasses import replace

import numpy as np
import pytest

from lens.show.heatmap import heatmap, notebook_bundle
from lens.show.labels import labels
from lens.show.page import page
from tests.show.made import AWKWARD, made

pytestmark = pytest.mark.browser

# A script that a token smuggled in would set window.hacked; nothing else does.
HACKED = "window.hacked === undefined"
NAMES = list(AWKWARD)


def texts(page, selector):
    return page.eval_on_selector_all(selector, "all => all.map(one => one.textContent)")


def hover(page, cell=0):
    box = page.locator("#map .heatmap-label").nth(cell).bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector("#map .hovertext text.nums", timeout=20_000)
    return page.eval_on_selector("#map .hovertext", "one => one.textContent")


def policy(html):
    return re.search(r'<meta http-equiv="Content-Security-Policy"[^>]*>', html).group()


@pytest.fixture(scope="module")
def gallery():
    """Two layers in which the n-th awkward token is read at column n and predicted there."""
    ids = np.arange(len(AWKWARD))
    base = made(prompt=len(AWKWARD), layers=2, awkward=False, k=1)
    return replace(
        base,
        input_ids=ids,
        top_ids=np.tile(ids[None, :, None], (2, 1, 1)),
        # All improbable and so in dark ink: the texts then stand in the document row by row.
        top_logprob_bits=np.full((2, len(AWKWARD), 1), -3, dtype=np.float32),
        target_ids=np.append(ids[1:], -1),
        vocabulary=dict(enumerate(AWKWARD.values())),
    )


@pytest.fixture(scope="module")
def gallery_tab(module_opened, gallery):
    return module_opened(page(gallery), width=3600)


@pytest.fixture(scope="module")
def small_page(small):
    return page(small)


@pytest.fixture(scope="module")
def small_tab(module_opened, small_page):
    return module_opened(small_page, width=1600)


@pytest.mark.parametrize("column", range(len(NAMES)), ids=NAMES)
def test_an_awkward_token_shows_as_itself(column, gallery, gallery_tab):
    whole = labels(gallery.vocabulary)[column]
    shown = texts(gallery_tab, "#map .heatmap-label")[len(NAMES) + column]
    assert shown == whole or shown == labels(gallery.vocabulary, max_chars=10)[column]
    assert shown.strip("[]")[:1] == whole.strip("[]")[:1]
    assert shown in texts(gallery_tab, "#map .xaxislayer-above .xtick text")[column]
    cut = labels(gallery.vocabulary, max_chars=40)[column]
    gallery_tab.mouse.move(2, 2)
    assert f"{cut} at position {column} · layer 1" in hover(gallery_tab, len(NAMES) + column)
    assert texts(gallery_tab, ".prompt code")[column] == whole


def test_awkward_tokens_do_nothing(gallery_tab):
    assert gallery_tab.evaluate(HACKED)
    assert gallery_tab.faults == []
    assert gallery_tab.locator("img").count() == 0
    assert gallery_tab.locator("#map b, #map .MathJax, code b").count() == 0
    assert len(gallery_tab.requests) == 1


def test_a_text_that_is_not_escaped_would_be_caught(opened):
    """The twin: the same token, put raw where the page has it escaped, does run."""
    tab = opened(f'<p title="{AWKWARD["image"]}">', ready=None)
    tab.wait_for_function("window.hacked === 1", timeout=10_000)
    assert tab.locator("img").count() > 0


def test_the_page_asks_for_nothing_but_itself(small_tab):
    hover(small_tab, 3)
    small_tab.wait_for_timeout(300)
    assert len(small_tab.requests) == 1
    assert small_tab.requests[0].startswith("file:")
    assert small_tab.faults == []


def test_a_page_that_asked_for_more_would_be_seen(opened, small_page):
    """The twin: a script from outside is requested without the page's policy, refused with it."""
    outside = '<script src="http://127.0.0.1:9/x.js"></script>'
    free = opened(outside, ready=None)
    assert len(free.requests) == 2
    assert "csp" not in str(free.refused)
    held = opened(policy(small_page) + outside, ready=None)
    assert "csp" in str(held.refused)


def test_equal_tokens_stand_in_two_columns(opened):
    result = made(awkward=False)
    ids = result.input_ids.copy()
    ids[:] = ids[0]
    tab = opened(page(replace(result, input_ids=ids)), width=1600)
    heads = tab.eval_on_selector_all(
        "#map .xaxislayer-above .xtick text", "all => all.map(t => t.getBoundingClientRect().x)"
    )
    assert len({round(x) for x in heads}) == 12


def test_predictions_stand_below_the_token_and_layers_go_up(small, small_tab):
    tab = small_tab
    column, top_row = tab.evaluate(
        """() => {
          const at = (one) => {
            const box = one.getBoundingClientRect();
            return [box.x + box.width / 2, box.y];
          };
          const heads = [...document.querySelectorAll("#map .xaxislayer-above .xtick text")];
          const head = heads.find(t => t.textContent.includes("␣Paris"));
          const labels = [...document.querySelectorAll("#map .heatmap-label")];
          const cells = labels.map(one => [...at(one), one.textContent]);
          const [x, y] = at(head);
          const below = cells.filter(c => Math.abs(c[0] - x) < 20).sort((a, b) => a[1] - b[1]);
          return [below.map(c => c[2]), below[0][1] > y];
        }"""
    )
    assert top_row
    known = labels(small.vocabulary)
    shown = [known.get(int(i), f"[id {i}]") for i in small.top_ids[::-1, 5, 0]]
    assert [c[:3] for c in column] == [s[:3] for s in shown]


def test_frames_in_the_drawing_are_as_many_as_the_runs_of_agreement(small, small_tab):
    frames = small_tab.locator("#map .x4y .scatterlayer path.js-line").count()
    agree = small.agreement.astype(int)
    starts = int((np.diff(np.vstack([np.zeros((1, 12), int), agree]), axis=0) == 1).sum())
    assert frames == starts > 12


def test_512_tokens_by_31_layers_open_and_scroll(opened):
    result = made(prompt=512, layers=31)
    html = page(result)
    assert len(html) < 12e6
    tab = opened(html, width=1440)
    heads = "#map .xaxislayer-above .xtick text"
    end = texts(tab, heads)
    assert end[-1].startswith("511")
    assert 8 <= len(end) <= 40
    tab.eval_on_selector("#slide", "one => { one.scrollLeft = 0; }")
    tab.wait_for_function(
        f"() => document.querySelector('{heads}').textContent.startsWith('0')", timeout=20_000
    )
    start = texts(tab, heads)
    assert len(start) == len(end)
    assert start != end
    below = tab.evaluate("document.getElementById('map').layout.xaxis4.range")
    assert below == tab.evaluate("document.getElementById('map').layout.xaxis.range")
    assert texts(tab, "#map .yaxislayer-above .ytick text")[-1] == "30"
    assert " at position " in hover(tab, 4)
    assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert tab.faults == []


def test_a_narrow_window_shows_fewer_columns_and_a_wide_one_more(opened, small_page):
    tab = opened(small_page, width=700)
    narrow = tab.locator("#map .xaxislayer-above .xtick").count()
    tab.set_viewport_size({"width": 1600, "height": 900})
    tab.wait_for_function(
        "() => document.querySelectorAll('#map .xaxislayer-above .xtick').length === 12",
        timeout=10_000,
    )
    assert 1 <= narrow < 12
    assert not tab.is_visible("#slide")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_contrast_with_the_ground_in_both_schemes(scheme, opened, small_page):
    tab = opened(small_page, color_scheme=scheme)
    ink, ground = tab.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    light = [sum(map(int, re.findall(r"\d+", colour))) / 3 for colour in (ink, ground)]
    assert abs(light[0] - light[1]) > 150
    assert (light[1] < 80) is (scheme == "dark")


def test_without_scripts_the_page_shows_the_table(opened, small_page):
    tab = opened(small_page, ready="table", java_script_enabled=False)
    assert tab.locator("td").count() == 13 * 12


def test_the_notebook_table_shows_every_label_as_text(opened, small):
    tab = opened(
        f"<!DOCTYPE html><meta charset=utf-8>{notebook_bundle(small)['text/html']}", ready="td"
    )
    shown = texts(tab, "td code")
    assert len(shown) == 13 * 12
    assert shown[:12] == [
        labels(small.vocabulary, max_chars=12).get(int(i), f"[id {i}]")
        for i in small.top_ids[-1, :, 0]
    ]
    assert tab.evaluate(HACKED)


def test_a_page_with_mathjax_would_not_see_a_formula(opened):
    """plotly hands `$...$` to MathJax where a page has it; here one that only notes the call."""
    result = replace(made(prompt=3, layers=2, k=1), vocabulary=dict.fromkeys(range(96), "$$x^2$$"))
    spy = """<script>
    window.MathJax = {version: "3.2", get _() { window.asked = true; throw "no"; }};
    </script>"""
    # plotly's own configuration, which typesets, so that the escaping stands alone.
    figure = heatmap(result)
    html = figure.to_html(include_plotlyjs=True, div_id="map")
    tab = opened(html.replace("<head>", "<head>" + spy, 1), ready=".heatmap-label")
    assert "$$x^2$$" in texts(tab, "#map .heatmap-label")[0]
    assert "$$x^2$$" in "".join(texts(tab, "#map .xaxislayer-above .xtick text"))
    assert tab.evaluate("window.asked === undefined")
    figure.layout.title.text = "$x$"  # the twin: a raw formula is handed over
    twin = figure.to_html(include_plotlyjs=True, div_id="map")
    other = opened(twin.replace("<head>", "<head>" + spy, 1), ready=None)
    other.wait_for_function("() => window.asked", timeout=20_000)
