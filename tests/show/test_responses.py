from typing import Any

import numpy as np
import pytest

from lens.errors import SelectionError, ShapeError
from lens.show.responses import Response, response_lines

DOSE = np.array([0.1, 1.0, 10.0])
VALUES = np.array([[1.0, 2.0, 3.0], [3.0, 2.0, 5.0]])


def drawn(**more: Any) -> Any:
    groups = {"d < 48": Response(dose=DOSE, values=VALUES)}
    panels = {"dG, bits": groups, "d loss, bits": groups}
    return response_lines(panels, dose="V d / N", title="Finding", subtitle="2 seeds", **more)


def lines(figure: Any) -> list[Any]:
    return [trace for trace in figure.data if trace.mode == "lines+markers"]


def test_lines_join_the_means_and_dots_are_the_seeds() -> None:
    figure = drawn()
    assert [list(t.y) for t in lines(figure)] == [[2.0, 2.0, 4.0]] * 2
    dots = [list(t.y) for t in figure.data if t.mode == "markers"]
    assert dots == VALUES.tolist() * 2
    assert all(list(t.x) == DOSE.tolist() for t in figure.data)


def test_a_name_is_escaped_and_stands_once_in_the_legend() -> None:
    first, second = lines(drawn())
    assert (first.showlegend, second.showlegend) == (True, False)
    assert "d < 48" not in str(first.name)


def test_the_dose_s_axis_is_as_asked() -> None:
    assert drawn().layout.xaxis.type == "linear"
    assert drawn(logarithmic=True).layout.xaxis2.type == "log"


def test_shapes_that_do_not_agree_and_no_panel_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"\[seed, 3\]"):
        Response(dose=DOSE, values=VALUES[:, :2])
    with pytest.raises(SelectionError, match="panel"):
        response_lines({}, dose="d", title="t", subtitle="s")
