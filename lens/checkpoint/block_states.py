"""The states before, within and after blocks, and what attention and MLP add between them."""

import re
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from lens.errors import SelectionError

_HOOK = re.compile(r"blocks\.(\d+)\.hook_(resid_pre|attn_out|resid_mid|mlp_out|resid_post)")


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockStates:
    """One prompt through some blocks: `resid_pre[i]` is what enters block `blocks[i]`, and so on.

    resid_pre + attn_out = resid_mid and resid_mid + mlp_out = resid_post up to rounding:
    `attn_out` is what attention ADDS to the stream, after a norm or a factor that the model
    applies to it, in a decoder with an encoder cross-attention included.
    """

    resid_pre: Float[Tensor, "block pos d_model"]
    attn_out: Float[Tensor, "block pos d_model"]
    resid_mid: Float[Tensor, "block pos d_model"]
    mlp_out: Float[Tensor, "block pos d_model"]
    resid_post: Float[Tensor, "block pos d_model"]
    blocks: tuple[int, ...]
    input_ids: Int[Tensor, " pos"]
    model_id: str
    model_hash: str

    def at(self, hook: str) -> Float[Tensor, "pos d_model"]:
        """One of them by TransformerLens' name, "blocks.3.hook_attn_out".

        Raises SelectionError for another hook, or a block that was not captured.
        """
        found = _HOOK.fullmatch(hook)
        if found is None:
            raise SelectionError(
                f"{hook!r} is none of blocks.N.hook_resid_pre, hook_attn_out, hook_resid_mid, "
                "hook_mlp_out, hook_resid_post."
            )
        block = int(found[1])
        if block not in self.blocks:
            raise SelectionError(f"Block {block} was not captured; these were: {self.blocks}.")
        return getattr(self, found[2])[self.blocks.index(block)]
