"""The heatmap as a plain HTML table: no script, no style sheet, no plotly."""

import numpy as np

from lens.lenses.predictions import LayerPredictions
from lens.show.cells import INK, LIGHT_TO_DARK, WHITE, dark_cells
from lens.show.finding import finding, source_line
from lens.show.labels import for_html, id_label, labels, token_html
from lens.show.strip import AGREEMENT

MOST_COLUMNS = 32

_CELL = "padding:2px 5px;text-align:center;white-space:nowrap"


def prediction_table(predictions: LayerPredictions) -> str:
    """One HTML table: layers up, tokens along, top-1 in each cell, darker where it is likelier.

    Styles stand in the elements, because Jupyter and GitHub drop style sheets and scripts from
    what they do not trust. Of a prompt longer than 32 positions the last 32 are shown, and the
    caption says so.
    """
    shown = labels(predictions.vocabulary, max_chars=12)
    columns = np.arange(len(predictions.positions))[-MOST_COLUMNS:]
    heads = "".join(
        f'<th title="position {position}" style="text-align:center">'
        f"{token_html(id_label(int(predictions.input_ids[position]), shown))}</th>"
        for position in predictions.positions[columns].tolist()
    )
    lines = [
        _row(predictions, row, columns, shown) for row in reversed(range(len(predictions.layers)))
    ]
    return (
        f'<div style="overflow-x:auto"><table style="font-size:12px">'
        f"<caption>{_caption(predictions, len(columns))}</caption>"
        f"<thead><tr><th>layer</th>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _caption(predictions: LayerPredictions, n_columns: int) -> str:
    parts = [
        f"<b>{for_html(finding(predictions))}</b>",
        for_html(source_line(predictions)),
        "Each cell: the top-1 predicted from the token at the head of its column, darker where it "
        "is likelier; framed: the model's own final top-1; ↺: the layer mostly repeats its input.",
    ]
    if n_columns < len(predictions.positions):
        parts.append(f"The last {n_columns} of {len(predictions.positions)} positions.")
    # A dollar outside <code> would be typeset by Jupyter.
    return "<br>".join(parts).replace("$", "<code>$</code>")


def _row(
    predictions: LayerPredictions, row: int, columns: np.ndarray, shown: dict[int, str]
) -> str:
    mark = "↺ " if predictions.ruled_by_self_copy[row] else ""
    cells = "".join(_cell(predictions, row, column, shown) for column in columns.tolist())
    return f"<tr><th>{mark}{predictions.layer_names[row]}</th>{cells}</tr>"


def _cell(predictions: LayerPredictions, row: int, column: int, shown: dict[int, str]) -> str:
    share = float(np.exp2(np.float64(predictions.top_logprob_bits[row, column, 0])))
    last = len(LIGHT_TO_DARK) - 1
    step = round(float(np.clip(np.nan_to_num(share), 0, 1)) * last)
    back = LIGHT_TO_DARK[step]
    ink = WHITE if dark_cells(np.full((1, 1), step / last))[0, 0] else INK
    # Where borders collapse the wider one wins, so that every frame is whole.
    frame = f"3px solid {AGREEMENT}" if predictions.agreement[row, column] else f"1px solid {back}"
    hint = f"{100 * share:.3g} %, entropy {predictions.entropy_bits[row, column]:.3g} bits"
    # The colours stand on <code> too: Jupyter's own style for it would win over the cell's.
    colours = f"background-color:{back};color:{ink}"
    text = token_html(id_label(predictions.top_ids[row, column, 0], shown)).replace(
        "<code>", f'<code style="{colours}">'
    )
    return f'<td title="{hint}" style="{_CELL};border:{frame};{colours}">{text}</td>'
