"""The rows of a projection, cut into chunks: all asked layers of a few positions."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from lens.lenses.tiles import TILE_TOKENS, VocabularyTiles, same_unembedding

CHUNK_ROWS = 512
REPLAY_BYTES = 256 * 2**20
"""Most bytes of the whole logits that a replay readout may hand back at once."""


class DirectRows:
    """Rows read by a product with the unembedding."""

    def __init__(self, readout: Any, max_rows: int):
        self.tiles = VocabularyTiles(readout.unembedding, max_rows=max_rows)
        self.rows: Tensor = torch.empty(0)

    def load(self, readout: Any, states: Float[Tensor, "layer pos d_model"]) -> None:
        """Norm these states by this readout, in place of what was loaded before."""
        self.rows = readout.prepare(states).to(torch.float32)

    def load_also(self, readout: Any, states: Float[Tensor, "layer pos d_model"]) -> None:
        """Norm these states too, and put them after what is loaded."""
        self.rows = torch.cat([self.rows, readout.prepare(states).to(torch.float32)])

    def tile(self, first: int) -> Float[Tensor, "layer pos tile"]:
        """Logits from token `first` on, in a buffer that the next call uses again."""
        n_layers = self.rows.shape[0]
        flat = rearrange(self.rows, "l p d -> (l p) d")
        return rearrange(self.tiles.tile(flat, first), "(l p) v -> l p v", l=n_layers)

    def chosen(self, ids: Int[Tensor, " pos"]) -> Float[Tensor, "layer pos"]:
        """The logit of one token for each position."""
        return self.tiles.chosen(self.rows, ids)

    def group(self, ids: Int[Tensor, " token"]) -> Float[Tensor, "layer pos token"]:
        """The logits of a few tokens."""
        n_layers = self.rows.shape[0]
        flat = rearrange(self.rows, "l p d -> (l p) d")
        return rearrange(self.tiles.group(flat, ids), "(l p) t -> l p t", l=n_layers)


class ReplayRows:
    """Rows read by the model's own tail, one layer's whole logits at a time."""

    def __init__(self):
        self.logits: Tensor = torch.empty(0)

    def load(
        self, readout: Any, states: Float[Tensor, "layer pos d_model"], inputs: Any = None
    ) -> None:
        """Run the model's tail on these states, layer by layer."""
        parts = [readout.logits(layer[None], inputs=inputs)[0] for layer in states]
        self.logits = parts[0][None] if len(parts) == 1 else torch.stack(parts)

    def tile(self, first: int) -> Float[Tensor, "layer pos tile"]:
        """Logits from token `first` on."""
        return self.logits[..., first : first + TILE_TOKENS].to(torch.float32)

    def chosen(self, ids: Int[Tensor, " pos"]) -> Float[Tensor, "layer pos"]:
        """The logit of one token for each position."""
        columns = ids[None, :, None].expand(self.logits.shape[0], -1, 1)
        return self.logits.gather(-1, columns)[..., 0].to(torch.float32)

    def group(self, ids: Int[Tensor, " token"]) -> Float[Tensor, "layer pos token"]:
        """The logits of a few tokens."""
        return self.logits[..., ids].to(torch.float32)


@dataclass(frozen=True)
class Chunk:
    """Some layers of some positions, loaded: their tiles, with the final rows' beside them.

    The final rows are layer `final_layer` of the side `final`, or of the lens side itself where
    that is None. `is_final` [layer, pos] marks cells whose state is the final state bit for bit,
    read the same way.
    """

    layers: slice
    positions: slice
    lens: DirectRows | ReplayRows
    final: DirectRows | ReplayRows | None
    final_layer: int
    is_final: Tensor
    d_vocab: int

    @property
    def n_layers(self) -> int:
        """Layers of this chunk."""
        return self.layers.stop - self.layers.start

    @property
    def n_positions(self) -> int:
        """Positions of this chunk."""
        return self.positions.stop - self.positions.start

    def tile(self, first: int) -> tuple[Float[Tensor, "layer pos tile"], Float[Tensor, "pos tile"]]:
        """Logits from token `first` on: of the layers, and of the model's own final rows."""
        logits = self.lens.tile(first)
        final = logits if self.final is None else self.final.tile(first)
        return logits[: self.n_layers], final[self.final_layer]

    def chosen(self, ids: Int[Tensor, " pos"]) -> Float[Tensor, "layer pos"]:
        """The layers' logit of one token for each position."""
        return self.lens.chosen(ids)[: self.n_layers]

    def group(self, ids: Int[Tensor, " token"]) -> Float[Tensor, "layer pos token"]:
        """The layers' logits of a few tokens."""
        return self.lens.group(ids)[: self.n_layers]


class Chunks:
    """Every chunk of a projection, loaded one after the other into the same buffers."""

    def __init__(
        self,
        readout: Any,
        states: Float[Tensor, "layer pos d_model"],
        *,
        final_readout: Any,
        final_states: Float[Tensor, "pos d_model"],
        replay_inputs: Any = None,
        memory_budget_bytes: int | None = None,
    ):
        self.readout, self.states = readout, states
        self.final_readout, self.final_states = final_readout, final_states
        self.replay_inputs = replay_inputs
        self.d_vocab = readout.d_vocab
        self.n_layers, self.n_positions = states.shape[:2]
        self.replays = "replay" in (readout.kind, final_readout.kind)
        self.one_product = not self.replays and same_unembedding(
            readout.unembedding, final_readout.unembedding
        )
        self._plan(memory_budget_bytes)
        self.lens = self._side(readout)
        self.final = self.lens if self.one_product else self._side(final_readout)

    @property
    def device(self) -> torch.device:
        """Where the product runs: with the unembedding, or for a replay with the states."""
        if isinstance(self.final, DirectRows):
            return self.final.tiles.weight.device
        return self.states.device

    def _plan(self, memory_budget_bytes: int | None) -> None:
        """Choose how many layers and positions go into one chunk."""
        if self.replays:
            limit = memory_budget_bytes or REPLAY_BYTES
            self.chunk_layers = 1
            fits = max(1, limit // (2 * 4 * self.d_vocab))
            self.chunk_positions = min(self.n_positions, fits)
            return
        rows = CHUNK_ROWS
        if memory_budget_bytes is not None:
            per_row = 4 * (4 * TILE_TOKENS + 4 * self.states.shape[-1])
            rows = max(1, min(rows, memory_budget_bytes // per_row))
        self.chunk_layers = min(self.n_layers, rows)
        self.chunk_positions = max(1, min(self.n_positions, rows // (self.chunk_layers + 1)))

    def _side(self, readout: Any) -> DirectRows | ReplayRows:
        if readout.kind == "replay":
            return ReplayRows()
        rows = max(
            (self.chunk_layers + 1) * self.chunk_positions, min(CHUNK_ROWS, self.n_positions)
        )
        return DirectRows(readout, rows)

    def guess_final_top(self) -> Int[Tensor, " pos"]:
        """The token that the model's own final row ranks first; a near-tie may fall otherwise."""
        guess = torch.zeros(self.n_positions, dtype=torch.int64, device=self.device)
        if not isinstance(self.final, DirectRows):
            return guess
        for begin in range(0, self.n_positions, CHUNK_ROWS):
            places = slice(begin, min(begin + CHUNK_ROWS, self.n_positions))
            self.final.load(self.final_readout, self.final_states[None, places])
            best = torch.full((places.stop - begin,), -torch.inf, device=self.device)
            for first in range(0, self.d_vocab, TILE_TOKENS):
                values, tokens = self.final.tile(first)[0].max(-1)
                better = values > best
                guess[places] = torch.where(better, tokens + first, guess[places])
                best = torch.where(better, values, best)
        return guess

    def __iter__(self) -> Iterator[Chunk]:
        for begin in range(0, self.n_positions, self.chunk_positions):
            places = slice(begin, min(begin + self.chunk_positions, self.n_positions))
            final_states = self.final_states[None, places]
            if not self.one_product:
                self._load(self.final, self.final_readout, final_states)
            for lowest in range(0, self.n_layers, self.chunk_layers):
                layers = slice(lowest, min(lowest + self.chunk_layers, self.n_layers))
                yield self._chunk(layers, places, final_states)

    def _chunk(self, layers: slice, places: slice, final_states: Tensor) -> Chunk:
        states = self.states[layers, places]
        is_final = torch.zeros(states.shape[:2], dtype=torch.bool, device=self.device)
        if self.readout is self.final_readout:
            is_final = (states == final_states).all(-1).to(self.device)
        shared = is_final.all(-1).nonzero()[:, 0].tolist()
        if not (self.one_product and isinstance(self.lens, DirectRows)):
            self._load(self.lens, self.readout, states)
            return Chunk(layers, places, self.lens, self.final, 0, is_final, self.d_vocab)
        row = shared[0] if shared else states.shape[0]
        self.lens.load(self.readout, states)
        if not shared:
            self.lens.load_also(self.final_readout, final_states)
        return Chunk(layers, places, self.lens, None, row, is_final, self.d_vocab)

    def _load(self, side: DirectRows | ReplayRows, readout: Any, states: Tensor) -> None:
        if isinstance(side, DirectRows):
            side.load(readout, states)
        else:
            whole = states.shape[1] == self.n_positions
            side.load(readout, states, self.replay_inputs if whole else None)
