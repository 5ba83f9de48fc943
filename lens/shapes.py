"""The axis glossary, and the array types made from it.

Axis names are the same in every annotation, and axes always stand in this order:

    set       a named set of target tokens
    layer     residual states asked for; layer l is the state after l blocks (0 = embedding)
    block     block calls, 0 to n_layers - 1: block l leads from layer l to layer l + 1
    batch     prompts
    pos       token positions, or any rows that are read one by one
    k         candidates of a top-k, best first
    d_model   width of the residual state (streams of a several-stream model lie side by side)
    d_unembed width that the unembedding takes (differs from d_model in OPT-350m and ALBERT)
    d_vocab   rows of the unembedding, padding rows included

Information is in bits everywhere, and names say so: `kl_bits`, `entropy_bits`, `logprob_bits`.
"""

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor

States = Float[Tensor, "layer batch pos d_model"]
"""Residual states of a batch of prompts."""

TokenIds = Int[Tensor, "batch pos"]
"""Token ids of a right-padded batch."""

TokenMask = Bool[Tensor, "batch pos"]
"""True where a token is real, False where it is padding."""

Logits = Float[Tensor, "batch pos d_vocab"]
"""What the model returns for a batch."""

PerCell = Float[np.ndarray, "layer pos"]
"""One number for each cell of a heatmap."""

__all__ = ["Logits", "PerCell", "States", "TokenIds", "TokenMask"]
