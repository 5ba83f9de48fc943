"""The fast mode's second look: what was read in bfloat16 is scored again in float32.

Sums over the vocabulary (entropy, KL, log-sum-exp) stay as the bfloat16 product gave them; the
logits of the tokens that are named (top-k, target, final top-1, own) are those of float32.
"""

from dataclasses import replace

import numpy as np
import torch

from lens.lenses.chunks import Chunk
from lens.lenses.sums import OWN, OWN_LOGIT, Sums


def extra_candidates(top_k: int) -> int:
    """How many more than `top_k` are kept, so that rounding does not push one out."""
    return top_k + 11


def rescore(chunk: Chunk, sums: Sums, top_k: int) -> Sums:
    """The sums with named logits in float32, and the best `top_k` by those."""
    logits = chunk.each(torch.from_numpy(np.minimum(sums.top_ids, chunk.d_vocab - 1)))
    logits = np.where(sums.top_ids < chunk.d_vocab, logits.cpu().numpy(), -np.inf)
    order = np.lexsort((sums.top_ids, -logits), axis=-1)[..., :top_k]
    lens, final = sums.lens.copy(), sums.final.copy()
    own = torch.from_numpy(sums.ids[OWN:].clip(0))
    has_own = sums.ids[OWN] >= 0
    lens[..., OWN_LOGIT] = np.where(has_own, chunk.chosen(own)[0].cpu().numpy(), np.nan)
    final[..., -1] = np.where(has_own, chunk.chosen_final(own)[0].cpu().numpy(), np.nan)
    return replace(
        sums,
        lens=lens,
        final=final,
        top_values=np.take_along_axis(logits, order, -1).astype(np.float32),
        top_ids=np.take_along_axis(sums.top_ids, order, -1),
        final_top_ids=sums.ids[1],
    )
