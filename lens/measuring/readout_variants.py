"""A direct readout without one of its parts: output bias, norm bias, the mean row of W_U."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lens.checkpoint.readout import DirectReadout
from lens.linear import mean_row

VARIANTS = ("as it is", "output bias zero", "norm bias zero", "mean direction out")


def variants(readout: DirectReadout, bias: Tensor | None) -> dict[str, DirectReadout]:
    """By VARIANTS: the readout without each of the parts that it has; `bias` is the norm's."""
    found = {"as it is": readout}
    unembedding = readout.unembedding
    if output_bias(readout) is not None:
        steps = tuple(s for s in unembedding.steps if not _adds_rows(s))
        found["output bias zero"] = replace(
            readout, unembedding=replace(unembedding, bias=None, steps=steps)
        )
    if bias is not None:
        taken: Callable[[Tensor], Tensor] = lambda x: x - bias.to(x)  # noqa: E731
        found["norm bias zero"] = replace(readout, preparation=(*readout.preparation, taken))
    weight = unembedding.weight.detach()
    mean = mean_row(weight)
    if float(mean.norm()) > 0:
        direction = (mean / mean.norm()).to(weight)
        # A row common to all tokens moves all logits alike; what tells tokens apart is how far
        # each row reaches along it.
        without = weight - (weight @ direction)[:, None] * direction
        found["mean direction out"] = readout.through(without)
    return found


def _adds_rows(step: Any) -> bool:
    return step.kind in ("add", "sub") and isinstance(step.value, Tensor) and step.value.ndim > 0


def output_bias(readout: DirectReadout) -> Float[Tensor, " row"] | None:
    """All that is added to the logit of a token whatever the state; None where nothing is."""
    unembedding = readout.unembedding
    parts = [] if unembedding.bias is None else [unembedding.bias.detach().double()]
    for step in unembedding.steps:
        if _adds_rows(step):
            assert isinstance(step.value, Tensor)
            sign = 1.0 if step.kind == "add" else -1.0
            parts.append(sign * step.value.detach().double())
    return torch.stack(parts).sum(0) if parts else None
