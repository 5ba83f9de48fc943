"""The section that takes the distance apart: what closes it, layer by layer, in two orders."""

import numpy as np

from lens.measuring.correction import ORDERS, TERMS
from lens.measuring.decomposition import READOUT_FIRST, Decomposition
from lens.show.bars import Bar, bar_key, bars
from lens.trust import markup

LEFT = "not linearly there"


def gap_section(found: Decomposition | None, *, level: int, anchor: str, why: str = "") -> str:
    """The bars of one order, and every drop of both with its interval."""
    title = markup.heading(level, "What would close the distance", anchor=anchor)
    if found is None:
        return title + markup.paragraph(f"Not taken apart: {why}.", "note")
    source = found.provenance
    names = (*TERMS, LEFT)
    drawing = bars(
        [_bar(found, layer) for layer in found.layers.tolist()],
        x_title="bits of KL(final ‖ lens) on held-out documents",
        alt="what closes the distance",
    )
    return "".join(
        [
            title,
            markup.paragraph(
                "One family of corrections, freed one after another, fitted by KL on "
                f"{source.n_fit_positions:,} positions of {source.fitted_on} and measured on "
                f"{int(found.counts.sum()):,} positions of {source.corpus_name}: a temperature, a "
                "bias over the vocabulary (frequency), a shift, a scale for each dimension, a "
                "rotation, any linear map. What none of them removes is not linearly there, as far "
                "as so many positions can tell. Drops depend on the order, so there are two; "
                "below 0: the correction fits its own documents and does harm on others."
            ),
            f'<figure class="wide">{bar_key(names)}{drawing}</figure>',
            *(_order_table(found, order) for order in ORDERS),
        ]
    )


def _bar(found: Decomposition, layer: int) -> Bar:
    drops = found.drops(layer)
    place = found.layers.tolist().index(layer)
    left = float(found.kl_bits()[place, -1])
    sizes = (*(float(d) for d in drops.estimate), left)
    hints = [
        f"layer {layer}, {term}: {d:+.3f} bits [{low:+.3f}, {high:+.3f}]"
        for term, d, low, high in zip(TERMS, drops.estimate, drops.low, drops.high, strict=True)
    ]
    return Bar(name=f"layer {layer}", sizes=sizes, hints=(*hints, f"{LEFT}: {left:.3f} bits"))


def _order_table(found: Decomposition, order: str) -> str:
    rows = []
    for place, layer in enumerate(found.layers.tolist()):
        drops, kl = found.drops(layer, order), found.kl_bits(order)[place]
        cells = [
            f"{d:+.2f} [{low:+.2f}, {high:+.2f}]"
            for d, low, high in zip(drops.estimate, drops.low, drops.high, strict=True)
        ]
        rows.append((str(layer), f"{kl[0]:.2f}", *cells, f"{np.maximum(kl[-1], 0):.2f}"))
    headings = ("layer", "logit lens", *ORDERS[order], LEFT)
    first = "" if order == READOUT_FIRST else "The same in another order: "
    return markup.paragraph(f"{first}{order}, drops in bits, 95 % over documents.", "note") + (
        markup.table(headings, rows, kind="number small")
    )
