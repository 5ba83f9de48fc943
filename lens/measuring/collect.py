"""One document through model and lens, down to the sums that a profile keeps."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens.checkpoint.readout import DirectReadout, Step
from lens.lenses.projection import Projection, project
from lens.measuring import histograms
from lens.measuring.columns import (
    BINS,
    COUNTS,
    FINAL_SUMS,
    OF_TARGETS,
    SAMPLED,
    SELF_COPY,
    SUMS,
    TAUS,
    TOP_K,
)
from lens.measuring.depth import KINDS, N_ENTROPY_BINS, depth_counts
from lens.measuring.reading import Reading
from lens.measuring.second_pass import second_pass
from lens.measuring.windows import NO_TOKEN, Window

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint

NATS_TO_BITS = 1.0 / np.log(2.0)
BATCH_POSITIONS = 1024
"""About this many positions pass the model at once."""


@dataclass
class Tally:
    """What one document adds to a profile."""

    n_layers: int
    counts: dict[str, int] = field(default_factory=dict)
    final_sums: dict[str, float] = field(default_factory=dict)
    sums: dict[str, np.ndarray] = field(init=False)
    kl_bins: np.ndarray = field(init=False)
    confidence: dict[str, np.ndarray] = field(init=False)
    depths: np.ndarray = field(init=False)
    tau_kl_bits: np.ndarray = field(init=False)
    marginals: np.ndarray | None = None

    def __post_init__(self) -> None:
        self.counts = dict.fromkeys(COUNTS, 0)
        self.final_sums = dict.fromkeys(FINAL_SUMS, 0.0)
        self.sums = {name: np.zeros(self.n_layers) for name in (*SUMS, *SAMPLED)}
        self.tau_kl_bits = np.zeros((self.n_layers, len(TAUS)))
        shape = (self.n_layers, histograms.N_BINS)
        self.kl_bins = np.zeros(shape, dtype=np.int64)
        self.confidence = {name: np.zeros(shape, dtype=np.int64) for name in BINS}
        depths = (len(KINDS), N_ENTROPY_BINS, self.n_layers + 1)
        self.depths = np.zeros(depths, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Batch:
    """Windows of one length, after the model: the states of all layers, flattened to rows."""

    windows: list[Window]
    states: Float[Tensor, "layer pos d_model"]
    inputs: Any

    @property
    def final(self) -> Float[Tensor, "pos d_model"]:
        """The model's own last states."""
        return self.states[-1]


def batches(checkpoint: "Checkpoint", windows: Sequence[Window]) -> Iterator[Batch]:
    """Run the model on a document's windows, those of one length together.

    Only windows of one document share a batch, so that its numbers do not depend on what else is
    measured in the run.
    """
    layers = range(checkpoint.n_layers + 1)
    for length, group in groupby(windows, key=lambda w: len(w.ids)):
        alike = list(group)
        # A replayed tail may look at the ids again: then one window at a time, with its own.
        direct = isinstance(checkpoint.readout, DirectReadout)
        together = max(1, BATCH_POSITIONS // length) if direct else 1
        for first in range(0, len(alike), together):
            part = alike[first : first + together]
            inputs = checkpoint.inputs_of([w.ids.tolist() for w in part])
            captured = checkpoint.capture(inputs, layers=layers)
            device = captured[checkpoint.n_layers].device
            rows = [captured[layer].flatten(0, 1).to(device) for layer in layers]
            yield Batch(part, torch.stack(rows), inputs)


def tally(
    checkpoint: "Checkpoint",
    reading: Reading,
    windows: Sequence[Window],
    *,
    baseline_logprob_bits: Tensor | None = None,
    sampled: Int[np.ndarray, " place"] | None = None,
) -> Tally:
    """Everything that a profile keeps of one document.

    `sampled` are places in the document's windows, laid end to end, for the second pass.
    """
    total = Tally(checkpoint.n_layers + 1)
    begin = 0
    for batch in batches(checkpoint, windows):
        lens, final, final_of_top = _projected(checkpoint, reading, batch)
        places = _Places(batch.windows, checkpoint.d_vocab)
        _add_counts(total, batch, places)
        _add_final(total, final, places)
        if baseline_logprob_bits is not None:
            cross = _baseline_cross_bits(checkpoint, batch, places.read, baseline_logprob_bits)
            entropy = float(final.entropy_bits[-1, places.read].astype(np.float64).sum())
            total.final_sums["baseline_kl_bits"] += cross - entropy
        _add_layers(total, lens, final, places)
        _add_bins(total, lens, final_of_top, places)
        if sampled is not None:
            inside = sampled[(sampled >= begin) & (sampled < begin + len(places.ids))] - begin
            _add_sample(checkpoint, reading, total, batch, inside, baseline_logprob_bits)
        begin += len(places.ids)
    return total


class _Places:
    """Which rows of a batch count, and what stands there."""

    def __init__(self, windows: list[Window], d_vocab: int):
        self.ids = np.concatenate([w.ids for w in windows])
        self.targets = np.concatenate([w.targets for w in windows])
        at = np.concatenate([np.arange(len(w.ids)) for w in windows])
        last = np.concatenate([np.full(len(w.ids), w.n_read) for w in windows])
        self.read = (at > 0) & (at < last)
        self.known = self.read & (self.ids < d_vocab)
        self.zero = at == 0
        self.scored = self.read & (self.targets != NO_TOKEN)


def _projected(
    checkpoint: "Checkpoint", reading: Reading, batch: Batch
) -> tuple[Projection, Projection, np.ndarray]:
    """The lens' reading, the model's own, and what the model gives the lens' top-1 (log2)."""
    places = _Places(batch.windows, checkpoint.d_vocab)
    own = torch.from_numpy(places.ids)
    own = torch.where(own < checkpoint.d_vocab, own, NO_TOKEN)
    options: dict[str, Any] = {
        "final_states": batch.final,
        "final_readout": checkpoint.readout,
        "input_ids": own,
        "target_ids": torch.from_numpy(places.targets),
        "top_k": min(TOP_K, checkpoint.d_vocab),
        "replay_inputs": batch.inputs if len(batch.windows) == 1 else None,
    }
    layers = range(checkpoint.n_layers + 1)
    lens = project(reading.readout, reading.states(batch.states, layers), **options)
    final = lens
    if not reading.is_of_the_model(checkpoint):
        final = project(checkpoint.readout, batch.final[None], **options)
    chosen = torch.from_numpy(lens.top_ids[:, :, 0])
    logits = _final_logits_of(checkpoint, batch, chosen.clamp(min=0)).double().cpu().numpy()
    return lens, final, logits * NATS_TO_BITS - final.lse_bits[-1].astype(np.float64)


def _final_logits_of(
    checkpoint: "Checkpoint", batch: Batch, ids: Int[Tensor, "layer pos"]
) -> Float[Tensor, "layer pos"]:
    """The model's own logits of tokens chosen by each layer."""
    readout = checkpoint.readout
    if not isinstance(readout, DirectReadout):
        whole = readout.logits(batch.final[None], inputs=batch.inputs)[0]  # type: ignore[call-arg]
        return whole.float().gather(-1, ids.T.to(whole.device)).T
    unembedding = readout.unembedding
    ids = ids.to(unembedding.weight.device)
    with torch.inference_mode():
        rows = readout.prepare(batch.final).float()
        # Layer by layer: the chosen rows of W_U for all layers would be as large as the states.
        logits = torch.stack([(unembedding.weight[i].float() * rows).sum(-1) for i in ids])
        if unembedding.bias is not None:
            logits += unembedding.bias[ids]
        for step in unembedding.steps:
            logits = _for_tokens(step, ids).apply(logits)
    return logits


def _for_tokens(step: Step, ids: Int[Tensor, "layer pos"]) -> Step:
    """The step on the logits of these tokens alone."""
    if isinstance(step.value, Tensor) and step.value.ndim:
        return dataclasses.replace(step, value=step.value.detach()[ids])
    return step


def _baseline_cross_bits(
    checkpoint: "Checkpoint", batch: Batch, read: np.ndarray, logprob_bits: Tensor
) -> float:
    """The sum over rows of -sum_v p(v) log2 b(v), b the context-free guess."""
    total = 0.0
    for _, p in final_probabilities(checkpoint, batch, np.flatnonzero(read)):
        total -= float((p.double() @ logprob_bits.to(p.device)).sum())
    return total


def final_probabilities(
    checkpoint: "Checkpoint", batch: Batch, rows: np.ndarray
) -> Iterator[tuple[np.ndarray, Float[Tensor, "pos d_vocab"]]]:
    """The model's own distributions at these rows, some at a time, with the rows' places."""
    at_once = max(1, 2**24 // checkpoint.d_vocab)
    with torch.inference_mode():
        whole = None
        if not isinstance(checkpoint.readout, DirectReadout):
            whole = checkpoint.readout.logits(batch.final[None], inputs=batch.inputs)[0]  # type: ignore[call-arg]
        for first in range(0, len(rows), at_once):
            part = rows[first : first + at_once]
            at = torch.from_numpy(part)
            logits = whole[at] if whole is not None else checkpoint.readout.logits(batch.final[at])
            yield part, torch.softmax(logits.float(), dim=-1)


def _add_sample(
    checkpoint: "Checkpoint",
    reading: Reading,
    total: Tally,
    batch: Batch,
    rows: np.ndarray,
    baseline_logprob_bits: Tensor | None,
) -> None:
    ids = np.concatenate([w.ids for w in batch.windows])
    at_once = max(1, 2**22 // checkpoint.d_vocab)
    for first in range(0, len(rows), at_once):
        part = rows[first : first + at_once]
        at = torch.from_numpy(part)
        layers = range(checkpoint.n_layers + 1)
        found = second_pass(
            reading.readout,
            reading.states(batch.states[:, at], layers),
            final_states=batch.final[at],
            final_readout=checkpoint.readout,
            input_ids=torch.from_numpy(ids[part]),
            baseline_logprob_bits=baseline_logprob_bits,
        )
        total.counts["n_sampled"] += len(part)
        for name in SAMPLED:
            total.sums[name] += found.sums[name]
        total.tau_kl_bits += found.tau_kl_bits
        total.final_sums["baseline_js_bits"] += found.baseline_js_bits
        held = found.marginals
        total.marginals = held if total.marginals is None else total.marginals + held


def _add_counts(total: Tally, batch: Batch, places: _Places) -> None:
    total.counts["n"] += int(places.read.sum())
    total.counts["n_known"] += int(places.known.sum())
    total.counts["n_targets"] += int(places.scored.sum())
    total.counts["n_zero"] += int(places.zero.sum())
    total.counts["n_bytes"] += sum(w.n_bytes for w in batch.windows)


def _add_final(total: Tally, final: Projection, places: _Places) -> None:
    entropy = final.entropy_bits[-1, places.read].astype(np.float64)
    nll = final.target_logprob_bits[-1, places.scored].astype(np.float64)
    total.final_sums["entropy_bits"] += float(entropy.sum())
    total.final_sums["nll_bits"] -= float(nll.sum())


def _add_layers(total: Tally, lens: Projection, final: Projection, places: _Places) -> None:
    final_top = final.top_ids[-1]
    overlap = (lens.top_ids[:, :, :, None] == final_top[None, :, None, :]).any(-1).mean(-1)
    agreement = lens.top_ids[:, :, 0] == lens.final_top_ids[None]
    values = {
        "kl_bits": lens.kl_bits,
        "reverse_kl_bits": lens.reverse_kl_bits,
        "entropy_bits": lens.entropy_bits,
        "nll_bits": -lens.target_logprob_bits,
        "brier": lens.brier,
        "reciprocal_rank": _reciprocal(lens.target_rank),
        "agreement": agreement,
        "top_k_overlap": overlap,
        "final_top_reciprocal_rank": _reciprocal(lens.final_top_rank),
        "final_top_nll_bits": -lens.final_top_logprob_bits,
        SELF_COPY: lens.self_copy_mass,
        "copies": lens.top_ids[:, :, 0] == places.ids[None],
    }
    for name, cells in values.items():
        rows = places.scored if name in OF_TARGETS else places.read
        if name == SELF_COPY:
            rows = places.known
        total.sums[name] += cells[:, rows].astype(np.float64).sum(axis=1)
    total.sums["zero_kl_bits"] += lens.kl_bits[:, places.zero].astype(np.float64).sum(axis=1)
    total.depths += depth_counts(
        agreement[:, places.read],
        lens.kl_bits[:, places.read],
        final.entropy_bits[-1, places.read],
    )


def _reciprocal(rank: Int[np.ndarray, "layer pos"]) -> Float[np.ndarray, "layer pos"]:
    """1 / (1 + rank); NaN where there is no rank. Ties are not counted: they share a rank."""
    return np.where(rank >= 0, 1.0 / (1.0 + np.maximum(rank, 0)), np.nan)


def _add_bins(total: Tally, lens: Projection, final_of_top: np.ndarray, places: _Places) -> None:
    total.kl_bins += histograms.kl_bins(lens.kl_bits[:, places.read])
    confidence = np.exp2(lens.top_logprob_bits[:, :, 0].astype(np.float64))
    at = histograms.confidence_place(confidence)
    # What the model gives the lens' token may be unreadable where the lens is not.
    at = np.where(np.isnan(final_of_top), histograms.NO_BIN, at)
    units = histograms.in_units(confidence)
    correct = (lens.top_ids[:, :, 0] == places.targets[None]).astype(np.int64)
    for name, amounts, rows in (
        ("count", None, places.read),
        ("scored", None, places.scored),
        ("correct", correct, places.scored),
        ("confidence_units", units, places.read),
        ("scored_units", units, places.scored),
        ("final_units", histograms.in_units(np.exp2(final_of_top)), places.read),
    ):
        chosen = None if amounts is None else amounts[:, rows]
        total.confidence[name] += histograms.binned(at[:, rows], chosen)
