"""One optimiser step of a twin: groups, mixed gradients, and how far the matrices moved."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from lens.study.arms import Arm
from lens.study.building import matrices
from lens.study.recipe import Recipe


def optimiser_of(model: PreTrainedModel, arm: Arm, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW in three groups: embedding matrices, vectors of the trunk, matrices of the trunk.

    W_E, W_U, norms, biases and position vectors do not decay (but for an arm that asks for it):
    rare rows of an untied W_E get no gradient and would only shrink.
    """
    embeddings = list({id(p): p for p in matrices(model)}.values())
    taken = {id(p) for p in embeddings}
    rest = [(n, p) for n, p in model.named_parameters() if id(p) not in taken]
    vectors = [p for n, p in rest if _is_vector(n, p)]
    decaying = [p for n, p in rest if not _is_vector(n, p)]
    groups = [
        {"params": embeddings, "base": recipe.embedding_rate, "decays": arm.decayed},
        {"params": vectors, "base": recipe.trunk_rate, "decays": False},
        {"params": decaying, "base": recipe.trunk_rate, "decays": True},
    ]
    for group in groups:
        group["lr"] = group["base"]
        group["weight_decay"] = recipe.weight_decay if group["decays"] else 0.0
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], betas=(recipe.beta1, recipe.beta2), foreach=True
    )


def _is_vector(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim < 2 or name.endswith("wpe.weight")


def set_rates(optimiser: torch.optim.Optimizer, factor: float) -> None:
    """The rate of every group: its own, times the factor of this step."""
    for group in optimiser.param_groups:
        group["lr"] = group["base"] * factor


def mix_gradients(model: PreTrainedModel, mixing: tuple[float, float]) -> None:
    """g_E = g_in + k1 g_out and g_U = g_out + k2 g_in, in place; (0, 0) leaves them alone.

    With (1, 1) both matrices get what autograd gives a tied one, so that two that began alike stay
    alike, bit for bit.
    """
    if mixing == (0.0, 0.0):
        return
    W_E, W_U = matrices(model)
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
