"""Each measure of a reading, defined once, in float64: the oracle for every faster path.

Logits go in, bits come out. `final` are the logits of the model's own final distribution p, `lens`
those of the lens' distribution q at some layer. Leading axes are free; the last is the
vocabulary. A logit of -inf is a probability of 0.
"""

import numpy as np
from jaxtyping import Float, Int

NATS_TO_BITS = 1.0 / np.log(2.0)

PerCell = Float[np.ndarray, "*cells"] | np.floating
"""One number for each cell; a bare number where there are no leading axes."""


def logprob_bits(
    logits: Float[np.ndarray, "*cells d_vocab"],
) -> Float[np.ndarray, "*cells d_vocab"]:
    """log2 of the softmax.

    >>> logprob_bits(np.zeros(4))
    array([-2., -2., -2., -2.])
    """
    logits = logits.astype(np.float64)
    return logits * NATS_TO_BITS - np.asarray(lse_bits(logits))[..., None]


def lse_bits(logits: Float[np.ndarray, "*cells d_vocab"]) -> PerCell:
    """log2 of the sum of e^logit."""
    logits = logits.astype(np.float64)
    maximum = logits.max(axis=-1, keepdims=True)
    reference = np.where(np.isfinite(maximum), maximum, 0.0)
    with np.errstate(divide="ignore"):
        total = np.log(np.exp(logits - reference).sum(axis=-1))
    return (total + reference[..., 0]) * NATS_TO_BITS


def entropy_bits(logits: Float[np.ndarray, "*cells d_vocab"]) -> PerCell:
    """The entropy of the softmax; log2(d_vocab) at most."""
    logprobs = logprob_bits(logits)
    return -_mean(np.exp2(logprobs), logprobs) + 0.0


def kl_bits(
    final: Float[np.ndarray, "*cells d_vocab"], lens: Float[np.ndarray, "*cells d_vocab"]
) -> PerCell:
    """Forward KL(p || q): bits lost by coding the model's own prediction with the lens'."""
    p, q = logprob_bits(final), logprob_bits(lens)
    return _mean(np.exp2(p), _difference(p, q))


def reverse_kl_bits(
    final: Float[np.ndarray, "*cells d_vocab"], lens: Float[np.ndarray, "*cells d_vocab"]
) -> PerCell:
    """Reverse KL(q || p)."""
    return kl_bits(lens, final)


def js_bits(
    final: Float[np.ndarray, "*cells d_vocab"], lens: Float[np.ndarray, "*cells d_vocab"]
) -> PerCell:
    """The Jensen-Shannon divergence: 0 for equal distributions, 1 bit for disjoint ones."""
    p, q = logprob_bits(final), logprob_bits(lens)
    middle = np.logaddexp2(p, q) - 1.0
    return 0.5 * (
        _mean(np.exp2(p), _difference(p, middle)) + _mean(np.exp2(q), _difference(q, middle))
    )


def total_variation(
    final: Float[np.ndarray, "*cells d_vocab"], lens: Float[np.ndarray, "*cells d_vocab"]
) -> PerCell:
    """Half the L1 distance: the probability mass that would have to move, 0 to 1."""
    p, q = np.exp2(logprob_bits(final)), np.exp2(logprob_bits(lens))
    return 0.5 * np.abs(p - q).sum(axis=-1)


def cross_entropy_bits(
    logits: Float[np.ndarray, "*cells d_vocab"], ids: Int[np.ndarray, "*cells"]
) -> PerCell:
    """-log2 of the probability of one token for each cell."""
    return -_pick(logprob_bits(logits), ids)


def perplexity(bits_per_token: float) -> float:
    """The perplexity that a mean cross-entropy in bits stands for: 2 to that power."""
    return float(np.exp2(bits_per_token))


def rank(
    logits: Float[np.ndarray, "*cells d_vocab"], ids: Int[np.ndarray, "*cells"]
) -> Int[np.ndarray, "*cells"]:
    """How many tokens have a strictly higher logit than this one: 0 is the best."""
    return (logits > _pick(logits, ids)[..., None]).sum(axis=-1)


def ties(
    logits: Float[np.ndarray, "*cells d_vocab"], ids: Int[np.ndarray, "*cells"]
) -> Int[np.ndarray, "*cells"]:
    """How many other tokens have exactly this one's logit."""
    return (logits == _pick(logits, ids)[..., None]).sum(axis=-1) - 1


def reciprocal_rank(
    logits: Float[np.ndarray, "*cells d_vocab"], ids: Int[np.ndarray, "*cells"]
) -> PerCell:
    """1 / (1 + rank + half the ties); its mean is the MRR."""
    return 1.0 / (1.0 + rank(logits, ids) + 0.5 * ties(logits, ids))


def top_ids(logits: Float[np.ndarray, "*cells d_vocab"], top_k: int) -> Int[np.ndarray, "*cells k"]:
    """The ids of the `top_k` highest logits, best first; a tie goes to the lower id."""
    return np.argsort(-logits, axis=-1, kind="stable")[..., :top_k]


def agreement(
    final: Float[np.ndarray, "*cells d_vocab"], lens: Float[np.ndarray, "*cells d_vocab"]
) -> np.ndarray:
    """True where both rank the same token first."""
    return final.argmax(axis=-1) == lens.argmax(axis=-1)


def top_k_overlap(
    final: Float[np.ndarray, "*cells d_vocab"],
    lens: Float[np.ndarray, "*cells d_vocab"],
    top_k: int,
) -> PerCell:
    """The share of the model's `top_k` tokens that are among the lens' `top_k`."""
    a, b = top_ids(final, top_k), top_ids(lens, top_k)
    return (a[..., :, None] == b[..., None, :]).any(axis=-1).mean(axis=-1)


def set_logprob_bits(logits: Float[np.ndarray, "*cells d_vocab"], ids: tuple[int, ...]) -> PerCell:
    """log2 of the summed probability of a set of tokens."""
    logits = logits.astype(np.float64)
    return lse_bits(logits[..., list(ids)]) - lse_bits(logits)


def self_copy_mass(
    lens: Float[np.ndarray, "*cells d_vocab"], input_ids: Int[np.ndarray, "*cells"]
) -> PerCell:
    """The probability that the lens gives to the token standing at the position."""
    return np.exp2(_pick(logprob_bits(lens), input_ids))


def rest_lse_bits(
    logits: Float[np.ndarray, "*cells d_vocab"], ids: Int[np.ndarray, "*cells"]
) -> PerCell:
    """log2 of the sum of e^logit over all tokens but one.

    Minus `lse_bits` this is log2(1 - q(x)), exact also where q(x) rounds to 1.
    """
    return lse_bits(_without(logits, ids))


def copy_split_bits(
    final: Float[np.ndarray, "*cells d_vocab"],
    lens: Float[np.ndarray, "*cells d_vocab"],
    input_ids: Int[np.ndarray, "*cells"],
) -> tuple[PerCell, PerCell]:
    """KL(p || q) as two terms: whether the input token x is repeated, and the rest.

    KL = KL_bin(p(x) || q(x)) + (1 - p(x)) KL(p_-x || q_-x), exactly.
    """
    p, q = _pick(logprob_bits(final), input_ids), _pick(logprob_bits(lens), input_ids)
    p_rest = rest_lse_bits(final, input_ids) - lse_bits(final)
    q_rest = rest_lse_bits(lens, input_ids) - lse_bits(lens)
    pair = np.stack([p, p_rest], axis=-1)
    copied = _mean(np.exp2(pair), _difference(pair, np.stack([q, q_rest], axis=-1)))
    remainder = np.exp2(p_rest) * kl_bits(_without(final, input_ids), _without(lens, input_ids))
    return copied, remainder


def collision_mass(logits: Float[np.ndarray, "*cells d_vocab"]) -> PerCell:
    """The sum of squared probabilities: the chance that two draws agree."""
    return np.square(np.exp2(logprob_bits(logits))).sum(axis=-1)


def brier(logits: Float[np.ndarray, "*cells d_vocab"], ids: Int[np.ndarray, "*cells"]) -> PerCell:
    """The summed squared difference from the one-hot outcome: 0 is perfect, 2 the worst."""
    probability = np.exp2(_pick(logprob_bits(logits), ids))
    return collision_mass(logits) - 2 * probability + 1


def marginal_bias_bits(
    final: Float[np.ndarray, "pos d_vocab"], lens: Float[np.ndarray, "pos d_vocab"]
) -> float:
    """KL(mean p || mean q): a lower bound on what a bias over the vocabulary can remove.

    Never above the mean of `kl_bits`, by joint convexity. Source: Belrose et al. 2023.
    """
    p, q = _log_mean_exp2(logprob_bits(final)), _log_mean_exp2(logprob_bits(lens))
    return float(_mean(np.exp2(p), _difference(p, q)))


def _log_mean_exp2(logprobs: np.ndarray) -> np.ndarray:
    return np.logaddexp2.reduce(logprobs, axis=0) - np.log2(len(logprobs))


def _mean(weights: np.ndarray, values: np.ndarray) -> PerCell:
    """A weighted sum in which a weight of 0 counts nothing, even against an infinite value."""
    with np.errstate(invalid="ignore"):
        return np.where(weights == 0, 0.0, weights * values).sum(axis=-1)


def _difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return a - b


def _pick(values: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return np.take_along_axis(values, ids[..., None], axis=-1)[..., 0]


def _without(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    rest = logits.astype(np.float64)
    np.put_along_axis(rest, ids[..., None], -np.inf, axis=-1)
    return rest
