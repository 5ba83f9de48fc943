"""Which token the model's own final rows rank first, before the pass that counts its rank.

It is a guess: the pass checks it, and repeats a chunk for which it was wrong. So it may be read
in bfloat16 where a processor multiplies that several times faster: the best sixteen are then
scored again in float32, and only a near-tie beyond them can be missed.
"""

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from lens.lenses.best import Best, block_maxima
from lens.lenses.chunks import CHUNK_ROWS, Source
from lens.lenses.sums import NOT_FOUND
from lens.lenses.tiles import DirectRows

CANDIDATES = 16


def multiplies_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 faster than float32."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))


def guess_final_top(source: Source, *, max_rows: int = CHUNK_ROWS) -> Int[Tensor, " pos"]:
    """The token that each final row ranks first; 0 where the final readout gives whole logits."""
    n_positions = source.final_states.shape[0]
    guess = torch.zeros(n_positions, dtype=torch.int64, device=source.device)
    readout = source.final_readout
    if readout.kind != "direct":
        return guess
    max_rows = min(max_rows, n_positions)
    narrow = source.device.type == "cpu" and multiplies_bfloat16()
    side = DirectRows(
        readout.unembedding, max_rows=max_rows, tile_tokens=source.tile_tokens, narrow=narrow
    )
    top_k = min(CANDIDATES if narrow else 1, side.d_vocab)
    best = _best_fused if source.fused else _best
    for begin in range(0, n_positions, max_rows):
        places = slice(begin, begin + max_rows)
        side.load(readout.prepare(source.final_states[None, places]))
        tokens = best(side, top_k)
        tokens = torch.where(tokens == NOT_FOUND, 0, tokens)  # a row of NaN: the pass marks it
        guess[places] = _scored_again(side, tokens) if narrow else tokens[:, 0]
    return guess


def _scored_again(side: DirectRows, tokens: Int[Tensor, "pos k"]) -> Int[Tensor, " pos"]:
    """The best of a few tokens by their float32 logits; a tie goes to the lower id."""
    tokens = tokens.sort(dim=1).values
    logits = torch.nan_to_num(side.each(tokens[None])[0], nan=-torch.inf)
    return tokens.gather(1, logits.argmax(-1, keepdim=True))[:, 0]


def _best(side: DirectRows, top_k: int) -> Int[Tensor, "pos k"]:
    found = Best(side.n_rows, top_k, side.device)
    for first in range(0, side.d_vocab, side.tile_tokens):
        logits = side.tile(first)[0]
        found.update(first, logits, block_maxima(logits))
    found.settle()
    return found.tokens


def _best_fused(side: DirectRows, top_k: int) -> Int[Tensor, "pos k"]:
    from lens.lenses import kernels

    values = np.full((1, side.n_rows, top_k), -np.inf, dtype=np.float32)
    tokens = np.full((1, side.n_rows, top_k), NOT_FOUND, dtype=np.int64)
    for first in range(0, side.d_vocab, side.tile_tokens):
        kernels.best_of_tile(first, side.tile(first).numpy(), values, tokens)
    return torch.from_numpy(tokens[0])
