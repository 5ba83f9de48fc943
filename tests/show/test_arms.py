from typing import Any

import numpy as np
import pytest

from lens.errors import SelectionError
from lens.show.arms import Panel, arm_curves

VALUES = np.array([[4.0, 2.0, 0.0], [6.0, 2.0, 0.0]])


def drawn(**more: Any) -> Any:
    panel = Panel(heading="KL, bits", arms={"tied": VALUES, "a<b": 2 * VALUES}, **more)
    return arm_curves(panel, title="Finding", subtitle="2 seeds")


def thick(figure: Any) -> list[Any]:
    return [trace for trace in figure.data if trace.mode == "lines+markers"]


def test_thick_lines_are_the_means_and_thin_ones_the_seeds() -> None:
    figure = drawn()
    assert [list(t.y) for t in thick(figure)] == [[5.0, 2.0, 0.0], [10.0, 4.0, 0.0]]
    thin = [t for t in figure.data if t.mode == "lines"]
    assert [list(t.y) for t in thin[:2]] == VALUES.tolist()


def test_a_logarithm_of_zero_is_left_out_and_not_drawn_low() -> None:
    figure = drawn(logarithmic=True)
    assert np.isnan(thick(figure)[0].y[-1])
    assert figure.layout.yaxis.type == "log"
    assert drawn().layout.yaxis.type == "linear"


def test_names_are_escaped_and_stand_once_in_the_legend() -> None:
    panels = [Panel(heading=h, arms={"a<b": VALUES}) for h in ("one", "two")]
    figure = arm_curves(*panels, title="t", subtitle="s")
    assert [t.showlegend for t in thick(figure)] == [True, False]
    assert "a<b" not in str(thick(figure)[0].name)


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(SelectionError, match="panel"):
        arm_curves(title="t", subtitle="s")
