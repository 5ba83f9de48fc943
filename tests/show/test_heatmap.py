import hashlib
import re
from dataclasses import replace

import numpy as np
import plotly.graph_objects as go
import plotly.io as pio
import pytest

from lens.errors import SelectionError
from lens.show.cells import COLOURS, INK, LIGHT_TO_DARK, WHITE, dark_cells, runs
from lens.show.finding import finding, settling_rows
from lens.show.heatmap import heatmap, notebook_bundle
from lens.show.strip import layer_means
from tests.show.made import made


def map_of(figure):
    return figure.data[0]


def spread(values):
    """What plotly holds for an array, whether it keeps it as bytes or not."""
    return np.asarray(values)


def test_layers_go_up_and_each_column_is_headed_by_the_token_read_there(small):
    figure = heatmap(small)
    layout = figure.layout
    assert [t.split()[-1] for t in layout.yaxis.ticktext] == [str(n) for n in range(13)]
    assert list(layout.yaxis.range) == [-0.5, 12.5]
    assert layout.xaxis.side == "top"
    assert len(layout.xaxis.ticktext) == 12
    assert "Paris" in layout.xaxis.ticktext[5]
    assert small.tokens[5] == " Paris"


def test_rows_within_blocks_have_half_numbers_and_the_axis_says_so(small):
    mids = replace(small, layers=np.arange(13) / 2)
    layout = heatmap(mids).layout
    assert [t.split()[-1] for t in layout.yaxis.ticktext][:4] == ["0", "0.5", "1", "1.5"]
    assert "between attention and MLP" in layout.yaxis.title.text
    assert map_of(heatmap(mids)).customdata[1][0][1] == "0.5"
    plain = heatmap(small).layout
    assert "between attention and MLP" not in plain.yaxis.title.text
    assert map_of(heatmap(small)).customdata[1][0][1] == "1"


def test_a_cell_says_its_own_top_1_in_ink_that_can_be_read(small):
    cells, sheet = heatmap(small).data[:2]
    both = [
        [a + b for a, b in zip(*rows, strict=True)]
        for rows in zip(cells.text, sheet.text, strict=True)
    ]
    assert all(text for row in both for text in row)
    assert (
        sum(bool(t) for row in cells.text for t in row)
        + sum(bool(t) for row in sheet.text for t in row)
        == 13 * 12
    )
    assert (cells.textfont.color, sheet.textfont.color) == (INK, WHITE)
    paris = next(i for i, text in small.vocabulary.items() if text == " Paris")
    for row, column in np.argwhere(small.top_ids[:, :, 0] == paris):
        assert both[row][column] == "␣Paris"


def test_ink_contrast_is_at_least_4_to_1_on_every_colour_of_the_scale():
    shades = np.linspace(0, 1, 201)[None]
    white = dark_cells(shades)[0]
    assert not white[0]
    assert white[-1]
    assert (np.diff(white.astype(int)) >= 0).all()
    ratio = [
        _contrast(_mixed(s), WHITE if w else INK) for s, w in zip(shades[0], white, strict=True)
    ]
    assert min(ratio) >= 4.0
    wrong = [
        _contrast(_mixed(s), INK if w else WHITE) for s, w in zip(shades[0], white, strict=True)
    ]
    assert max(wrong) < 4.5


def _mixed(shade):
    place = shade * (len(LIGHT_TO_DARK) - 1)
    low = min(int(place), len(LIGHT_TO_DARK) - 2)
    a, b = (np.array(_rgb(LIGHT_TO_DARK[i])) for i in (low, low + 1))
    return a + (b - a) * (place - low)


def _rgb(text):
    return [int(text[i : i + 2], 16) for i in (1, 3, 5)]


def _luminance(rgb):
    channel = np.asarray(rgb) / 255
    linear = np.where(channel <= 0.04045, channel / 12.92, ((channel + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def _contrast(ground, ink):
    light, dark = sorted([_luminance(ground), _luminance(_rgb(ink))], reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_equal_tokens_keep_their_own_columns():
    twice = made(prompt=12)
    twice = replace(twice, input_ids=np.full(12, twice.input_ids[0]))
    figure = heatmap(twice)
    assert spread(map_of(figure).x).tolist() == list(range(12))
    assert len(figure.layout.xaxis.ticktext) == 12
    assert list(figure.layout.xaxis.tickvals) == list(range(12))
    assert figure.layout.xaxis.type in (None, "linear")


@pytest.mark.parametrize("name", COLOURS)
def test_each_colour_shows_its_own_numbers(name, small):
    expected = {
        "probability": np.exp2(small.top_logprob_bits[:, :, 0]),
        "entropy": small.entropy_bits,
        "kl": np.log10(1 + small.kl_bits.astype(np.float64)),
        "rank": np.log10(1 + small.final_top_rank),
    }[name]
    drawn = map_of(heatmap(small, colour=name))
    # Drawn as float32: half a unit of its last place.
    np.testing.assert_allclose(spread(drawn.z), expected, rtol=2**-23)
    assert drawn.zmin == 0
    assert drawn.zmax >= expected.max() - 1e-5
    dark_is_low = name != "probability"
    colours = [colour for _, colour in drawn.colorscale]
    assert (colours[0] == LIGHT_TO_DARK[-1]) is dark_is_low


def test_a_colour_that_does_not_exist_lists_those_that_do(small):
    with pytest.raises(SelectionError, match="probability, entropy, kl, rank"):
        heatmap(small, colour="KL")


def test_frames_hold_exactly_the_cells_that_equal_the_final_top_1(small):
    line = heatmap(small).data[2]
    x, y = np.array(line.x, dtype=float), np.array(line.y, dtype=float)
    inside = np.zeros((13, 12), dtype=int)
    for k in range(0, len(x), 6):
        rows = slice(round(y[k : k + 5].min() + 0.44), round(y[k : k + 5].max() - 0.44) + 1)
        inside[rows, round(x[k : k + 5].mean())] += 1
    np.testing.assert_array_equal(inside, small.agreement.astype(int))
    other = replace(small, final_top_ids=np.roll(small.final_top_ids, 1))
    assert not np.array_equal(inside, other.agreement.astype(int))


def test_no_agreement_draws_no_frame(small):
    never = replace(small, final_top_ids=np.full(12, 10_000))
    assert [v for v in heatmap(never).data[2].x if v is not None] == []
    assert runs(never.agreement).shape == (0, 3)


def test_hover_gives_top_k_with_probabilities_and_every_number_with_its_unit(small):
    drawn = map_of(heatmap(small))
    parts = drawn.customdata[7][5]
    words = drawn.hovertemplate
    for i, part in enumerate(parts):
        words = words.replace(f"%{{customdata[{i}]}}", part)
    share = 100 * 2.0 ** float(small.top_logprob_bits[7, 5, 0])
    assert "␣Paris at position 5</b> · layer 7 of 12" in words
    assert f" {share:.3g} %" in words.split("<br>")[1]
    assert f"entropy {small.entropy_bits[7, 5]:.3g} bits" in words
    assert f"KL(final ‖ layer) {small.kl_bits[7, 5]:.3g} bits" in words
    assert f"rank {small.target_rank[7, 5]}" in words
    assert f"self-copy mass {100 * small.self_copy_mass[7, 5]:.3g} %" in words
    assert "%{" not in words.replace("%{x}", "")
    assert "none: the prompt ends here" in drawn.customdata[7][11]


def test_the_strip_leaves_position_0_out_and_says_so(small):
    means = layer_means(small)
    np.testing.assert_allclose(means.kl_bits, small.kl_bits[:, 1:].mean(1), rtol=1e-6)
    np.testing.assert_allclose(means.agreement, small.agreement[:, 1:].mean(1))
    assert not np.allclose(means.kl_bits, small.kl_bits.mean(1), rtol=1e-4)
    assert "position 0 left out" in heatmap(small).layout.annotations[0].text
    alone = layer_means(small.select(positions=[0]))
    np.testing.assert_allclose(alone.kl_bits, small.kl_bits[:, 0])
    assert alone.over == "1 position"
    assert "left out" not in layer_means(small.select(positions=[3, 4])).over


def test_the_strip_draws_bits_in_decades_and_tells_them_plainly(small):
    figure = heatmap(small)
    curve, axis = figure.data[3], figure.layout.xaxis2
    means = layer_means(small).kl_bits
    np.testing.assert_allclose(10 ** np.array(curve.x) - 1, means, atol=1e-9)
    assert list(curve.text) == [f"{value:.3g}" for value in means]
    assert list(axis.ticktext) == ["0", "1", "10"]
    np.testing.assert_allclose(10 ** np.array(axis.tickvals) - 1, [0, 1, 10])
    assert curve.x[-1] == 0 == axis.tickvals[0]


def test_a_layer_without_self_copy_numbers_leaves_a_gap_in_the_strip(small):
    mass = small.self_copy_mass.copy()
    mass[3] = np.nan
    figure = heatmap(replace(small, self_copy_mass=mass))
    assert figure.data[4].x[3] is None
    assert figure.data[4].x[2] is not None


def test_rows_ruled_by_self_copy_are_marked(small):
    ruled = small.ruled_by_self_copy
    assert 0 < ruled.sum() < 13
    layout = heatmap(small).layout
    assert ["↺" in text for text in layout.yaxis.ticktext] == ruled.tolist()
    assert len(layout.shapes) == ruled.sum()
    assert "self-copy" in layout.annotations[0].text
    masked = heatmap(made(target="same")).layout
    assert not masked.shapes
    assert "↺" not in masked.annotations[0].text


def test_the_title_states_from_which_layer_on_the_answer_is_read(small):
    row = int(settling_rows(small)[-1])
    assert small.agreement[row:, -1].all()
    assert not small.agreement[row - 1, -1]
    words = finding(small)
    assert f"from layer {row} of 12 on" in words
    title = heatmap(small).layout.title
    assert title.text.replace("<br>", " ").startswith("<b>The model's answer")
    assert "output lens (W_U) · tied" in title.subtitle.text
    assert "made/up-model" in title.subtitle.text


def test_an_answer_that_leaves_again_has_not_settled():
    agree = np.zeros((4, 3), dtype=bool)
    agree[1:, 0] = True
    agree[[1, 3], 1] = True
    ids = np.where(agree, 7, 1)[:, :, None]
    cut = made(k=1).select(layers=[0, 1, 2, 3], positions=[1, 2, 3])
    cut = replace(cut, top_ids=ids, final_top_ids=np.full(3, 7))
    assert settling_rows(cut).tolist() == [1, 3, 4]
    assert "not top-1 at layer 3, the last one read" in finding(cut)


def test_words_fit_every_kind_of_result(small):
    assert "Half of the" in finding(made(target="same"))
    assert ";" not in finding(small.select(positions=[4]))
    assert finding(small.select(positions=[])) == "Nothing was read: no layer or no position"
    assert "input lens (W_E)" in heatmap(made(lens="input")).layout.title.subtitle.text


@pytest.mark.parametrize("layers", [[12], [0, 6, 12]])
def test_few_layers_and_positions_still_draw(layers, small):
    figure = heatmap(small.select(layers=layers, positions=[-1 % 12, 2]))
    assert [t.split()[-1] for t in figure.layout.yaxis.ticktext] == [str(n) for n in layers]
    assert "11" in figure.layout.xaxis.ticktext[0]
    heatmap(small.select(positions=[]))


def test_a_title_and_a_model_name_are_text_not_markup(small):
    figure = heatmap(small, title="<b>$$ mine")
    assert figure.layout.title.text == "<b>&lt;b&gt;&#36;&#36; mine</b>"
    named = heatmap(made(model_id="<script>"))
    assert "<script" not in named.layout.title.subtitle.text


def test_numbers_that_are_not_finite_still_draw(small):
    kl = small.kl_bits.copy()
    kl[0, 0], kl[1, 1] = np.nan, np.inf
    drawn = map_of(heatmap(replace(small, kl_bits=kl), colour="kl"))
    assert np.isfinite(spread(drawn.z)).all()
    assert drawn.customdata[0][0][-4] == "–"


def test_plotly_stays_as_the_user_set_it(small):
    before = pio.templates.default
    mine = go.layout.Template(layout={"paper_bgcolor": "#ff0000", "font": {"size": 33}})
    pio.templates["mine"] = mine
    pio.templates.default = "mine"
    try:
        with_mine = heatmap(small)
        assert pio.templates.default == "mine"
        assert pio.templates["mine"] == mine
    finally:
        pio.templates.default = before
        del pio.templates["mine"]
    assert with_mine.to_json() == heatmap(small).to_json()


def test_the_same_result_draws_the_same_figure(small):
    def digest():
        return hashlib.sha256(str(heatmap(small).to_json()).encode()).hexdigest()

    assert digest() == digest()


def test_a_wide_prompt_shows_its_end_and_none_shows_it_whole():
    wide = made(prompt=60, layers=3, awkward=False)
    part, whole = heatmap(wide), heatmap(wide, max_width_px=None)
    assert part.layout.width <= 1400
    first, last = part.layout.xaxis.range
    assert (first > 0, last) == (True, 59.5)
    caption = part.layout.annotations[0].text.replace("<br>", " ")
    assert f"The last {last - first:.0f} of 60 positions are in view" in caption
    assert list(whole.layout.xaxis.range) == [-0.5, 59.5]
    assert "in view" not in whole.layout.annotations[0].text
    masked = heatmap(made(prompt=60, layers=3, awkward=False, target="same")).layout
    assert masked.xaxis.range[0] == -0.5
    assert "The first" in masked.annotations[0].text


def test_columns_grow_narrower_before_any_leaves_the_view():
    texts = {i: f" longword{i}" for i in range(96)}
    result = replace(made(prompt=18, layers=3), vocabulary=texts)
    roomy = heatmap(result, max_width_px=None).layout
    tight = heatmap(result, max_width_px=roomy.width - 40).layout
    assert list(tight.xaxis.range) == [-0.5, 17.5]
    assert tight.width <= roomy.width - 40
    assert heatmap(result, max_width_px=900).layout.xaxis.range[0] > 0


def test_the_notebook_gets_a_live_figure_and_a_plain_table(small):
    bundle = notebook_bundle(small)
    assert set(bundle) == {"application/vnd.plotly.v1+json", "text/html", "text/plain"}
    table = bundle["text/html"]
    for forbidden in ("<script", "<style", "<img", "<link", "http:", "https:"):
        assert forbidden not in table
    assert table.count("<td") == 13 * 12
    assert small._repr_mimebundle_() == bundle
    sizes = sum(len(str(part)) for part in bundle.values())
    assert sizes < 200_000


def test_a_dollar_in_the_table_stands_only_where_mathjax_does_not_look():
    """Jupyter typesets `$...$` in HTML output, but not inside <code>."""
    priced = made(prompt=3, layers=2, model_id="a/$b$")
    priced = replace(priced, vocabulary=dict.fromkeys(range(96), "$$x$$"))
    table = notebook_bundle(priced)["text/html"]
    assert table.count("$") > 10
    assert "$" not in re.sub(r"<code[^>]*>[^<]*</code>", "", table)
