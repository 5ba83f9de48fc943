"""Who writes the logit of a twin's own first choice: embedding, attention, MLPs, the last MLP."""

from typing import TYPE_CHECKING

from lens.corpus import Corpus
from lens.measuring.attribution import attribution

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint

DOCUMENTS = 48
"""Documents whose first window is taken apart, at its last position."""

LAST_MLP = "last mlp"


def written_by(model: "Checkpoint", corpus: Corpus, *, window_tokens: int) -> dict[str, float]:
    """The share of each kind of part in what all parts write, and that of the last MLP.

    Shares are of sums over documents, so that a small logit weighs little. They add up to 1
    without "last mlp", which is a part of "mlp".
    """
    sums: dict[str, float] = {}
    whole = 0.0
    for document in corpus.take(min(DOCUMENTS, len(corpus))).documents:
        ids = model.ids_of(document.text or list(document.ids or ()), truncate=True)
        found = attribution(model, ids[:window_tokens], top_neurons=0)
        written = float(found.parts.sum())
        parts = {kind: found.of_kind(kind) for kind in dict.fromkeys(found.kinds)}
        for name, part in (*parts.items(), (LAST_MLP, found.last_mlp_share * written)):
            sums[name] = sums.get(name, 0.0) + part
        whole += written
    return {name: part / whole for name, part in sums.items()}
