"""Residual states -> what each layer predicts, streamed over the vocabulary.

Nothing of size [layer, pos, d_vocab] is ever held: a chunk (all layers of a few positions, about
512 rows) passes the unembedding in tiles of about a thousand tokens, and each tile is reduced
where it stands. The model's own final rows pass in the same tile, so that KL(final || lens) is
exact under soft-cap, scale and bias. Top-k is taken on logits: probabilities underflow to ties.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens.errors import SelectionError, ShapeError
from lens.lenses.chunks import Cells, Chunk, Reader, Source, plan
from lens.lenses.guess import guess_final_top
from lens.lenses.reduction import reduction_for
from lens.lenses.rescoring import extra_candidates, rescore
from lens.lenses.sums import FINAL_TOP, NATS_TO_BITS, OWN, TARGET, Sums

SET_TOKENS = 1024
"""Tokens of a set whose logits are held at once; rows of no token can be many."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Projection:
    """What the rows [layer, pos] predict; numbers in bits, ids of tokens, -1 and NaN where none.

    `lse_bits` is log2 of the sum of e^logit, `rest_lse_bits` the same without the position's own
    input token x. `copy_kl_bits` is the part of KL that lies in q(x) against p(x);
    `collision_mass` the sum of squared probabilities. A rank counts strictly higher logits, the
    token itself left out. A row with a NaN or +inf logit has NaN in every number and -1 in every
    id and rank.
    """

    top_ids: Int[np.ndarray, "layer pos k"]
    top_logprob_bits: Float[np.ndarray, "layer pos k"]
    entropy_bits: Float[np.ndarray, "layer pos"]
    kl_bits: Float[np.ndarray, "layer pos"]
    reverse_kl_bits: Float[np.ndarray, "layer pos"]
    copy_kl_bits: Float[np.ndarray, "layer pos"]
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
    once_cells: int | None = None,
) -> Projection:
    """Read residual states through a readout, and reduce their distributions to a few numbers.

    `final_states` are the model's own last states: KL is against the distribution that
    `final_readout` (by default the same readout) makes of them. `input_ids` and `target_ids` are
    -1 where a position has none. `workers` threads (by default as many as torch uses) take chunks
    with one BLAS thread each; their number changes no bit. `mode="fast"` multiplies in bfloat16
    and scores candidates again in float32: sums are then rough, to be marked so. `once_cells` is
    how many logits a caller reads in all: few are not worth the start of the fused kernels. Raises
    SelectionError and ShapeError for ids, shapes and options that do not fit.
    """
    final_readout = readout if final_readout is None else final_readout
    _check(readout, final_readout, states, final_states, input_ids, target_ids, sets, top_k)
    if mode not in ("exact", "fast"):
        raise SelectionError(f"There is no mode {mode!r}; there are 'exact' and 'fast'.")
    source = Source(readout, states, final_readout, final_states, replay_inputs, once_cells)
    results = _allocate(states.shape[0], states.shape[1], top_k, len(sets))
    with torch.inference_mode():
        cells = plan(source, memory_budget_bytes=memory_budget_bytes)
        n_workers = _n_workers(source, cells, workers, memory_budget_bytes)
        with _blas_threads(source.device, n_workers if mode == "exact" else 1):
            ids = _followed(source, input_ids, target_ids, cells)
        with _blas_threads(source.device, 1):
            job = _Job(
                source=source,
                ids=ids,
                sets=tuple(torch.tensor(ids, device=source.device) for ids in sets),
                top_k=top_k,
                mode=mode,
                results=results,
                lock=threading.Lock(),
            )
            job.run(cells, n_workers)
    return Projection(**results)


def _followed(source: Source, input_ids: Tensor, target_ids: Tensor, cells: list[Cells]) -> Tensor:
    """Target, guessed final top-1 and own token [3, pos], on the device of the reduction."""
    n_layers, n_positions = source.states.shape[:2]
    whole = Cells(slice(0, n_layers), slice(0, n_positions))
    rows = max(each.shape[0] * each.shape[1] for each in cells)
    if source.final_layers(whole).all():
        # Nothing but final rows: the pass itself finds their first token, at rank 0.
        guess = torch.zeros(n_positions, dtype=torch.int64)
    else:
        guess = guess_final_top(source, max_rows=rows)
    ids = {TARGET: target_ids, FINAL_TOP: guess, OWN: input_ids}
    return torch.stack([ids[row].to(source.device, torch.int64) for row in range(3)])


@dataclass(frozen=True)
class _Job:
    """One projection under way: chunks are independent, and write disjoint cells."""

    source: Source
    ids: Tensor
    sets: tuple[Tensor, ...]
    top_k: int
    mode: str
    results: dict[str, np.ndarray]
    lock: threading.Lock

    def run(self, cells: list[Cells], n_workers: int) -> None:
        """Read every chunk."""
        if n_workers == 1:
            self._work(iter(cells), threading.Lock())
            return
        queue, turn = iter(cells), threading.Lock()
        with ThreadPoolExecutor(
            n_workers, initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            for future in [pool.submit(self._work, queue, turn) for _ in range(n_workers)]:
                future.result()

    def _work(self, queue: Iterator[Cells], turn: threading.Lock) -> None:
        reader: Reader | None = None
        with torch.inference_mode():
            while True:
                with turn:
                    cells = next(queue, None)
                if cells is None:
                    return
                reader = self._read_or_halve(cells, reader)

    def _read_or_halve(self, cells: Cells, reader: Reader | None) -> Reader:
        """Read a chunk; where memory does not suffice, its halves, with smaller buffers."""
        try:
            if reader is None:
                reader = self._reader(cells)
            if reader.holds(cells):
                self._read(reader.load(cells))
                return reader
        except (MemoryError, RuntimeError) as error:
            if not cells.halves() or not _is_out_of_memory(error):
                raise
            reader = None
        for half in cells.halves():
            reader = self._read_or_halve(half, reader)
        assert reader is not None
        return reader

    def _reader(self, cells: Cells) -> Reader:
        n_layers, n_positions = cells.shape
        return Reader(
            self.source, (n_layers + 1) * n_positions, self.lock, narrow=self.mode == "fast"
        )

    def _read(self, chunk: Chunk) -> None:
        """Pass one chunk, and write its cells."""
        ids = self.ids[:, chunk.cells.positions].clone()
        sums = self._reduce(chunk, ids)
        if self.mode == "exact":
            # The guess came from another product: where it was wrong the rank is counted again.
            found = torch.from_numpy(sums.final_top_ids).to(ids.device)
            found = torch.where(found < self.source.d_vocab, found, ids[FINAL_TOP])
            if not torch.equal(found, ids[FINAL_TOP]):
                ids[FINAL_TOP] = found
                sums = self._again(chunk, sums, ids)
        else:
            sums = rescore(chunk, sums, self.top_k)
        place = (chunk.cells.layers, chunk.cells.positions)
        numbers = sums.in_bits(chunk.is_final.cpu().numpy())
        for name, values in numbers.items():
            self.results[name][chunk.cells.positions if values.ndim == 1 else place] = values
        for number, members in enumerate(self.sets):
            values = _lse_bits(chunk, members).cpu().numpy() - numbers["lse_bits"]
            self.results["set_logprob_bits"][(number, *place)] = values

    def _again(self, chunk: Chunk, sums: Sums, ids: Tensor) -> Sums:
        if chunk.is_final.all():
            return sums.following(ids.cpu().numpy())
        return self._reduce(chunk, ids)

    def _reduce(self, chunk: Chunk, ids: Tensor) -> Sums:
        top_k = self.top_k
        if self.mode == "fast":
            top_k = min(top_k + extra_candidates(top_k), self.source.d_vocab)
        thresholds = chunk.chosen(ids[:OWN].clamp(min=0))
        reduction = reduction_for(
            fused=self.source.fused,
            top_k=top_k,
            ids=ids.to(thresholds.device),
            thresholds=thresholds,
        )
        for first, lens, final in chunk.tiles():
            reduction.update(first, lens, final)
        return reduction.sums()


def _lse_bits(chunk: Chunk, members: Tensor) -> Float[Tensor, "layer pos"]:
    """log2 of the sum of e^logit over a set's tokens, a thousand at a time."""
    parts = [
        torch.logsumexp(chunk.group(some).to(torch.float64), dim=-1)
        for some in members.split(SET_TOKENS)
    ]
    whole = parts[0] if len(parts) == 1 else torch.logsumexp(torch.stack(parts), dim=0)
    return whole * NATS_TO_BITS


def _n_workers(
    source: Source, cells: list[Cells], workers: int | None, memory_budget_bytes: int | None
) -> int:
    """Threads that have work and whose buffers fit the budget; one where a device works."""
    if workers is not None and workers < 1:
        raise SelectionError(f"workers is {workers}; give at least 1.")
    if source.device.type != "cpu" or not source.is_direct:
        return 1
    wanted = min(torch.get_num_threads() if workers is None else workers, len(cells))
    if memory_budget_bytes is not None:
        rows = max(each.shape[0] * each.shape[1] for each in cells)
        wanted = min(wanted, max(1, memory_budget_bytes // (2 * rows * source.row_bytes)))
    return wanted


@contextmanager
def _blas_threads(device: torch.device, count: int) -> Iterator[None]:
    """So many threads for each product on the CPU, as before afterwards.

    One while workers divide the chunks. The guess before them is one product, and may use as many
    as there will be workers: an exact pass repeats what was guessed wrong, so no bit changes.
    """
    before = torch.get_num_threads()
    try:
        if device.type == "cpu":
            torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return "not enough memory" in str(error) or "out of memory" in str(error)


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
            "copy_kl_bits",
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
