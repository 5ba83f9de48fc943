"""A twin's loss on the held-out documents, and that of n-grams on the same tokens."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from lens.study.texts import StudyTexts

EM_ROUNDS = 300
WEIGHTS_FROM_ONE_IN = 10
"""The weights of the n-grams are fitted on the last tenth of training, counts on the rest."""


def held_out_loss_bits(
    model: PreTrainedModel, texts: StudyTexts, *, window_tokens: int, batch_windows: int = 64
) -> float:
    """Mean cross-entropy in bits a token over all held-out windows, the first token of each apart.

    Windows do not cross documents.
    """
    total, count = 0.0, 0
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        for ids in _batches(texts, window_tokens, batch_windows):
            logits = model(input_ids=ids[:, :-1]).logits
            targets = ids[:, 1:]
            total += float(cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
            count += targets.numel()
    model.train(was_training)
    return total / count / math.log(2)


def held_out_windows(texts: StudyTexts, window_tokens: int) -> list[Int[np.ndarray, " pos"]]:
    """The held-out documents as windows of that many inputs and the token after them."""
    found = []
    for document in texts.held_out.documents:
        ids = np.array(texts.tokenizer(document.text)["input_ids"], dtype=np.int64)
        for start in range(0, len(ids) - 1, window_tokens):
            found.append(ids[start : start + window_tokens + 1])
    return [w for w in found if len(w) > 1]


def _batches(
    texts: StudyTexts, window_tokens: int, size: int
) -> Iterator[Int[torch.Tensor, "b p"]]:
    windows = held_out_windows(texts, window_tokens)
    by_length: dict[int, list[np.ndarray]] = {}
    for window in windows:
        by_length.setdefault(len(window), []).append(window)
    for alike in by_length.values():
        for start in range(0, len(alike), size):
            yield torch.from_numpy(np.stack(alike[start : start + size]))


@dataclass(frozen=True, kw_only=True)
class NgramLosses:
    """Held-out cross-entropy in bits a token of n-gram models fitted on the training stream."""

    unigram: float
    bigram: float
    trigram: float


def ngram_losses(texts: StudyTexts, *, window_tokens: int) -> NgramLosses:
    """Interpolated n-grams: p = sum_n w_n p_n, p_0 uniform, w by EM on the last tenth of training.

    They see the same tokens as a twin: counts from the training stream, scored on the held-out
    windows with no context across a window's beginning. Source: Jelinek and Mercer 1980.
    """
    stream = texts.stream
    kept = len(stream) - len(stream) // WEIGHTS_FROM_ONE_IN
    d_vocab = len(texts.tokenizer)
    counts = _Counts(stream[:kept], d_vocab)
    fitting = counts.orders(stream[kept:])
    whole = _Counts(stream, d_vocab)
    scored = np.concatenate(
        [whole.orders(w) for w in held_out_windows(texts, window_tokens)], axis=1
    )
    losses = []
    for order in (1, 2, 3):
        weights = _em(fitting[: order + 1])
        losses.append(float(-np.log2(weights @ scored[: order + 1]).mean()))
    return NgramLosses(unigram=losses[0], bigram=losses[1], trigram=losses[2])


class _Counts:
    """Counts of n-grams up to three, looked up by their packed ids."""

    def __init__(self, stream: Int[np.ndarray, " token"], d_vocab: int):
        self.d_vocab, self.size = d_vocab, len(stream)
        self.unigrams = np.bincount(stream, minlength=d_vocab)
        pairs = stream[:-1] * d_vocab + stream[1:]
        self.pairs = np.unique(pairs, return_counts=True)
        self.contexts = np.bincount(stream[:-1], minlength=d_vocab)
        self.triples = np.unique(pairs[:-1] * d_vocab + stream[2:], return_counts=True)
        self.pair_contexts = np.unique(pairs[:-1], return_counts=True)

    def orders(self, ids: Int[np.ndarray, " pos"]) -> Float[np.ndarray, "order target"]:
        """p of each token but the first under uniform, unigram, bigram and trigram.

        After a context that was never seen an order says what the one below it says, so that each
        is a distribution over the vocabulary.
        """
        targets = ids[1:]
        pairs = ids[:-1] * self.d_vocab + targets
        found = np.zeros((4, len(targets)))
        found[0] = 1 / self.d_vocab
        found[1] = self.unigrams[targets] / self.size
        seen = self.contexts[ids[:-1]]
        told = _looked_up(self.pairs, pairs) / np.maximum(1, seen)
        found[2] = np.where(seen > 0, told, found[1])
        found[3] = found[2]
        if len(targets) > 1:
            triples = pairs[:-1] * self.d_vocab + targets[1:]
            seen = _looked_up(self.pair_contexts, pairs[:-1])
            told = _looked_up(self.triples, triples) / np.maximum(1, seen)
            found[3, 1:] = np.where(seen > 0, told, found[2, 1:])
        return found


def _looked_up(table: tuple[np.ndarray, np.ndarray], keys: np.ndarray) -> np.ndarray:
    names, counts = table
    place = np.minimum(np.searchsorted(names, keys), len(names) - 1)
    return np.where(names[place] == keys, counts[place], 0)


def _em(probabilities: Float[np.ndarray, "order target"]) -> Float[np.ndarray, " order"]:
    """The weights of a mixture that make these targets most likely, one of each added.

    Without the one, a part that no target needs would get no weight, and a token that was never
    seen no probability.
    """
    n_orders, n_targets = probabilities.shape
    weights = np.full(n_orders, 1 / n_orders)
    for _ in range(EM_ROUNDS):
        share = weights[:, None] * probabilities
        weights = ((share / share.sum(axis=0)).sum(axis=1) + 1) / (n_targets + n_orders)
    return weights
