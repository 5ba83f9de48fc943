"""One optimiser step of a twin: groups, mixed gradients, and how far the matrices moved."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lens.study.continuation import Continuation
from lens.study.recipe import Recipe


def optimiser_of(
    model: nn.Module,
    embeddings: Sequence[nn.Parameter],
    rates: Recipe | Continuation,
    *,
    decayed: bool = False,
) -> torch.optim.AdamW:
    """AdamW in three groups: embedding matrices, vectors of the trunk, matrices of the trunk.

    `embeddings` are W_E and W_U, one parameter twice where they are tied. They, norms, biases and
    position vectors do not decay (the first do with `decayed`): rare rows of an untied W_E get no
    gradient and would only shrink.
    """
    first = list({id(p): p for p in embeddings}.values())
    taken = {id(p) for p in first}
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    rest = [p for p in model.parameters() if id(p) not in taken]
    vectors = [p for p in rest if p.ndim < 2 or id(p) in looked_up]
    decaying = [p for p in rest if p.ndim >= 2 and id(p) not in looked_up]
    groups = [
        {"params": first, "base": rates.embedding_rate, "decays": decayed},
        {"params": vectors, "base": rates.trunk_rate, "decays": False},
        {"params": decaying, "base": rates.trunk_rate, "decays": True},
    ]
    for group in groups:
        group["lr"] = group["base"]
        group["weight_decay"] = rates.weight_decay if group["decays"] else 0.0
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], betas=(rates.beta1, rates.beta2), foreach=True
    )


def set_rates(optimiser: torch.optim.Optimizer, factor: float) -> None:
    """The rate of every group: its own, times the factor of this step."""
    for group in optimiser.param_groups:
        group["lr"] = group["base"] * factor


def mix_gradients(
    embeddings: tuple[nn.Parameter, nn.Parameter], mixing: tuple[float, float]
) -> None:
    """g_E = g_in + k1 g_out and g_U = g_out + k2 g_in, in place; (0, 0) leaves them alone.

    With (1, 1) both matrices get what autograd gives a tied one, so that two that began alike stay
    alike, bit for bit.
    """
    if mixing == (0.0, 0.0):
        return
    W_E, W_U = embeddings
    g_in, g_out = W_E.grad, W_U.grad
    if g_in is None or g_out is None:
        raise AssertionError("both matrices have a gradient after a backward pass")
    W_E.grad = g_in + mixing[0] * g_out
    W_U.grad = g_out + mixing[1] * g_in


def relative_updates(
    before: Float[Tensor, "d_vocab d_model"],
    after: Float[Tensor, "d_vocab d_model"],
    groups: list[Tensor],
) -> list[float]:
    """|after - before| / |before| of each group of rows (frequency deciles)."""
    moved, whole = (after - before).square().sum(1), before.square().sum(1)
    return [float((moved[g].sum() / whole[g].sum()).sqrt()) for g in groups]
