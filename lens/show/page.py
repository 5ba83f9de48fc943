"""One HTML page that holds a heatmap, its words and plotly.js: it opens with no network."""

import json
from dataclasses import asdict
from importlib.resources import files
from string import Template

from plotly.offline import get_plotlyjs

from lens.lenses.predictions import LayerPredictions
from lens.show.finding import finding, source_line
from lens.show.frame import AROUND_PX, BAR_PX, GAP_PX, LEFT_PX, STRIP_PX, explained, measured
from lens.show.heatmap import CONFIG, heatmap
from lens.show.labels import for_html, id_label, labels, token_html
from lens.show.strip import layer_means
from lens.show.table import prediction_table

MOST_PROMPT_TOKENS = 600

_TOP_PX, _BOTTOM_PX = 64, 62


def page(predictions: LayerPredictions, *, colour: str = "probability") -> str:
    """A whole HTML document: the finding, the live heatmap, what its marks mean, its source.

    The map shows as many columns as the window holds; a scroll bar beneath it, the wheel and
    dragging move along the prompt while the layers and the strip stay in view. Everything is
    inside, plotly.js too (5 MB); a content policy in the page forbids loading anything else.
    """
    shape = Template((files("lens.show") / "page.html").read_text(encoding="utf-8"))
    return shape.substitute(
        title=for_html(finding(predictions)),
        source=for_html(source_line(predictions)),
        prompt=_prompt(predictions),
        explained=for_html(explained(predictions, layer_means(predictions))),
        facts=_facts(predictions),
        table=prediction_table(predictions),
        plotly=get_plotlyjs(),
        data=_in_script(_figure_json(predictions, colour)),
    )


def _figure_json(predictions: LayerPredictions, colour: str) -> str:
    """The figure without its words, and the sizes that the page fits to the window."""
    means = layer_means(predictions)
    frame = measured(predictions, means, title="", max_width_px=1240)
    height = frame.height_between(_TOP_PX, _BOTTOM_PX)
    figure = heatmap(predictions, colour=colour, title="", max_width_px=1240)
    figure.update_layout(
        title=None,
        margin={"t": _TOP_PX, "b": height - _TOP_PX - frame.row * frame.n_rows},
        height=height,
    )
    figure.layout.annotations = ()
    sizes = {
        "column": frame.column,
        "count": frame.n_columns,
        "fromEnd": predictions.provenance.target != "same",
        "around": AROUND_PX,
        "left": LEFT_PX,
        "bar": BAR_PX,
        "strip": STRIP_PX,
        "gap": GAP_PX,
    }
    config = json.dumps({**CONFIG, "responsive": False})
    return f'{{"figure":{figure.to_json()},"sizes":{json.dumps(sizes)},"config":{config}}}'


def _in_script(text: str) -> str:
    """JSON that cannot end the script element that holds it, whatever its strings say."""
    return text.replace("<", "\\u003c")


def _prompt(predictions: LayerPredictions) -> str:
    shown = labels(predictions.vocabulary)
    ids = predictions.input_ids.tolist()
    tokens = "".join(token_html(id_label(token, shown)) for token in ids[:MOST_PROMPT_TOKENS])
    more = len(ids) - MOST_PROMPT_TOKENS
    return tokens + (f" and {more} more tokens" if more > 0 else "")


def _facts(predictions: LayerPredictions) -> str:
    """What the result comes from, one line for each field of its provenance."""
    source = asdict(predictions.provenance)
    versions = ", ".join(f"{name} {number}" for name, number in source.pop("versions").items())
    notes = source.pop("notes")
    lines = {name.replace("_", " "): value for name, value in source.items() if value is not None}
    lines |= {"versions": versions, **{f"note {i}": text for i, text in enumerate(notes, 1)}}
    return "".join(
        f"<dt>{for_html(name)}</dt><dd>{for_html(str(value))}</dd>" for name, value in lines.items()
    )
