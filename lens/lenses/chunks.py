"""The rows of a projection, cut into chunks: all asked layers of a few positions."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens.errors import SelectionError
from lens.lenses.reduction import fuses, tile_tokens
from lens.lenses.tiles import DirectRows, WholeRows, same_unembedding

CHUNK_ROWS = 512
"""Rows of a full chunk: fewer make the product slower, more push its tile out of the cache."""

DEVICE_CHUNK_ROWS = 4096
"""Rows of a full chunk elsewhere than on the CPU: 128 MiB of logits, and few calls."""

REPLAY_BYTES = 64 * 2**20
"""Most bytes of whole logits, lens' and final, that a replay hands back at once by default."""

Rows = DirectRows | WholeRows


@dataclass(frozen=True)
class Cells:
    """Some layers of some positions."""

    layers: slice
    positions: slice

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of layers and of positions."""
        return (
            self.layers.stop - self.layers.start,
            self.positions.stop - self.positions.start,
        )

    def halves(self) -> "list[Cells]":
        """Two halves, by position if there is more than one, else by layer; one cell has none."""
        n_layers, n_positions = self.shape
        if n_positions > 1:
            middle = self.positions.start + n_positions // 2
            return [
                Cells(self.layers, slice(self.positions.start, middle)),
                Cells(self.layers, slice(middle, self.positions.stop)),
            ]
        if n_layers > 1:
            middle = self.layers.start + n_layers // 2
            return [
                Cells(slice(self.layers.start, middle), self.positions),
                Cells(slice(middle, self.layers.stop), self.positions),
            ]
        return []


@dataclass(frozen=True)
class Source:
    """What is read, and through what; `once_cells` as `lens.lenses.reduction.fuses` takes it."""

    readout: Any
    states: Float[Tensor, "layer pos d_model"]
    final_readout: Any
    final_states: Float[Tensor, "pos d_model"]
    replay_inputs: Any = None
    once_cells: int | None = None

    @property
    def fused(self) -> bool:
        """Whether the kernels reduce what is read."""
        return fuses(self.device, once_cells=self.once_cells)

    @property
    def d_vocab(self) -> int:
        """Tokens of both readouts."""
        return self.readout.d_vocab

    @property
    def is_direct(self) -> bool:
        """Whether neither side needs whole logits."""
        return self.readout.kind == "direct" and self.final_readout.kind == "direct"

    @property
    def whole_prompts(self) -> bool:
        """Whether a side reads the positions of a prompt only all together."""
        sides = (self.readout, self.final_readout)
        return any(getattr(side, "whole_prompts", False) for side in sides)

    @property
    def is_one_product(self) -> bool:
        """Whether lens and final rows can pass in one product."""
        return self.is_direct and same_unembedding(
            self.readout.unembedding, self.final_readout.unembedding
        )

    @property
    def device(self) -> torch.device:
        """Where the reduction runs: with the unembedding, else with the states."""
        for readout in (self.final_readout, self.readout):
            if readout.kind == "direct":
                return readout.unembedding.weight.device
        return self.states.device

    @property
    def tile_tokens(self) -> int:
        """Tokens of one tile."""
        return tile_tokens(self.device, fused=self.fused)

    @property
    def row_bytes(self) -> int:
        """Bytes that one row costs: its tile, its state prepared, temporaries of preparing."""
        if not self.is_direct:
            return 2 * 4 * self.d_vocab
        return 4 * (self.tile_tokens + 4 * self.states.shape[-1])

    def final_layers(self, cells: Cells) -> Bool[Tensor, "layer pos"]:
        """Which cells hold the final state itself, read by the same readout."""
        states = self.states[cells.layers, cells.positions]
        if self.readout is not self.final_readout:
            return torch.zeros(states.shape[:2], dtype=torch.bool, device=states.device)
        return (states == self.final_states[cells.positions]).all(-1)


def plan(source: Source, *, memory_budget_bytes: int | None) -> list[Cells]:
    """Cut the work into chunks, whose shape does not depend on the number of workers.

    Raises SelectionError for a budget in which not one row fits.
    """
    n_layers, n_positions = source.states.shape[:2]
    rows = CHUNK_ROWS if source.device.type == "cpu" else DEVICE_CHUNK_ROWS
    if not source.is_direct:
        rows = max(1, REPLAY_BYTES // source.row_bytes)
    if memory_budget_bytes is not None:
        rows = min(rows, memory_budget_bytes // (2 * source.row_bytes))
        if rows < 1:
            raise SelectionError(
                f"A memory budget of {memory_budget_bytes:,} bytes holds not one row of "
                f"{source.d_vocab:,} logits; give at least {2 * source.row_bytes:,}."
            )
    layers = min(n_layers, max(1, rows - 1)) if source.is_direct else 1
    most = max(1, rows // (layers + _extra_rows(source)))
    if source.whole_prompts:
        if memory_budget_bytes is not None and most < n_positions:
            raise SelectionError(
                f"This model's tail takes whole prompts alone, and {n_positions} rows of "
                f"{source.d_vocab:,} logits do not fit a memory budget of "
                f"{memory_budget_bytes:,} bytes. Pass a shorter prompt or a larger budget."
            )
        most = n_positions
    return [
        Cells(slice(lowest, min(lowest + layers, n_layers)), positions)
        for positions in _even_parts(n_positions, most)
        for lowest in range(0, n_layers, layers)
    ]


def _even_parts(n_positions: int, most: int) -> list[slice]:
    """Parts of at most so many positions, an even number of them and all about the same.

    Of five parts one of two workers would take three; a part of a few rows makes a slow product.
    """
    count = -(-n_positions // most)
    if count > 1:
        count = min(n_positions, count + count % 2)
    size, larger = divmod(n_positions, count)
    bounds = list(accumulate([size + (i < larger) for i in range(count)], initial=0))
    return [slice(begin, end) for begin, end in pairwise(bounds)]


def _extra_rows(source: Source) -> int:
    """1 where the final row of a position must be read beside its layers, else 0."""
    if not source.is_direct:
        return 0
    whole = Cells(slice(0, source.states.shape[0]), slice(0, source.states.shape[1]))
    return 0 if source.final_layers(whole).all(-1).any() else 1


@dataclass(frozen=True)
class Chunk:
    """Cells whose rows are loaded: their tiles, with the final rows' beside them.

    The final rows are layer `final_layer` of the side `final`. `is_final` marks cells whose
    state is the final state bit for bit, read the same way.
    """

    cells: Cells
    lens: Rows
    final: Rows
    final_layer: int
    is_final: Bool[Tensor, "layer pos"]
    d_vocab: int

    def tiles(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """First token id, logits [layer, pos, tile], final logits [pos, tile], tile by tile."""
        n_layers = self.cells.shape[0]
        for first in range(0, self.d_vocab, self.lens.tile_tokens):
            lens = self.lens.tile(first)
            final = lens if self.final is self.lens else self.final.tile(first)
            # The two matrices may lie on two devices.
            yield first, lens[:n_layers], final[self.final_layer].to(lens.device)

    def chosen(self, ids: Int[Tensor, "chosen pos"]) -> Float[Tensor, "chosen layer pos"]:
        """The layers' logits of a few tokens for each position."""
        return self.lens.chosen(ids)[:, : self.cells.shape[0]].contiguous()

    def chosen_final(self, ids: Int[Tensor, "chosen pos"]) -> Float[Tensor, "chosen pos"]:
        """The final rows' logits of a few tokens for each position."""
        return self.final.chosen(ids)[:, self.final_layer].to(self.lens.device)

    def each(self, ids: Int[Tensor, "layer pos k"]) -> Float[Tensor, "layer pos k"]:
        """The logits of every cell's own tokens."""
        return self.lens.each(ids)

    def group(self, ids: Int[Tensor, " token"]) -> Float[Tensor, "layer pos token"]:
        """The layers' logits of a few tokens."""
        return self.lens.group(ids)[: self.cells.shape[0]]


class Reader:
    """Loads chunks, one after the other, into buffers of its own; one for each worker.

    Norms run under `lock`: preparing touches the model's own modules, which are not for several
    threads at once.
    """

    def __init__(self, source: Source, max_rows: int, lock: threading.Lock, *, narrow: bool):
        self.source, self.lock, self.max_rows = source, lock, max_rows
        self.lens = self._side(source.readout, max_rows, narrow)
        self.final = self.lens
        if not source.is_one_product:
            self.final = self._side(source.final_readout, max_rows, narrow)
        self._loaded: slice | None = None

    def _side(self, readout: Any, max_rows: int, narrow: bool) -> Rows:
        tile = self.source.tile_tokens
        if readout.kind != "direct":
            return WholeRows(readout, tile_tokens=tile)
        return DirectRows(readout.unembedding, max_rows=max_rows, tile_tokens=tile, narrow=narrow)

    def holds(self, cells: Cells) -> bool:
        """Whether the buffers are large enough for these cells and their final rows."""
        return (cells.shape[0] + 1) * cells.shape[1] <= self.max_rows

    def load(self, cells: Cells) -> Chunk:
        """Make these cells' rows ready."""
        source = self.source
        states = source.states[cells.layers, cells.positions]
        final_states = source.final_states[None, cells.positions]
        is_final = source.final_layers(cells)
        if not (source.is_one_product and isinstance(self.lens, DirectRows)):
            if self._loaded != cells.positions:
                self._fill(self.final, source.final_readout, final_states)
                self._loaded = cells.positions
            self._fill(self.lens, source.readout, states)
            return Chunk(cells, self.lens, self.final, 0, is_final, source.d_vocab)
        shared = is_final.all(-1).nonzero()[:, 0].tolist()
        with self.lock:
            prepared = [source.readout.prepare(states)]
            if not shared:
                prepared.append(source.final_readout.prepare(final_states))
        self.lens.load(*prepared)
        row = shared[0] if shared else states.shape[0]
        return Chunk(cells, self.lens, self.lens, row, is_final, source.d_vocab)

    def _fill(self, side: Rows, readout: Any, states: Tensor) -> None:
        with self.lock:
            if isinstance(side, WholeRows):
                whole = states.shape[1] == self.source.states.shape[1]
                side.load(states, self.source.replay_inputs if whole else None)
                return
            prepared = readout.prepare(states)
        side.load(prepared)
