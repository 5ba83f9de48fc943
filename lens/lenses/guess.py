"""Which token the model's own final rows rank first, before the pass that counts its rank.

It is a guess: the pass checks it, and repeats a chunk for which it was wrong. So it may be read
in bfloat16 where a processor multiplies that several times faster: the best sixteen are then
scored again in float32, and only a near-tie beyond them can be missed.
"""

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from lens.lenses import reduction
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
    on_cpu = source.device.type == "cpu" and reduction.has_numba()
    narrow = on_cpu and multiplies_bfloat16()
    side = DirectRows(
        readout.unembedding, max_rows=max_rows, tile_tokens=source.tile_tokens, narrow=narrow
    )
    for begin in range(0, n_positions, max_rows):
        places = slice(begin, begin + max_rows)
        side.load(readout.prepare(source.final_states[None, places]))
        guess[places] = _best_fused(side) if on_cpu else _best(side)
    return guess


def _best(side: DirectRows) -> Int[Tensor, " pos"]:
    best: Tensor | None = None
    tokens = torch.zeros(0, dtype=torch.int64)
    for first in range(0, side.d_vocab, side.tile_tokens):
        values, places = side.tile(first)[0].max(-1)
        if best is None:
            best, tokens = values, places
            continue
        better = values > best
        tokens = torch.where(better, places + first, tokens)
        best = torch.where(better, values, best)
    return tokens


def _best_fused(side: DirectRows) -> Int[Tensor, " pos"]:
    from lens.lenses import kernels

    shape = (side.n_rows, min(CANDIDATES if side.narrow else 1, side.d_vocab))
    values = np.full(shape, -np.inf, dtype=np.float32)
    tokens = np.full(shape, NOT_FOUND, dtype=np.int64)
    for first in range(0, side.d_vocab, side.tile_tokens):
        kernels.best_of_tile(first, side.tile(first).numpy(), values[None], tokens[None])
    tokens[tokens == NOT_FOUND] = 0  # a row of NaN: the pass marks it
    if not side.narrow:
        return torch.from_numpy(tokens[:, 0])
    tokens.sort(axis=1)
    candidates = torch.from_numpy(tokens)
    logits = torch.nan_to_num(side.each(candidates[None])[0], nan=-torch.inf)
    best = logits.argmax(-1, keepdim=True)
    return candidates.gather(1, best)[:, 0]
