"""What needs both normalisers first, on a sample of positions: JS, TV, copy split, temperature.

Whole distributions are formed here, a few positions of one layer at a time.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens.errors import UnsupportedArchitectureError
from lens.measuring.columns import MARGINAL_UNIT, TAUS

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, kw_only=True, eq=False)
class Sampled:
    """Sums over the sampled positions, per layer; `marginals` [layer + final, d_vocab] in units."""

    sums: dict[str, Float[np.ndarray, " layer"]]
    tau_kl_bits: Float[np.ndarray, "layer tau"]
    baseline_js_bits: float
    marginals: Int[np.ndarray, "row d_vocab"]


def second_pass(
    readout: Any,
    states: Float[Tensor, "layer pos d_model"],
    *,
    final_states: Float[Tensor, "pos d_model"],
    final_readout: Any,
    input_ids: Int[Tensor, " pos"],
    baseline_logprob_bits: Float[Tensor, " d_vocab"] | None,
) -> Sampled:
    """Read whole distributions of a few positions, and sum over them.

    Raises UnsupportedArchitectureError for a readout that needs the whole prompt.
    """
    if getattr(readout, "whole_prompts", False):
        raise UnsupportedArchitectureError(
            "This model's readout takes whole prompts alone, so no sample of positions can be read "
            "again. Measure it with sample_positions=0."
        )
    with torch.inference_mode():
        final = _logits(final_readout, final_states)
        log_p = torch.log_softmax(final, dim=-1)
        ids = input_ids.to(final.device)
        rows = [_one_layer(_logits(readout, layer), log_p, ids) for layer in states]
        marginals = torch.stack([*(row[2] for row in rows), _in_units(log_p)])
        baseline_js = 0.0
        if baseline_logprob_bits is not None:
            log_b = (baseline_logprob_bits / _LOG2_E).to(log_p)
            baseline_js = float(_js(log_p, log_b.expand_as(log_p)).sum())
    names = rows[0][0]
    return Sampled(
        sums={name: np.array([row[0][name] for row in rows]) for name in names},
        tau_kl_bits=np.stack([row[1] for row in rows]),
        baseline_js_bits=baseline_js,
        marginals=marginals.cpu().numpy(),
    )


def _logits(readout: Any, states: Tensor) -> Float[Tensor, "pos d_vocab"]:
    rows = states if readout.kind == "direct" else states[None]
    logits = readout.logits(rows)
    return (logits if readout.kind == "direct" else logits[0]).double()


def _one_layer(
    logits: Float[Tensor, "pos d_vocab"],
    log_p: Float[Tensor, "pos d_vocab"],
    ids: Int[Tensor, " pos"],
) -> tuple[dict[str, float], np.ndarray, Tensor]:
    log_q = torch.log_softmax(logits, dim=-1)
    p = log_p.exp()
    copied, rest = _copy_split(log_p, log_q, p, ids)
    tv = 0.5 * (p - log_q.exp()).abs().sum()
    sums = {"js_bits": _js(log_p, log_q).sum(), "total_variation": tv}
    sums |= {"copy_bits": copied.sum(), "rest_bits": rest.sum()}
    entropy = -(_times(p, log_p)).sum()
    # KL(p || softmax(z / tau)) = lse(z / tau) - sum p z / tau - H(p)
    # z less its maximum, so that a logit of -inf with p = 0 counts nothing.
    shifted = logits - logits.amax(-1, keepdim=True)
    mean = _times(p, shifted).sum()
    kls = [
        float((torch.logsumexp(shifted / tau, dim=-1).sum() - mean / tau - entropy) * _LOG2_E)
        for tau in TAUS
    ]
    return {name: float(value) for name, value in sums.items()}, np.array(kls), _in_units(log_q)


def _js(a: Tensor, b: Tensor) -> Tensor:
    middle = torch.logaddexp(a, b) - np.log(2.0)
    both = _times(a.exp(), a - middle) + _times(b.exp(), b - middle)
    return 0.5 * both.sum(-1) * _LOG2_E


def _copy_split(log_p: Tensor, log_q: Tensor, p: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The two terms of metric 9: whether the input token is repeated, and the rest."""
    known = ids.clamp(min=0)[:, None]
    own_p, own_q = log_p.gather(-1, known), log_q.gather(-1, known)
    hole = torch.full_like(own_p, -torch.inf)
    rest_p = torch.logsumexp(log_p.scatter(-1, known, hole), dim=-1, keepdim=True)
    rest_q = torch.logsumexp(log_q.scatter(-1, known, hole), dim=-1, keepdim=True)
    copied = _times(own_p.exp(), own_p - own_q) + _times(rest_p.exp(), rest_p - rest_q)
    inner = _times(p, (log_p - rest_p) - (log_q - rest_q)).scatter(
        -1, known, torch.zeros_like(own_p)
    )
    return copied[:, 0] * _LOG2_E, inner.sum(-1) * _LOG2_E


def _times(weights: Tensor, values: Tensor) -> Tensor:
    """A product in which a weight of 0 counts nothing, even against an infinite value."""
    return torch.where(weights == 0, 0.0, weights * values)


def _in_units(log_q: Float[Tensor, "pos d_vocab"]) -> Int[Tensor, " d_vocab"]:
    return (log_q.exp().sum(0) / MARGINAL_UNIT).round().to(torch.int64)
