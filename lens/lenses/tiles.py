"""Logits, one tile of the vocabulary at a time, into a buffer that is used again."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

TILE_TOKENS = 1024
"""Columns of one tile: a 512 x 1,024 tile is 2 MiB and stays in the cache of one core."""


class VocabularyTiles:
    """The product of prepared rows with an unembedding, tile by tile, in float32.

    The unembedding is read where it stands: a weight of another dtype is widened one tile at a
    time. Bias and steps (scale, soft-cap, offset) are applied in the model's own order.
    """

    def __init__(self, unembedding: Any, *, max_rows: int, tile_tokens: int = TILE_TOKENS):
        self.weight = unembedding.weight.detach()
        self.bias = None if unembedding.bias is None else unembedding.bias.detach()
        self.steps = unembedding.steps
        self.tile_tokens = tile_tokens
        self.d_vocab = self.weight.shape[0]
        device = self.weight.device
        self._buffer = torch.empty(max_rows * tile_tokens, dtype=torch.float32, device=device)
        self._widened = None
        if self.weight.dtype != torch.float32:
            d_unembed = self.weight.shape[1]
            self._widened = torch.empty(tile_tokens, d_unembed, dtype=torch.float32, device=device)

    def tile(self, rows: Float[Tensor, "pos d_unembed"], first: int) -> Float[Tensor, "pos tile"]:
        """Logits of the tokens from id `first` on; valid until the next call."""
        last = min(first + self.tile_tokens, self.d_vocab)
        weight = self.weight[first:last]
        if self._widened is not None:
            weight = self._widened[: last - first].copy_(weight)
        logits = self._buffer[: rows.shape[0] * (last - first)].view(rows.shape[0], last - first)
        torch.mm(rows, weight.T, out=logits)
        if self.bias is not None:
            logits.add_(self.bias[first:last])
        apply_steps(logits, self.steps, slice(first, last))
        return logits

    def chosen(
        self, rows: Float[Tensor, "layer pos d_unembed"], ids: Int[Tensor, " pos"]
    ) -> Float[Tensor, "layer pos"]:
        """The logit of one chosen token for each position, from a dot product; ids must exist."""
        weight = self.weight[ids].to(torch.float32)
        logits = torch.einsum("lpd,pd->lp", rows, weight)
        if self.bias is not None:
            logits += self.bias[ids]
        apply_steps(logits, self.steps, ids)
        return logits

    def group(
        self, rows: Float[Tensor, "pos d_unembed"], ids: Int[Tensor, " token"]
    ) -> Float[Tensor, "pos token"]:
        """The logits of a few chosen tokens for every row."""
        logits = rows @ self.weight[ids].to(torch.float32).T
        if self.bias is not None:
            logits += self.bias[ids]
        apply_steps(logits, self.steps, ids)
        return logits


def apply_steps(
    logits: Float[Tensor, "*rows tile"], steps: Sequence[Any], tokens: slice | Tensor
) -> None:
    """Do the elementwise operations after the product, in place, on the logits of `tokens`."""
    for step in steps:
        value = step.value
        if isinstance(value, Tensor) and value.ndim > 0:
            value = value.detach()[tokens]
        if step.kind == "mul":
            logits.mul_(value)
        elif step.kind == "div":
            logits.div_(value)
        elif step.kind == "add":
            logits.add_(value)
        elif step.kind == "tanh":
            logits.tanh_()
        else:
            raise ValueError(f"Unknown step {step.kind!r}; expected mul, div, add or tanh.")


def same_unembedding(a: Any, b: Any) -> bool:
    """True where one product serves both: one matrix, one bias and the same steps."""
    if a is b:
        return True
    if a.weight is not b.weight or a.bias is not b.bias or len(a.steps) != len(b.steps):
        return False
    return all(
        x.kind == y.kind
        and (x.value is y.value or (not isinstance(x.value, Tensor) and x.value == y.value))
        for x, y in zip(a.steps, b.steps, strict=True)
    )
