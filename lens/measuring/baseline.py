"""The best guess that sees no context: the model's mean prediction, over other documents."""

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float

from lens.corpus import Corpus
from lens.measuring.collect import batches, final_probabilities
from lens.measuring.windows import windows_of

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint

MAX_DOCUMENTS = 64
"""Most documents that the guess is fitted on, spread over the corpus given for it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Baseline:
    """log2 of the mean of the model's own distributions; `hash` names what it was fitted on."""

    logprob_bits: Float[np.ndarray, " d_vocab"]
    hash: str
    name: str
    n_positions: int


def baseline_hash(checkpoint: "Checkpoint", corpus: Corpus, window_tokens: int) -> str:
    """What names a baseline: the model, the documents and the window."""
    text = f"{checkpoint.model_hash}|{corpus.take(MAX_DOCUMENTS).hash}|{window_tokens}"
    return hashlib.blake2b(text.encode("ascii"), digest_size=16).hexdigest()


def fit_baseline(checkpoint: "Checkpoint", corpus: Corpus, *, window_tokens: int) -> Baseline:
    """The mean of the model's own distributions over documents that are not measured.

    A raw count of tokens would give unseen ones a probability of 0; the mean prediction does not.
    """
    chosen = corpus.take(MAX_DOCUMENTS)
    windows = windows_of(checkpoint, chosen, window_tokens=window_tokens)
    total = np.zeros(checkpoint.d_vocab)
    count = 0
    for document in windows.by_document:
        for batch in batches(checkpoint, document):
            read = np.concatenate([_read(len(w.ids), w.n_read) for w in batch.windows])
            for part, p in final_probabilities(checkpoint, batch, np.flatnonzero(read)):
                total += p.double().sum(0).cpu().numpy()
                count += len(part)
    # The least float32: a token that no position can predict gets no probability of 0.
    smallest = float(torch.finfo(torch.float32).tiny)
    mean = np.maximum(total / count, smallest)
    return Baseline(
        logprob_bits=np.log2(mean / mean.sum()),
        hash=baseline_hash(checkpoint, corpus, window_tokens),
        name=f"{corpus.name}, {len(chosen)} documents",
        n_positions=count,
    )


def _read(length: int, n_read: int) -> np.ndarray:
    at = np.arange(length)
    return (at > 0) & (at < n_read)
