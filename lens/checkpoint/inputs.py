"""What goes into a model for one forward: ids, mask, positions and an encoder's source."""

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lens.errors import PromptError


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """One right-padded batch for the stack that is read.

    `ids` [batch, pos] are the tokens of that stack (the decoder's, in an encoder-decoder), `mask`
    is True at real tokens, or None where all are. `source_ids` [batch, source] feed the encoder.
    """

    ids: Int[Tensor, "batch pos"]
    mask: Bool[Tensor, "batch pos"] | None = None
    position_ids: Int[Tensor, "batch pos"] | None = None
    source_ids: Int[Tensor, "batch source"] | None = None
    source_mask: Bool[Tensor, "batch source"] | None = None

    def row(self, index: int, length: int) -> "Inputs":
        """The one prompt at `index`, its padding cut off."""
        one = slice(index, index + 1)
        return replace(
            self,
            ids=self.ids[one, :length],
            mask=None,
            position_ids=None if self.position_ids is None else self.position_ids[one, :length],
            source_ids=None if self.source_ids is None else self.source_ids[one],
            source_mask=None if self.source_mask is None else self.source_mask[one],
        )


def pad_right(prompts: list[list[int]], *, pad_id: int, device: torch.device) -> Inputs:
    """Put prompts of token ids side by side, padded on the right; no mask where none is padded."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), longest), pad_id, dtype=torch.long)
    mask = torch.zeros((len(prompts), longest), dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt, dtype=torch.long)
        mask[row, : len(prompt)] = True
    return Inputs(ids=ids.to(device), mask=None if bool(mask.all()) else mask.to(device))


def forward_arguments(model: torch.nn.Module, inputs: Inputs, *, seq2seq: bool) -> dict[str, Any]:
    """Keyword arguments of the model's own forward: these inputs, no cache, an output object."""
    accepted = inspect.signature(model.forward).parameters
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    prefix = "decoder_" if seq2seq else ""
    arguments: dict[str, Any] = {f"{prefix}input_ids": inputs.ids}
    if inputs.mask is not None:
        arguments[f"{prefix}attention_mask"] = inputs.mask.long()
    if inputs.position_ids is not None:
        arguments[f"{prefix}position_ids"] = inputs.position_ids
    if seq2seq:
        arguments["input_ids"] = inputs.source_ids
        if inputs.source_mask is not None:
            arguments["attention_mask"] = inputs.source_mask.long()
    # Router logits would go into a loss over experts, which needs blocks that ran.
    options = (("use_cache", False), ("return_dict", True), ("output_router_logits", False))
    for name, value in options:
        if name in accepted or (open_ended and name == "return_dict"):
            arguments[name] = value
    missing = [name for name in arguments if name not in accepted and not open_ended]
    if missing:
        raise PromptError(
            f"{type(model).__name__}.forward takes no {', '.join(missing)}; it takes "
            f"{', '.join(accepted)}. Give prompts of equal length, without position ids."
        )
    return arguments
