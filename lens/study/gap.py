"""Twins of a seed looked at closer: what closes the gap of their lens, and how early they decide.

Source: metrics.md 7 and 10. It takes about as long as the rest of a row, so that it is done for the
first seeds of the core pair alone.
"""

from pathlib import Path
from typing import Any

import numpy as np

from lens.checkpoint.load import load
from lens.measuring.correction import ORDERS
from lens.measuring.decompose import decompose
from lens.measuring.depth import KINDS
from lens.measuring.measure import measure
from lens.study.measured import finished_run, numbers, write_json
from lens.study.recipe import recipe_of
from lens.study.run import branch_folder, read_formatted
from lens.study.texts import StudyTexts

FORMAT = "lens-study-gap-1"
GAP_SEEDS = 2
"""Seeds of the core pair that this is done for."""

GAP_DOCUMENTS = 64
"""Held-out documents that are measured, and training documents that are fitted on."""


def measure_gap(
    folder: str | Path, texts: StudyTexts, *, positions: int = 1024, fit_positions: int = 2048
) -> dict[str, Any]:
    """The decomposition of KL(final || logit lens), and depth by the model's own entropy.

    Of the last branch of a finished run; `depth` holds how many positions settle at each layer
    [kind][entropy bin][layer, never]. Raises ResultFileError where the run is not finished or
    belongs to other texts.
    """
    place = Path(folder)
    run = finished_run(place, texts)
    recipe = recipe_of(run)
    model = load(branch_folder(place, recipe.branch_at[-1]))
    held_out = texts.held_out.take(GAP_DOCUMENTS)
    apart = decompose(
        model,
        held_out,
        fit_on=texts.train.in_runs().take(GAP_DOCUMENTS),
        positions=positions,
        fit_positions=fit_positions,
        max_documents=GAP_DOCUMENTS,
        window_tokens=recipe.window_tokens,
    )
    profile = measure(model, held_out, window_tokens=recipe.window_tokens)
    return {
        "format": FORMAT,
        "arm": run["arm"]["name"],
        "seed": run["seed"],
        "texts": run["texts"],
        "versions": run["versions"],
        "positions": int(apart.counts.sum()),
        "fit_positions": apart.provenance.n_fit_positions,
        "layers": apart.layers.tolist(),
        "orders": {
            order: {
                "terms": list(terms),
                "kl": [numbers(of_layer) for of_layer in apart.kl_bits(order)],
                "temperature": [numbers(t) for t in apart.temperatures[number]],
            }
            for number, (order, terms) in enumerate(ORDERS.items())
        },
        "depth": dict(zip(KINDS, profile.depths.sum(axis=0).tolist(), strict=True)),
    }


def write_gap(folder: str | Path, results: str | Path, texts: StudyTexts) -> Path:
    """What `measure_gap` finds of a run, as gap-ARM-N.json."""
    row = measure_gap(folder, texts)
    return write_json(row, Path(results) / f"gap-{row['arm']}-{row['seed']}.json")


def read_gaps(results: str | Path) -> list[dict[str, Any]]:
    """What was written, by arm and seed. Raises ResultFileError for another format."""
    rows = read_formatted(Path(results).glob("gap-*.json"), FORMAT)
    return sorted(rows, key=lambda row: (row["arm"], row["seed"]))


def depth_by_entropy(row: dict[str, Any], kind: str = "top-1") -> tuple[np.ndarray, np.ndarray]:
    """(mean depth over n_layers, share of positions), by bin of the model's own entropy.

    Of the positions that settle; NaN for a bin that has none.
    """
    counts = np.array(row["depth"][kind], dtype=np.float64)
    settled = counts[:, :-1]
    layers = np.arange(settled.shape[1]) / (settled.shape[1] - 1)
    with np.errstate(invalid="ignore"):
        return settled @ layers / settled.sum(axis=1), counts.sum(axis=1) / counts.sum()
