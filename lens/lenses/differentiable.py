"""The model's own tail with a gradient: from a state to what enters the unembedding, or to logits.

Nothing gathers in the model's parameters as long as gradients are taken with respect to something
else, by `torch.autograd.grad`.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from lens.checkpoint.inputs import Inputs, forward_arguments
from lens.checkpoint.readout import DirectReadout, Unembedding
from lens.checkpoint.replay import ReplayReadout, logits_of, replaced_blocks
from lens.checkpoint.tail import OwnTail
from lens.checkpoint.untouched import at_rest, untouched
from lens.errors import UnsupportedArchitectureError

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint


def prepared(
    checkpoint: "Checkpoint", states: Float[Tensor, "*rows d_model"]
) -> Float[Tensor, "*rows d_unembed"]:
    """What the direct readout puts into the unembedding, differentiable in the states; float32.

    It lies where the unembedding does.
    """
    readout = checkpoint.readout
    assert isinstance(readout, DirectReadout)
    with at_rest(*readout.modules), torch.enable_grad():
        rows = states.to(checkpoint.dtype)
        for part in readout.preparation:
            if isinstance(part, OwnTail):
                part = OwnTail(partial(replayed, checkpoint.replay), part.weight)
            rows = part(rows)
        return rows.float().to(readout.unembedding.weight.device)


def replayed(
    replay: ReplayReadout,
    states: Float[Tensor, "batch pos d_model"],
    inputs: Inputs | None = None,
) -> Float[Tensor, "batch pos d_vocab"]:
    """The logits that the model's own code makes of states, differentiable in them."""
    if inputs is None:
        inputs = replay._filled(states.shape[0], states.shape[1], states.device)
    arguments = forward_arguments(replay.model, inputs, seq2seq=replay.seq2seq)
    with (
        untouched(replay.model),
        torch.enable_grad(),
        replaced_blocks(replay.trunk, states, then=None),
    ):
        return logits_of(replay.model(**arguments))


def pulled_back(
    output: Tensor, leaves: Sequence[Tensor], force: Tensor, *, again: bool = False
) -> tuple[Tensor, ...]:
    """The gradient of (force . output) for each leaf; `again` keeps the graph for a further call.

    Raises UnsupportedArchitectureError where the model's own code cuts the graph.
    """
    grads: tuple[Tensor | None, ...] = (None,)
    if output.requires_grad:
        grads = torch.autograd.grad(
            output, list(leaves), force, allow_unused=True, retain_graph=again
        )
    found = tuple(grad for grad in grads if grad is not None)
    if len(found) < len(leaves):
        raise UnsupportedArchitectureError(
            "The model's own code cuts the gradient between a state and the logits (reversible "
            "blocks, no_grad). Missing step: the gradient of the tail. fit_ridge needs none."
        )
    return found


def in_float32(unembedding: Unembedding) -> Unembedding:
    """The same product in float32, without casts; a float32 matrix stays the model's own."""
    steps = []
    for step in unembedding.steps:
        if step.kind == "cast":
            continue
        value = step.value
        if isinstance(value, Tensor):
            value = value.detach().float()
        steps.append(type(step)(step.kind, value))
    bias = unembedding.bias
    return Unembedding(
        unembedding.weight.detach().float(),
        None if bias is None else bias.detach().float(),
        tuple(steps),
    )
