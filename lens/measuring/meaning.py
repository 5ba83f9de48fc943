"""Do similar rows get similar probabilities? Rows of the matrices against the model's answers."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens.checkpoint.plain_torch import in_plain_torch
from lens.checkpoint.readout import DirectReadout
from lens.corpus import read_corpus
from lens.errors import PromptError
from lens.measuring.ranks import rank_correlation
from lens.measuring.windows import NO_TOKEN, windows_of

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint

_CONTEXTS_AT_ONCE = 16


@dataclass(frozen=True, kw_only=True)
class MeaningSimilarity:
    """Rank correlations of cos(row i, row j) with that of log p(i | c) and log p(j | c).

    The log-probabilities are centred over contexts c; `chance_*` are of permuted pairs. Tokens are
    the commonest of the corpus. `target_cosine` is the mean cosine of the readout's input with the
    row of the token that follows, NaN where there is no direct readout.
    """

    model_id: str
    embedding: float
    unembedding: float
    chance_embedding: float
    chance_unembedding: float
    target_cosine: float
    n_contexts: int
    n_tokens: int
    n_pairs: int

    def rows(self) -> list[tuple[str, str]]:
        """(label, text) pairs for a reader."""
        return [
            (
                "similar rows, similar probabilities",
                f"W_E {self.embedding:+.3f} (chance {self.chance_embedding:+.3f}), "
                f"W_U {self.unembedding:+.3f} (chance {self.chance_unembedding:+.3f})",
            ),
            ("cos(N(h), U of what follows)", f"{self.target_cosine:+.3f}"),
            ("over", f"{self.n_contexts:,} contexts, {self.n_pairs:,} pairs of {self.n_tokens:,}"),
        ]


@in_plain_torch
def similarity_of_meaning(
    checkpoint: "Checkpoint",
    corpus: Any = "sample",
    *,
    contexts: int = 256,
    tokens: int = 1000,
    pairs: int = 20_000,
    seed: int = 0,
) -> MeaningSimilarity:
    """Compare how alike two rows are with how alike their tokens' probabilities move.

    `corpus` is what `read_corpus` takes; `contexts` positions of it, `tokens` of its commonest
    tokens and `pairs` pairs of them are drawn by `seed`. Raises PromptError where it holds too
    little, and for an encoder-decoder.
    """
    generator = np.random.default_rng(seed)
    places, counts = _places(checkpoint, corpus, contexts, generator)
    occurring = np.flatnonzero(counts)
    chosen = occurring[np.argsort(-counts[occurring], kind="stable")][:tokens]
    if len(places) < 3 or len(chosen) < 3:
        raise PromptError(
            f"The corpus gives {len(places)} contexts and {len(chosen)} tokens; expected 3 and "
            "more of both."
        )
    logprobs, cosines = _answers(checkpoint, places, torch.from_numpy(chosen))
    unit = logprobs - logprobs.mean(0)
    unit = unit / unit.norm(dim=0).clamp_min(1e-30)
    one, other = generator.integers(len(chosen), size=(2, pairs))
    one, other = one[one != other], other[one != other]
    moved = (unit[:, one] * unit[:, other]).sum(0).numpy()
    shuffled = generator.permutation(moved)
    found = {}
    for name, matrix in (("embedding", checkpoint.W_E), ("unembedding", checkpoint.W_U)):
        rows = matrix.detach()[torch.from_numpy(chosen).to(matrix.device)].double().cpu()
        alike = torch.nn.functional.cosine_similarity(rows[one], rows[other]).numpy()
        found[name] = rank_correlation(alike, moved)
        found[f"chance_{name}"] = rank_correlation(alike, shuffled)
    return MeaningSimilarity(
        model_id=checkpoint.origin.model_id,
        **found,
        target_cosine=float(np.mean(cosines)) if cosines else float("nan"),
        n_contexts=len(logprobs),
        n_tokens=len(chosen),
        n_pairs=len(one),
    )


def _places(
    checkpoint: "Checkpoint", corpus: Any, contexts: int, generator: np.random.Generator
) -> tuple[list[tuple[list[int], int, int]], Int[np.ndarray, " row"]]:
    """(ids, position, what follows) of some positions of the windows, and counts of tokens."""
    windows = [w for d in windows_of(checkpoint, read_corpus(corpus)).by_document for w in d]
    counts = np.zeros(checkpoint.d_vocab, dtype=np.int64)
    places = []
    for window in windows:
        seen = window.targets[window.targets != NO_TOKEN]
        counts += np.bincount(seen, minlength=len(counts))
    each = max(1, -(-contexts // len(windows)))
    for number in generator.permutation(len(windows)):
        window = windows[number]
        at = np.flatnonzero(window.targets != NO_TOKEN)
        at = at[at > 0]
        for position in generator.choice(at, size=min(each, len(at)), replace=False):
            places.append((window.ids.tolist(), int(position), int(window.targets[position])))
    return places[:contexts], counts


def _answers(
    checkpoint: "Checkpoint", places: list[tuple[list[int], int, int]], chosen: Tensor
) -> tuple[Float[Tensor, "context token"], list[float]]:
    logprobs, cosines = [], []
    for start in range(0, len(places), _CONTEXTS_AT_ONCE):
        part = places[start : start + _CONTEXTS_AT_ONCE]
        inputs = checkpoint.inputs_of([ids for ids, _, _ in part])
        last = checkpoint.capture(inputs, layers=[checkpoint.n_layers])[checkpoint.n_layers]
        at = torch.tensor([position for _, position, _ in part], device=last.device)
        states = last[torch.arange(len(part), device=last.device), at]
        if isinstance(checkpoint.readout, DirectReadout):
            logits = checkpoint.readout.logits(states)
            prepared = checkpoint.readout.prepare(states).double()
            rows = checkpoint.W_U.detach()[torch.tensor([t for _, _, t in part])].double()
            cosines += torch.nn.functional.cosine_similarity(
                prepared, rows.to(prepared.device)
            ).tolist()
        else:
            logits = checkpoint.replay.logits(last, inputs)[torch.arange(len(part)), at]
        logprobs.append(logits.double().log_softmax(-1)[:, chosen.to(logits.device)].cpu())
    return torch.cat(logprobs), cosines
