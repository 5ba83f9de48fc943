"""Residual states -> what each layer predicts, streamed over the vocabulary.

Nothing of size [layer, pos, d_vocab] is ever held: a chunk (all layers of a few positions, about
512 rows) passes the unembedding in tiles of about a thousand tokens, and each tile is reduced
where it stands. The model's own final rows pass in the same tile, so that KL(final || lens) is
exact under soft-cap, scale and bias. Top-k is taken on logits: probabilities underflow to ties.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens.errors import SelectionError, ShapeError
from lens.lenses.chunks import Chunk, Chunks
from lens.lenses.reduction import TorchReduction
from lens.lenses.tiles import TILE_TOKENS

NATS_TO_BITS = 1.0 / math.log(2.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Projection:
    """What the rows [layer, pos] predict; numbers in bits, ids of tokens, -1 and NaN where none.

    `lse_bits` is log2 of the sum of e^logit. A rank counts strictly higher logits, the token
    itself left out. A row with a NaN or +inf logit has NaN in every number and -1 in every id and
    rank. `rest_lse_bits` leaves the position's own input token out of the sum.
    """

    top_ids: Int[np.ndarray, "layer pos k"]
    top_logprob_bits: Float[np.ndarray, "layer pos k"]
    entropy_bits: Float[np.ndarray, "layer pos"]
    kl_bits: Float[np.ndarray, "layer pos"]
    reverse_kl_bits: Float[np.ndarray, "layer pos"]
    lse_bits: Float[np.ndarray, "layer pos"]
    rest_lse_bits: Float[np.ndarray, "layer pos"]
    collision_mass: Float[np.ndarray, "layer pos"]
    target_logprob_bits: Float[np.ndarray, "layer pos"]
    target_rank: Int[np.ndarray, "layer pos"]
    final_top_ids: Int[np.ndarray, " pos"]
    final_top_logprob_bits: Float[np.ndarray, "layer pos"]
    final_top_rank: Int[np.ndarray, "layer pos"]
    self_copy_mass: Float[np.ndarray, "layer pos"]
    set_logprob_bits: Float[np.ndarray, "set layer pos"] | None = None

    @property
    def brier(self) -> Float[np.ndarray, "layer pos"]:
        """The Brier score against the target: sum of squared differences, 0 to 2."""
        return self.collision_mass - 2 * np.exp2(self.target_logprob_bits) + 1


def project(
    readout: Any,
    states: Float[Tensor, "layer pos d_model"],
    *,
    final_states: Float[Tensor, "pos d_model"],
    final_readout: Any = None,
    input_ids: Int[Tensor, " pos"],
    target_ids: Int[Tensor, " pos"],
    sets: tuple[tuple[int, ...], ...] = (),
    top_k: int = 5,
    replay_inputs: Any = None,
    memory_budget_bytes: int | None = None,
    workers: int | None = None,
    mode: Literal["exact", "fast"] = "exact",
) -> Projection:
    """Read residual states through a readout, and reduce their distributions to a few numbers.

    `final_states` are the model's own last states: KL is against the distribution that
    `final_readout` (by default the same readout) makes of them. `input_ids` and `target_ids` are
    -1 where a position has none. Raises SelectionError and ShapeError for ids and shapes that do
    not fit.
    """
    final_readout = readout if final_readout is None else final_readout
    _check(readout, final_readout, states, final_states, input_ids, target_ids, sets, top_k)
    results = _allocate(states.shape[0], states.shape[1], top_k, len(sets))
    with torch.inference_mode():
        chunks = Chunks(
            readout,
            states,
            final_readout=final_readout,
            final_states=final_states,
            replay_inputs=replay_inputs,
            memory_budget_bytes=memory_budget_bytes,
        )
        device = chunks.device
        wanted = _Wanted(
            input_ids=input_ids.to(device),
            target_ids=target_ids.to(device),
            final_top_ids=chunks.guess_final_top(),
            sets=tuple(torch.tensor(ids, device=device) for ids in sets),
            top_k=top_k,
        )
        for chunk in chunks:
            _read(chunk, wanted, results)
    return Projection(**results)


@dataclass(frozen=True)
class _Wanted:
    """The tokens to follow, on the device of the product."""

    input_ids: Tensor
    target_ids: Tensor
    final_top_ids: Tensor
    sets: tuple[Tensor, ...]
    top_k: int


def _read(chunk: Chunk, wanted: _Wanted, results: dict[str, np.ndarray]) -> None:
    """Pass one chunk, and write its cells."""
    places = chunk.positions
    guess = wanted.final_top_ids[places]
    ids = torch.stack([wanted.target_ids[places], guess, wanted.input_ids[places]])
    while True:
        reduction = _reduce(chunk, ids, wanted.top_k)
        # The guess came from another product shape: where it lost a tie by rounding, or was read
        # in low precision, the rank is counted again against the true final top-1.
        found = reduction.final_top_ids
        if torch.equal(torch.where(found < 0, ids[1], found), ids[1]):
            break
        ids[1] = torch.where(found < 0, ids[1], found)
    sets = [torch.logsumexp(chunk.group(members), dim=-1) for members in wanted.sets]
    _write(chunk, reduction, sets, results)


def _reduce(chunk: Chunk, ids: Tensor, top_k: int) -> TorchReduction:
    thresholds = torch.stack([chunk.chosen(row.clamp(min=0)) for row in ids])
    reduction = TorchReduction(
        n_layers=chunk.n_layers,
        n_positions=chunk.n_positions,
        top_k=top_k,
        ids=ids,
        thresholds=thresholds,
    )
    for first in range(0, chunk.d_vocab, TILE_TOKENS):
        lens, final = chunk.tile(first)
        reduction.update(first, lens, final)
    return reduction


def _write(
    chunk: Chunk, reduction: TorchReduction, sets: list[Tensor], results: dict[str, np.ndarray]
) -> None:
    """Turn the sums of one chunk into bits, in its cells of the results."""
    cells = (chunk.layers, chunk.positions)
    lse, final_lse = reduction.lens.lse_nats, reduction.final.lse_nats
    readable = torch.isfinite(lse)
    comparable = readable & torch.isfinite(final_lse)
    final_mean = reduction.final_cross / reduction.final.total
    lens_mean = reduction.lens_cross / reduction.lens.total
    kl = _not_negative(final_mean - final_lse + lse, final_mean)
    reverse_kl = _not_negative(lens_mean - lse + final_lse, lens_mean)
    kl = torch.where(chunk.is_final, 0.0, kl)
    reverse_kl = torch.where(chunk.is_final, 0.0, reverse_kl)

    def put(name: str, nats: Tensor, mask: Tensor, scale: float = NATS_TO_BITS) -> None:
        values = torch.where(mask, nats.to(torch.float64) * scale, torch.nan)
        results[name][(..., *cells)] = values.cpu().numpy()

    put("entropy_bits", reduction.lens.entropy_nats, readable)
    put("kl_bits", kl, comparable)
    put("reverse_kl_bits", reverse_kl, comparable)
    put("lse_bits", lse, readable)
    put("rest_lse_bits", reduction.rest.lse_nats, readable & (reduction.ids[-1] >= 0))
    put("collision_mass", reduction.squares / reduction.lens.total**2, readable, 1.0)
    if sets:
        put("set_logprob_bits", torch.stack(sets) - lse, readable)
    top = reduction.top_values.to(torch.float64) - lse[..., None]
    top = torch.where(readable[..., None], top * NATS_TO_BITS, torch.nan)
    results["top_logprob_bits"][cells] = top.cpu().numpy()
    top_ids = torch.where(readable[..., None], reduction.top_ids, -1)
    results["top_ids"][cells] = top_ids.cpu().numpy()
    final_top = torch.where(torch.isfinite(final_lse), reduction.final_top_ids, -1)
    results["final_top_ids"][chunk.positions] = final_top.cpu().numpy()
    for number, name in enumerate(("target", "final_top", "self")):
        logits, ranks = _logit_and_rank(reduction, number)
        known = readable & (reduction.ids[number] >= 0)
        if name == "self":
            put("self_copy_mass", torch.exp(logits - lse), known, 1.0)
            continue
        put(f"{name}_logprob_bits", logits - lse, known)
        results[f"{name}_rank"][cells] = torch.where(known, ranks, -1).cpu().numpy()


def _logit_and_rank(reduction: TorchReduction, number: int) -> tuple[Tensor, Tensor]:
    """Logit and rank of a followed token; if it is in the top-k, as the same product has them."""
    logits = reduction.thresholds[number].to(torch.float64)
    ranks = reduction.above[number]
    hit = reduction.top_ids == reduction.ids[number][None, :, None]
    listed = hit.any(-1)
    top_values = reduction.top_values.to(torch.float64)
    value = top_values.gather(-1, hit.to(torch.int64).argmax(-1, keepdim=True))
    ranks = torch.where(listed, (top_values > value).sum(-1), ranks)
    return torch.where(listed, value[..., 0], logits), ranks


def _not_negative(divergence: Tensor, mean_difference: Tensor) -> Tensor:
    """Raise to 0 what is below it by rounding alone.

    The float32 sums carry a relative error of a few dozen roundings (2^-24 each) on terms as
    large as the mean difference of the logits; anything further below 0 stays as it is, seen.
    """
    bound = 64 * 2.0**-24 * (1 + mean_difference.abs())
    return torch.where((divergence < 0) & (divergence >= -bound), 0.0, divergence)


def _check(readout, final_readout, states, final_states, input_ids, target_ids, sets, top_k):
    if readout.d_vocab != final_readout.d_vocab:
        raise ShapeError(
            f"The lens reads into {readout.d_vocab} tokens, the model's own output has "
            f"{final_readout.d_vocab}; KL needs one vocabulary. Pass a readout with "
            f"{final_readout.d_vocab} rows."
        )
    positions = {
        "states": states.shape[1],
        "final_states": final_states.shape[0],
        "input_ids": input_ids.shape[0],
        "target_ids": target_ids.shape[0],
    }
    if len(set(positions.values())) > 1:
        raise ShapeError(f"Expected one number of positions everywhere, found {positions}.")
    if not 1 <= top_k <= readout.d_vocab:
        raise SelectionError(
            f"top_k is {top_k}; choose from 1 to {readout.d_vocab}, the size of the vocabulary."
        )
    named = {"input_ids": input_ids.tolist(), "target_ids": target_ids.tolist()}
    for number, ids in enumerate(sets):
        if not ids:
            raise SelectionError(f"Target set {number} is empty; name at least one token id.")
        named[f"target set {number}"] = list(ids)
    for name, ids in named.items():
        lowest = 0 if name.startswith("target set") else -1
        wrong = [i for i in ids if not lowest <= i < readout.d_vocab]
        if wrong:
            raise SelectionError(
                f"{name} holds {wrong[:5]}, outside the vocabulary of {readout.d_vocab} tokens."
            )


def _allocate(n_layers: int, n_positions: int, top_k: int, n_sets: int) -> dict[str, np.ndarray]:
    shape = (n_layers, n_positions)
    results: dict[str, np.ndarray] = {
        name: np.full(shape, np.nan, dtype=np.float32)
        for name in (
            "entropy_bits",
            "kl_bits",
            "reverse_kl_bits",
            "lse_bits",
            "rest_lse_bits",
            "collision_mass",
            "target_logprob_bits",
            "final_top_logprob_bits",
            "self_copy_mass",
        )
    }
    results["top_ids"] = np.full((*shape, top_k), -1, dtype=np.int64)
    results["top_logprob_bits"] = np.full((*shape, top_k), np.nan, dtype=np.float32)
    results["target_rank"] = np.full(shape, -1, dtype=np.int64)
    results["final_top_rank"] = np.full(shape, -1, dtype=np.int64)
    results["final_top_ids"] = np.full(n_positions, -1, dtype=np.int64)
    if n_sets:
        results["set_logprob_bits"] = np.full((n_sets, *shape), np.nan, dtype=np.float32)
    return results
