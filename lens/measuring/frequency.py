"""Where a model keeps word frequency: output bias, norm bias, a common direction, row lengths.

Source: Kobayashi et al., arXiv:2305.18294, who find it in the head's bias or, where there is
none, in the final norm's bias through W_U.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens.checkpoint.plain_torch import in_plain_torch
from lens.checkpoint.readout import DirectReadout
from lens.corpus import Corpus, read_corpus
from lens.errors import PromptError
from lens.linear import mean_row
from lens.measuring.frozen_norm import norm_bias
from lens.measuring.ranks import rank_correlation
from lens.measuring.readout_variants import VARIANTS, output_bias, variants
from lens.measuring.required_readout import required_readout
from lens.measuring.windows import NO_TOKEN, Window, windows_of

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint

CARRIERS = ("output bias", "norm bias", "mean direction", "W_U row length", "W_E row length")
_NATS_TO_BITS = 1 / np.log(2)
_ROWS_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class Frequency:
    """Who carries word frequency, and what is lost without each carrier.

    `correlations` (CARRIERS) are Spearman's, of log count with what the carrier adds to the logit
    of a token, or with the length of its row, over tokens that occur; NaN where the model has none.
    `marginal_kl_bits` [variant, layer] is KL(mean q_l || unigram), `lens_kl_bits` [variant, layer]
    the mean KL(p || q_l) with p the unchanged model's; NaN where a variant does not exist. The
    unigram is (count + 1/2) / (N + V/2) over `counted_on`, documents that are not scored.
    """

    model_id: str
    tie: str
    lookup_scale: float | None
    correlations: Float[np.ndarray, " carrier"]
    layers: Int[np.ndarray, " layer"]
    marginal_kl_bits: Float[np.ndarray, "variant layer"]
    lens_kl_bits: Float[np.ndarray, "variant layer"]
    n_tokens: int
    n_counted: int
    n_positions: int
    counted_on: str

    def rows(self) -> list[tuple[str, str]]:
        """(label, text) pairs for a reader."""
        scale = "none measurable" if self.lookup_scale is None else f"x {self.lookup_scale:.6g}"
        rows = [
            ("tie", self.tie),
            ("lookup scale", f"{scale}, not in the matrix"),
            (
                "counts",
                f"{self.n_counted:,} tokens of {self.counted_on}, {self.n_tokens:,} different; "
                f"scored on {self.n_positions:,} positions elsewhere",
            ),
        ]
        for name, value in zip(CARRIERS, self.correlations, strict=True):
            text = "none" if np.isnan(value) else f"Spearman with log count {value:+.3f}"
            rows.append((name, text))
        layers = ", ".join(str(layer) for layer in self.layers)
        for title, table in (
            ("KL(mean q || unigram)", self.marginal_kl_bits),
            ("KL(p || q)", self.lens_kl_bits),
        ):
            for name, values in zip(VARIANTS, table, strict=True):
                if not np.isnan(values).all():
                    numbers = ", ".join(f"{v:.3f}" for v in values)
                    rows.append((f"{title}, {name}", f"{numbers} bits at layers {layers}"))
        return rows


@in_plain_torch
def frequency(
    checkpoint: "Checkpoint",
    corpus: Any = "sample",
    *,
    max_positions: int = 512,
    n_layers: int = 5,
    seed: int = 0,
) -> Frequency:
    """Measure what carries the frequency of tokens, and what zeroing it does.

    `corpus` is what `read_corpus` takes: the fifth of its documents that `split` keeps back is
    scored on, the rest counted: about `max_positions` positions, drawn by `seed`, at `n_layers`
    layers. Raises UnsupportedArchitectureError without a direct readout,
    PromptError where the corpus is too small or the model an encoder-decoder, SelectionError.

    >>> found = lens.frequency(model, "sample")  # doctest: +SKIP
    >>> dict(zip(CARRIERS, found.correlations))  # doctest: +SKIP
    """
    readout = required_readout(checkpoint, "Where frequency is kept")
    texts = read_corpus(corpus)
    scored, counted = texts.split()
    counts = _counts(checkpoint, counted)
    states, n_positions = _states(checkpoint, scored, max_positions, n_layers, seed)
    unigram = torch.from_numpy((counts + 0.5) / (counts.sum() + len(counts) / 2))
    bias = norm_bias(readout, states[checkpoint.n_layers][0])
    changed = variants(readout, bias)
    layers = sorted(states)
    marginal = np.full((len(VARIANTS), len(layers)), np.nan)
    lens = np.full_like(marginal, np.nan)
    for row, name in enumerate(VARIANTS):
        if name not in changed:
            continue
        for column, layer in enumerate(layers):
            marginal[row, column], lens[row, column] = _against(
                readout, changed[name], states[checkpoint.n_layers], states[layer], unigram
            )
    return Frequency(
        model_id=checkpoint.origin.model_id,
        tie=checkpoint.tie.verdict,
        lookup_scale=checkpoint.lookup_scale,
        correlations=_correlations(checkpoint, readout, bias, counts),
        layers=np.array(layers),
        marginal_kl_bits=marginal,
        lens_kl_bits=lens,
        n_tokens=int((counts > 0).sum()),
        n_counted=int(counts.sum()),
        n_positions=n_positions,
        counted_on=f"{len(counted)} documents of {texts.name}",
    )


def _counts(checkpoint: "Checkpoint", corpus: Corpus) -> Int[np.ndarray, " row"]:
    counts = np.zeros(checkpoint.d_vocab, dtype=np.int64)
    for document in windows_of(checkpoint, corpus).by_document:
        for window in document:
            own = window.targets[window.targets != NO_TOKEN]
            counts += np.bincount(own, minlength=len(counts))
    return counts


def _states(
    checkpoint: "Checkpoint", corpus: Corpus, max_positions: int, n_layers: int, seed: int
) -> tuple[dict[int, Float[Tensor, "pos d_model"]], int]:
    """States of some layers at scored positions, windows in a seeded order; position 0 left out."""
    layers = sorted({*np.linspace(0, checkpoint.n_layers, max(2, n_layers)).round().astype(int)})
    windows: list[Window] = []
    for document in windows_of(checkpoint, corpus).by_document:
        windows += document
    found: dict[int, list[Tensor]] = {int(layer): [] for layer in layers}
    left = max_positions
    for number in np.random.default_rng(seed).permutation(len(windows)):
        window = windows[number]
        at = np.flatnonzero(window.targets != NO_TOKEN)
        at = at[at > 0][:left]
        if len(at):
            inputs = checkpoint.inputs_of([window.ids.tolist()])
            states = checkpoint.capture(inputs, layers=list(found), positions=at.tolist())
            for layer, kept in found.items():
                kept.append(states[layer][0])
        left -= len(at)
        if left <= 0:
            break
    if left == max_positions:
        raise PromptError("The corpus leaves no position to score.")
    return {layer: torch.cat(kept) for layer, kept in found.items()}, max_positions - left


def _against(
    own: DirectReadout, variant: DirectReadout, final: Tensor, states: Tensor, unigram: Tensor
) -> tuple[float, float]:
    """KL(mean q || unigram) and the mean KL(p || q), in bits."""
    total = torch.zeros_like(unigram, dtype=torch.float64)
    kl = 0.0
    for start in range(0, len(states), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        p = own.logits(final[rows]).double().log_softmax(-1)
        q = variant.logits(states[rows]).double().log_softmax(-1)
        total += q.exp().sum(0).cpu()
        kl += float((p.exp() * (p - q)).sum())
    mean = total / len(states)
    marginal = float((mean * (mean.clamp_min(1e-300).log() - unigram.log())).sum())
    return marginal * _NATS_TO_BITS, kl / len(states) * _NATS_TO_BITS


def _correlations(
    checkpoint: "Checkpoint",
    readout: DirectReadout,
    bias: Tensor | None,
    counts: Int[np.ndarray, " row"],
) -> Float[np.ndarray, " carrier"]:
    occurring = np.flatnonzero(counts)
    if len(occurring) < 3:
        raise PromptError(f"The corpus holds {len(occurring)} different tokens; expected more.")
    log_counts = np.log(counts[occurring])
    rows = torch.from_numpy(occurring)
    weight = readout.unembedding.weight.detach()
    chosen = weight[rows.to(weight.device)].double()
    lookup = checkpoint.W_E.detach()
    inside = rows[rows < lookup.shape[0]]
    added = output_bias(readout)
    found = [
        None if added is None else added[rows.to(added.device)],
        None if bias is None else chosen @ bias.to(chosen),
        chosen @ mean_row(weight),
        chosen.norm(dim=1),
        lookup[inside.to(lookup.device)].double().norm(dim=1),
    ]
    return np.array(
        [
            float("nan") if v is None else rank_correlation(log_counts[: len(v)], v.cpu().numpy())
            for v in found
        ]
    )
