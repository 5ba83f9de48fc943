"""Logits of a chunk of rows, one tile of the vocabulary at a time, in a buffer that is reused."""

from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor


class DirectRows:
    """Rows read by a product with the unembedding, in float32.

    The weight is read where it stands: one of another dtype is widened a tile at a time. Bias and
    steps (scale, soft-cap, offset) follow in the model's own order. With `narrow` the product of
    a tile is taken in bfloat16, as a guess that others check.
    """

    def __init__(self, unembedding: Any, *, max_rows: int, tile_tokens: int, narrow: bool = False):
        self.weight = unembedding.weight.detach()
        self.bias = None if unembedding.bias is None else unembedding.bias.detach()
        self.steps = unembedding.steps
        self.d_vocab, self.d_unembed = self.weight.shape
        self.device = self.weight.device
        self.narrow, self.tile_tokens = narrow, tile_tokens
        self.product_dtype = torch.bfloat16 if narrow else torch.float32
        self._logits = self._empty(max_rows * tile_tokens)
        self._rows = self._empty(max_rows, self.d_unembed)
        if narrow:
            self._narrow_logits = self._empty(max_rows * tile_tokens, dtype=torch.bfloat16)
            self._narrow_rows = self._empty(max_rows, self.d_unembed, dtype=torch.bfloat16)
        if self.weight.dtype != self.product_dtype:
            self._weight = self._empty(tile_tokens, self.d_unembed, dtype=self.product_dtype)
        self._n_layers = self._n_rows = 0

    def _empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=self.device)

    def load(self, *prepared: Float[Tensor, "_ pos d_unembed"]) -> None:
        """Take these rows in place of those before; tiles hold all of them, in this order."""
        self._n_rows = 0
        for part in prepared:
            rows = rearrange(part, "l p d -> (l p) d")
            self._rows[self._n_rows : self._n_rows + len(rows)].copy_(rows)
            self._n_rows += len(rows)
        self._n_layers = sum(part.shape[0] for part in prepared)
        if self.narrow:
            self._narrow_rows[: self._n_rows].copy_(self._rows[: self._n_rows])

    @property
    def n_rows(self) -> int:
        """Rows that are loaded."""
        return self._n_rows

    def tile(self, first: int) -> Float[Tensor, "layer pos tile"]:
        """Logits of the tokens from id `first` on; valid until the next call."""
        last = min(first + self.tile_tokens, self.d_vocab)
        weight = self.weight[first:last]
        if self.weight.dtype != self.product_dtype:
            weight = self._weight[: last - first].copy_(weight)
        shape = (self._n_rows, last - first)
        size = self._n_rows * (last - first)
        logits = self._logits[:size].view(shape)
        if self.narrow:
            product = self._narrow_logits[:size].view(shape)
            logits.copy_(torch.mm(self._narrow_rows[: self._n_rows], weight.T, out=product))
        else:
            torch.mm(self._rows[: self._n_rows], weight.T, out=logits)
        self._finish(logits, slice(first, last))
        return rearrange(logits, "(l p) v -> l p v", l=self._n_layers)

    def chosen(self, ids: Int[Tensor, "chosen pos"]) -> Float[Tensor, "chosen layer pos"]:
        """The logits of a few tokens for each position, by the same product as the tiles'."""
        n_positions = ids.shape[1]
        logits = self.group(rearrange(ids, "c p -> (c p)"))
        logits = rearrange(logits, "l p (c q) -> c l p q", q=n_positions)
        return torch.diagonal(logits, dim1=-2, dim2=-1).contiguous()

    def group(self, ids: Int[Tensor, " token"]) -> Float[Tensor, "layer pos token"]:
        """The logits of a few tokens for every row."""
        ids = ids.to(self.device)
        logits = torch.mm(self._rows[: self._n_rows], self.weight[ids].to(torch.float32).T)
        self._finish(logits, ids)
        return rearrange(logits, "(l p) t -> l p t", l=self._n_layers)

    def each(self, ids: Int[Tensor, "layer pos k"]) -> Float[Tensor, "layer pos k"]:
        """The logits of every row's own tokens, for the first layers that are loaded."""
        rows = rearrange(self._rows[: self._n_rows], "(l p) d -> l p d", l=self._n_layers)
        logits = torch.empty(ids.shape, dtype=torch.float32, device=self.device)
        for layer in range(ids.shape[0]):
            places = ids[layer].to(self.device)
            weight = self.weight[places].to(torch.float32)
            logits[layer] = torch.einsum("pd,pkd->pk", rows[layer], weight)
            self._finish(logits[layer], places)
        return logits

    def _finish(self, logits: Float[Tensor, "*rows tile"], tokens: slice | Tensor) -> None:
        """Bias, then the elementwise steps, in place; casts are left out: float32 is kept."""
        if self.bias is not None:
            logits.add_(self.bias[tokens])
        for step in self.steps:
            value = step.value
            if isinstance(value, Tensor) and value.ndim > 0:
                value = value.detach()[tokens]
            if step.kind == "tanh":
                logits.tanh_()
            elif step.kind != "cast":
                _IN_PLACE[step.kind](logits, value)


_IN_PLACE = {"mul": Tensor.mul_, "div": Tensor.div_, "add": Tensor.add_, "sub": Tensor.sub_}


class WholeRows:
    """Rows whose logits come whole, from the model's own tail or a readout made by hand."""

    def __init__(self, readout: Any, *, tile_tokens: int):
        self.readout, self.tile_tokens = readout, tile_tokens
        self._logits: Tensor = torch.empty(0, dtype=torch.float32)
        self._tile: Tensor = torch.empty(0, dtype=torch.float32)

    @property
    def device(self) -> torch.device:
        """Where the logits are; that of the states once they are loaded."""
        return self._logits.device

    def load(self, states: Float[Tensor, "layer pos d_model"], inputs: Any = None) -> None:
        """Read these states, layer by layer."""
        options = {"inputs": inputs} if self.readout.kind == "replay" else {}
        parts = [self.readout.logits(layer[None], **options)[0] for layer in states]
        self._logits = parts[0][None] if len(parts) == 1 else torch.stack(parts)

    def tile(self, first: int) -> Float[Tensor, "layer pos tile"]:
        """A copy of the logits from token `first` on; valid until the next call."""
        logits = self._logits[..., first : first + self.tile_tokens]
        if self._tile.numel() < logits.numel() or self._tile.device != logits.device:
            self._tile = torch.empty(logits.numel(), dtype=torch.float32, device=logits.device)
        return self._tile[: logits.numel()].view(logits.shape).copy_(logits)

    def chosen(self, ids: Int[Tensor, "chosen pos"]) -> Float[Tensor, "chosen layer pos"]:
        """The logits of a few tokens for each position."""
        columns = rearrange(ids, "c p -> p c").expand(self._logits.shape[0], -1, -1)
        logits = self._logits.gather(-1, columns).to(torch.float32)
        return rearrange(logits, "l p c -> c l p").contiguous()

    def each(self, ids: Int[Tensor, "layer pos k"]) -> Float[Tensor, "layer pos k"]:
        """The logits of every row's own tokens."""
        return self._logits.gather(-1, ids.to(self.device)).to(torch.float32)

    def group(self, ids: Int[Tensor, " token"]) -> Float[Tensor, "layer pos token"]:
        """The logits of a few tokens for every row."""
        return self._logits[..., ids].to(torch.float32)


def same_unembedding(a: Any, b: Any) -> bool:
    """True where one product serves both: one matrix, one bias and the same steps."""
    if a is b:
        return True
    if a.weight is not b.weight or a.bias is not b.bias:
        return False
    return _same_steps(a.steps, b.steps)


def _same_steps(a: Sequence[Any], b: Sequence[Any]) -> bool:
    if len(a) != len(b):
        return False
    return all(
        x.kind == y.kind
        and (x.value is y.value or (not isinstance(x.value, Tensor) and x.value == y.value))
        for x, y in zip(a, b, strict=True)
    )
