"""A vocabulary of which the likely tokens are kept, and the rest stands for itself by a sample.

A sampled token counts for as many as were left out beside it: its logit is raised by the log of
that number, so that the sum over the sample estimates the sum over all the rest.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens.checkpoint.readout import Step, Unembedding

WHOLE_UP_TO = 16_384
"""A vocabulary of at most so many tokens is taken as it is."""

HEAD, REST = 6_144, 2_048


@dataclass(frozen=True, kw_only=True, eq=False)
class ReducedVocabulary:
    """The ids that are kept, `n_head` likely ones first, and the log of what each stands for."""

    ids: Int[Tensor, " kept"]
    log_weight: Float[Tensor, " kept"]
    n_head: int
    is_whole: bool

    @classmethod
    def of(cls, likely: Float[Tensor, " d_vocab"], *, seed: int) -> "ReducedVocabulary":
        """Keep the tokens with the most of `likely`, and a seeded sample of the others."""
        size, device = len(likely), likely.device
        if size <= max(WHOLE_UP_TO, HEAD + REST):
            zero = torch.zeros(size, dtype=torch.float32, device=device)
            return cls(
                ids=torch.arange(size, device=device), log_weight=zero, n_head=size, is_whole=True
            )
        order = torch.argsort(likely, descending=True, stable=True)
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randperm(size - HEAD, generator=generator)[:REST].to(device) + HEAD
        weight = torch.zeros(HEAD + REST, dtype=torch.float32, device=device)
        weight[HEAD:] = math.log((size - HEAD) / REST)
        return cls(
            ids=torch.cat([order[:HEAD], order[drawn]]),
            log_weight=weight,
            n_head=HEAD,
            is_whole=False,
        )

    def unembedding(self, whole: Unembedding) -> Unembedding:
        """The rows of W_U, the biases and the steps of the tokens that are kept."""
        if self.is_whole:
            return whole
        steps = []
        for step in whole.steps:
            value = step.value
            if isinstance(value, Tensor) and value.ndim:
                value = value[self.ids]
            steps.append(Step(step.kind, value))
        bias = None if whole.bias is None else whole.bias[self.ids]
        return Unembedding(whole.weight[self.ids], bias, tuple(steps))
