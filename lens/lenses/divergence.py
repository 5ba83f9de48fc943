"""KL(final || lens) of rows at the unembedding, and its gradient with respect to these rows.

Whole distributions are formed for a few positions of one layer at a time, so that nothing of size
[layer, pos, d_vocab] is held; the gradient leaves as one row of d_unembed numbers.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lens.checkpoint.readout import Unembedding

AT_ONCE_FLOATS = 2**23
"""About this many logits are formed at once."""

NATS_TO_BITS = 1.0 / math.log(2.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Divergence:
    """KL in bits, and d KL / d row for each of them.

    `temperature_pull` and `bias_pull` are the gradients of the SUM of `kl_bits` with respect to
    the temperature and to the bias over the vocabulary, as they were given.
    """

    kl_bits: Float[Tensor, "layer pos"]
    pull: Float[Tensor, "layer pos d_unembed"]
    temperature_pull: float
    bias_pull: Float[Tensor, " d_vocab"] | None


class FinalRows:
    """The model's own distributions at some positions, formed anew for each pass or kept.

    They are kept where all of them take at most `keep_bytes`. `offset` is added to the logits.
    """

    def __init__(
        self,
        unembedding: Unembedding,
        rows: Float[Tensor, "pos d_unembed"],
        *,
        offset: Float[Tensor, " d_vocab"] | None = None,
        keep_bytes: int = 0,
    ):
        self.unembedding, self.rows, self.offset = unembedding, rows, offset
        self._keeps = 4 * len(rows) * unembedding.weight.shape[0] <= keep_bytes
        self._kept: list[tuple[slice, Tensor, Tensor]] = []

    def __len__(self) -> int:
        return len(self.rows)

    def parts(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Positions, p [pos, d_vocab] and sum p ln p [pos], a few positions at a time."""
        if self._kept:
            yield from self._kept
            return
        at_once = max(1, AT_ONCE_FLOATS // self.unembedding.weight.shape[0])
        kept = []
        for first in range(0, len(self.rows), at_once):
            part = slice(first, first + at_once)
            with torch.no_grad():
                logits = self.unembedding.logits(self.rows[part]).float()
                if self.offset is not None:
                    logits = logits + self.offset
                log_p = torch.log_softmax(logits, -1)
                p = log_p.exp()
                negative_entropy = torch.where(p == 0, 0.0, p * log_p).sum(-1)
            if self._keeps:
                kept.append((part, p, negative_entropy))
            yield part, p, negative_entropy
        self._kept = kept

    def mean(self) -> Float[Tensor, " d_vocab"]:
        """The mean distribution, in float64."""
        total = torch.zeros(self.unembedding.weight.shape[0], dtype=torch.float64)
        for _, p, _ in self.parts():
            total += p.sum(0).double().cpu()
        return total / len(self)


def divergence(
    unembedding: Unembedding,
    rows: Float[Tensor, "layer pos d_unembed"],
    final: FinalRows,
    *,
    temperature: float = 1.0,
    bias: Float[Tensor, " d_vocab"] | None = None,
    with_pull: bool = True,
) -> Divergence:
    """KL(final || softmax(logits(rows) / temperature + bias)), and its gradients.

    The logits' own steps (scale, soft-cap) are derived too. `rows` are what `prepare` gave.
    Without `with_pull` the gradients are 0 and cost nothing.
    """
    kl = torch.empty(rows.shape[:2], dtype=torch.float32, device=rows.device)
    pull = torch.zeros_like(rows)
    bias_pull = None if bias is None else torch.zeros_like(bias)
    temperature_pull = 0.0
    holes = _has_holes(unembedding)
    with torch.no_grad():
        for part, p, negative_entropy in final.parts():
            for layer in range(rows.shape[0]):
                z, slope = _logits_and_slope(unembedding, rows[layer, part])
                y = z / temperature if temperature != 1.0 else z.clone()
                if bias is not None:
                    y += bias
                lse = torch.logsumexp(y, -1)
                weighted = torch.where(p == 0, 0.0, p * y) if holes else p * y
                kl[layer, part] = negative_entropy + lse - weighted.sum(-1)
                if not with_pull:
                    continue
                force = y.sub_(lse[:, None]).exp_().sub_(p)
                if bias_pull is not None:
                    bias_pull += force.sum(0)
                moment = torch.where(force == 0, 0.0, force * z) if holes else force * z
                temperature_pull -= float(moment.sum()) / temperature**2
                scaled = (force * (slope / temperature)).to(unembedding.weight.dtype)
                pull[layer, part] = (scaled @ unembedding.weight).to(pull.dtype)
    return Divergence(
        kl_bits=kl * NATS_TO_BITS,
        pull=pull * NATS_TO_BITS,
        temperature_pull=temperature_pull * NATS_TO_BITS,
        bias_pull=None if bias_pull is None else bias_pull * NATS_TO_BITS,
    )


def mean_lens(
    unembedding: Unembedding,
    rows: Float[Tensor, "pos d_unembed"],
    *,
    temperature: float = 1.0,
    bias: Float[Tensor, " d_vocab"] | None = None,
) -> Float[Tensor, " d_vocab"]:
    """The mean of softmax(logits(rows) / temperature + bias), in float64."""
    total = torch.zeros(unembedding.weight.shape[0], dtype=torch.float64)
    at_once = max(1, AT_ONCE_FLOATS // unembedding.weight.shape[0])
    with torch.no_grad():
        for first in range(0, len(rows), at_once):
            y = unembedding.logits(rows[first : first + at_once]).float() / temperature
            if bias is not None:
                y = y + bias
            total += torch.softmax(y, -1).sum(0).double().cpu()
    return total / len(rows)


def _logits_and_slope(
    unembedding: Unembedding, rows: Float[Tensor, "pos d_unembed"]
) -> tuple[Float[Tensor, "pos d_vocab"], Tensor | float]:
    """Logits in float32, and what each changes by per unit of its product with W_U."""
    raw = torch.nn.functional.linear(rows, unembedding.weight, unembedding.bias)
    if not unembedding.steps:
        return raw.float(), 1.0
    with torch.enable_grad():
        raw = raw.detach().requires_grad_()
        z = raw
        for step in unembedding.steps:
            z = step.apply(z)
        # Every step is elementwise, so that the gradient of the sum is each one's own slope.
        slope = torch.autograd.grad(z.sum(), raw)[0]
    return z.detach().float(), slope.float()


def _has_holes(unembedding: Unembedding) -> bool:
    """Whether some token is kept out by a logit of -inf."""
    values = [unembedding.bias, *(s.value for s in unembedding.steps)]
    return any(
        bool(torch.isneginf(v).any()) for v in values if isinstance(v, Tensor) and v.ndim > 0
    )
