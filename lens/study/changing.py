"""A twin's matrices changed in the middle of training, with the Adam state that belongs to them."""

import copy
from typing import Any

from transformers import PreTrainedModel


def changed(state: dict[str, Any], model: PreTrainedModel, *, tied: bool | None) -> dict[str, Any]:
    """The state of a run with one matrix (True), with two (False), or as it was (None).

    Untying gives both matrices the values and the moments of the one. Tying takes the mean of
    both, of values and of moments. The embedding matrices are the optimiser's first parameters.
    """
    new = copy.deepcopy(state)
    if tied is None or tied == state["tied"]:
        return new
    name_E, name_U = (_name_of(model, which) for which in (0, 1))
    weights, adam = new["model"], new["optimiser"]
    moments, group = adam["state"], adam["param_groups"][0]
    if tied:
        for name in (name_E, name_U):
            weights[name] = (state["model"][name_E] + state["model"][name_U]) / 2
        both = (moments[0], moments[1])
        mean = {
            key: value.clone() if key == "step" else (value + both[1][key]) / 2
            for key, value in both[0].items()
        }
        kept = {0: mean} | {place - 1: held for place, held in moments.items() if place > 1}
        shift = -1
    else:
        weights[name_U] = weights[name_E].clone()
        kept = {0: moments[0], 1: copy.deepcopy(moments[0])}
        kept |= {place + 1: held for place, held in moments.items() if place > 0}
        shift = 1
    adam["state"] = kept
    group["params"] = [0] if tied else [0, 1]
    for other in adam["param_groups"][1:]:
        other["params"] = [place + shift for place in other["params"]]
    new["tied"] = tied
    return new


def _name_of(model: PreTrainedModel, which: int) -> str:
    """The state dict's key of W_E (0) or W_U (1)."""
    modules = dict(model.named_modules(remove_duplicate=False))
    door = (model.get_input_embeddings(), model.get_output_embeddings())[which]
    return next(f"{name}.weight" for name, module in modules.items() if module is door)
