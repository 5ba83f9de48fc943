"""Static curves and ribbons: the drawing holds the numbers."""

import re

import numpy as np
import pytest

from lens.show.chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Line, chart, legend
from lens.show.ribbons import Ribbon, ribbons
from lens.show.scales import Scale, scale_of, tick_text

X = np.arange(5.0)
Y = np.array([0.0, 10.0, 5.0, 2.5, 0.0])


def points(svg: str, kind: str = "line") -> list[tuple[float, float]]:
    path = re.search(rf'<path class="{kind} c0"[^>]* d="([^"]+)"', svg)
    assert path is not None
    return [(float(a), float(b)) for a, b in re.findall(r"([\d.]+) ([\d.]+)", path[1])]


def drawn(**options: object) -> str:
    line = Line(name="a", x=X, y=Y, low=Y - 1, high=Y + 1)
    return chart([line], x_title="layer", y_title="bits", **options)  # type: ignore[arg-type]


def test_points_stand_at_their_numbers() -> None:
    found = points(drawn(y_range=(0.0, 10.0)))
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    for (across, down), x, y in zip(found, X, Y, strict=True):
        assert across == pytest.approx(LEFT + width * x / 4, abs=0.06)
        assert down == pytest.approx(HEIGHT - BOTTOM - height * y / 10, abs=0.06)


def test_the_interval_is_drawn_around_the_curve() -> None:
    svg = drawn(y_range=(-2.0, 12.0))
    area, line = points(svg, "area"), points(svg)
    upper, lower = area[:5], area[:4:-1]
    assert all(u[1] < m[1] < lo[1] for u, m, lo in zip(upper, line, lower, strict=True))


def test_a_number_that_is_not_there_leaves_a_gap() -> None:
    y = Y.copy()
    y[2] = np.nan
    svg = chart([Line(name="a", x=X, y=y)], x_title="layer", y_title="bits")
    assert svg.count('class="line c0"') == 2
    assert svg.count("<circle") == 4
    assert "nan" not in svg


def test_numbers_that_are_all_absent_draw_a_frame() -> None:
    svg = chart([Line(name="a", x=X, y=np.full(5, np.nan))], x_title="layer", y_title="bits")
    assert "nan" not in svg
    assert "inf" not in svg


def test_words_are_escaped_in_drawings_and_keys() -> None:
    bad = "</title><script>"
    line = Line(name=bad, x=X, y=Y)
    svg = chart([line], x_title=bad, y_title=bad, level=1.0, level_name=bad, alt=bad)
    row = Ribbon(name=bad, states=("yes",), texts=(bad,), hints=(bad,))
    for html in (svg, legend([line]), ribbons([row], alt=bad)):
        assert bad not in html
        assert "&lt;script&gt;" in html


@pytest.mark.parametrize(
    ("low", "high", "options", "ticks"),
    [
        (0.0, 4.0, {"whole": True}, (0, 1, 2, 3, 4)),
        (0.0, 2.0, {"whole": True}, (0, 1, 2)),
        (0.0, 1.0, {}, (0, 0.2, 0.4, 0.6, 0.8, 1)),
        (-1.0, 1.0, {}, (-1, -0.5, 0, 0.5, 1)),
        (0.0, 1029.0, {"spacing": "decades"}, (0, 1, 10, 100, 1000)),
        (3.0, 3.0, {}, (2.6, 2.8, 3, 3.2, 3.4)),
    ],
)
def test_ticks_are_round_and_inside(
    low: float, high: float, options: dict, ticks: tuple[float, ...]
) -> None:
    found = scale_of(low, high, **options)
    assert set(ticks) <= set(found.ticks)
    assert all(found.low <= tick <= found.high for tick in found.ticks)
    assert len(found.ticks) <= 10


def test_decades_give_small_and_large_numbers_room() -> None:
    scale = Scale(low=0.0, high=999.0, spacing="decades", ticks=())
    assert scale.place(0.0) == 0
    assert scale.place(999.0) == 1
    assert scale.place(9.0) == pytest.approx(1 / 3)
    even = Scale(low=0.0, high=999.0, spacing="even", ticks=())
    assert even.place(9.0) < 0.01
    both = Scale(low=-9.0, high=9.0, spacing="decades", ticks=())
    assert both.place(0.0) == pytest.approx(0.5)


def test_tick_texts_are_short() -> None:
    assert [tick_text(v) for v in (0.0, 0.25, 1000.0, -3.0)] == ["0", "0.25", "1,000", "-3"]


def test_a_ribbon_has_a_cell_for_each_layer_in_its_state() -> None:
    states = ("no", "undecided", "yes", "absent")
    row = Ribbon(name="a", states=states, texts=("0", "1", "2", ""), hints=("p", "q", "r", "s"))
    svg = ribbons([row], alt="all")
    cells = re.findall(r"<g><title>(\w)</title><rect class=\"good (\w+)\"", svg)
    assert cells == list(zip("pqrs", states, strict=True))
    assert svg.count("url(#hatch)") == 1


def test_small_differences_get_ticks_beside_zero() -> None:
    assert scale_of(-0.03, 0.02, spacing="decades").ticks == (-0.03, -0.02, -0.01, 0.0, 0.01, 0.02)
    assert len(scale_of(-20.0, 0.5, spacing="decades").ticks) >= 4
