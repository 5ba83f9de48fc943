"""The k best logits of each row, tile by tile, in torch: only blocks that can hold one are read."""

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from lens.lenses.sums import NOT_FOUND

BLOCK_TOKENS = 64
"""A block of this many tokens is searched for top-k only where its maximum beats the k-th best."""


def block_count(n_tokens: int) -> int:
    """Blocks of a tile; the last may be short."""
    return -(-n_tokens // BLOCK_TOKENS)


def block_maxima(
    logits: Float[Tensor, "*rows tile"], *, out: Float[Tensor, "*rows block"] | None = None
) -> Float[Tensor, "*rows block"]:
    """The maximum of each block of tokens, NaN where one is NaN."""
    if out is None:
        shape = (*logits.shape[:-1], block_count(logits.shape[-1]))
        out = torch.empty(shape, dtype=logits.dtype, device=logits.device)
    whole = logits.shape[-1] // BLOCK_TOKENS
    rest = logits[..., whole * BLOCK_TOKENS :]
    if whole:
        blocks = rearrange(logits[..., : whole * BLOCK_TOKENS], "... (b v) -> ... b v", b=whole)
        torch.amax(blocks, -1, out=out[..., :whole])
    if rest.shape[-1]:
        torch.amax(rest, -1, out=out[..., whole])
    return out


class Best:
    """The k best logits of each row so far, best first; a tie goes to the lower id.

    Candidates are set aside and merged after 1, 2, 4, 8 ... tiles: the later, the fewer there are.
    """

    def __init__(self, n_rows: int, top_k: int, device: torch.device):
        shape = (n_rows, top_k)
        self.values = torch.full(shape, -torch.inf, dtype=torch.float32, device=device)
        self.tokens = torch.full(shape, NOT_FOUND, dtype=torch.int64, device=device)
        self._aside: list[tuple[Tensor, Tensor, Tensor]] = []
        self._seen, self._merge_at = 0, 1

    def update(
        self,
        first: int,
        logits: Float[Tensor, "pos tile"],
        highest: Float[Tensor, "pos block"],
    ) -> None:
        """Look only into the blocks whose maximum, in `highest`, reaches the worst that is kept."""
        width = logits.shape[-1]
        padding = -width % BLOCK_TOKENS
        if padding:
            logits = torch.nn.functional.pad(logits, (0, padding), value=-torch.inf)
        blocks = rearrange(logits, "p (b v) -> p b v", v=BLOCK_TOKENS)
        worst, top_k = self.values[:, -1], self.values.shape[1]
        if first == 0 and highest.shape[1] >= top_k:
            # k blocks hold k logits at least as high as the k-th best of their maxima.
            worst = highest.topk(top_k).values[:, -1]
        rows, block = (highest >= worst[:, None]).nonzero(as_tuple=True)
        values = blocks[rows, block]
        pair, column = (values >= worst[rows, None]).nonzero(as_tuple=True)
        places = block[pair] * BLOCK_TOKENS + column
        if padding:
            real = places < width
            pair, column, places = pair[real], column[real], places[real]
        self._aside.append((rows[pair], values[pair, column], places + first))
        self._seen += 1
        if self._seen == self._merge_at:
            self._merge_at *= 2
            self.settle()

    def settle(self) -> None:
        """Merge what was set aside; before this, values and tokens are of some tiles ago."""
        if not self._aside:
            return
        rows, values, tokens = (torch.cat(parts) for parts in zip(*self._aside, strict=True))
        self._aside.clear()
        if len(rows):
            rows, order = rows.sort(stable=True)
            self._merge(rows, values[order], tokens[order])

    def _merge(self, rows: Tensor, values: Tensor, tokens: Tensor) -> None:
        """Take in single logits, given by rising row and rising token."""
        counts = torch.bincount(rows, minlength=len(self.values))
        touched = counts.nonzero()[:, 0]
        places = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
        shape = (len(self.values), int(counts.max()))
        new_values = torch.full(shape, -torch.inf, dtype=values.dtype, device=values.device)
        new_tokens = torch.full(shape, NOT_FOUND, device=values.device)
        new_values[rows, places], new_tokens[rows, places] = values, tokens
        values = torch.cat([self.values[touched], new_values[touched]], dim=1)
        tokens = torch.cat([self.tokens[touched], new_tokens[touched]], dim=1)
        for place in range(self.values.shape[1]):
            best = values.amax(-1, keepdim=True)
            token = torch.where(values == best, tokens, NOT_FOUND).amin(-1, keepdim=True)
            self.values[touched, place], self.tokens[touched, place] = best[:, 0], token[:, 0]
            taken = tokens == token
            values.masked_fill_(taken, -torch.inf)
            tokens.masked_fill_(taken, NOT_FOUND)
