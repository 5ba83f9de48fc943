"""The target text that an encoder-decoder writes by itself, one likeliest token at a time."""

from typing import TYPE_CHECKING, Any

import torch

from lens.checkpoint.inputs import forward_arguments
from lens.checkpoint.replay import logits_of
from lens.checkpoint.untouched import untouched
from lens.errors import PromptError

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint

MAX_TOKENS = 64


def greedy_target(
    checkpoint: "Checkpoint", source: Any, *, max_tokens: int = MAX_TOKENS
) -> list[int]:
    """Decoder ids for `source`, from the start token to the end token or `max_tokens`.

    Plain arg-max of the model's own logits: no beams, no forced or banned tokens. Raises
    PromptError where the config names no first token.
    """
    config = checkpoint.model.config
    start = getattr(config, "decoder_start_token_id", None)
    start = getattr(config, "bos_token_id", None) if start is None else start
    if start is None:
        raise PromptError(
            "The config names no decoder_start_token_id, so a target cannot be written. Pass the "
            "decoder's ids as the prompt."
        )
    ends = getattr(config, "eos_token_id", None)
    ends = set(ends) if isinstance(ends, list | tuple) else {ends}
    limit = min(max_tokens, checkpoint.n_ctx or max_tokens)
    ids = [int(start)]
    with untouched(checkpoint.model):
        while len(ids) < limit:
            inputs = checkpoint.inputs_of([ids], source=source)
            arguments = forward_arguments(checkpoint.model, inputs, seq2seq=True)
            ids.append(int(torch.argmax(logits_of(checkpoint.model(**arguments))[0, -1])))
            if ids[-1] in ends:
                break
    return ids
