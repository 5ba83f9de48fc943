"""Translators of all layers, fitted at once by KL; a fit can stop and go on bit for bit."""

from collections.abc import Sequence
from typing import Any

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from lens.errors import SelectionError
from lens.lenses.state_divergence import StateDivergence, StateRows

LEARNING_RATES: dict[str, float] = {"adam": 1e-3, "muon": 1e-2}
"""Defaults. Muon's is the length of a step of W itself, whose identity has length 1."""

LEAST_GAIN_BITS = 1e-4


class TranslatorFit:
    """h + W h + b for every layer below the output, from W = 0 and b = 0 on.

    Each layer keeps what did best on the rows held out, the beginning among it. Muon moves the
    matrices, Adam the biases beside it. The rate rises over the first tenth of the steps, then
    falls in a line.
    """

    def __init__(
        self,
        divergence: StateDivergence,
        held_out: Sequence[StateRows],
        *,
        steps: int,
        optimiser: str = "adam",
        learning_rate: float | None = None,
    ):
        if optimiser not in LEARNING_RATES:
            raise SelectionError(
                f"There is no optimiser {optimiser!r}; there are {', '.join(LEARNING_RATES)}."
            )
        self.divergence, self.held_out, self.steps = divergence, held_out, steps
        rate = LEARNING_RATES[optimiser] if learning_rate is None else learning_rate
        n_layers, _, d_model = held_out[0].states.shape
        like = {"device": held_out[0].states.device, "dtype": torch.float32}
        self.weights = [torch.zeros(d_model, d_model, **like) for _ in range(n_layers - 1)]
        self.bias = torch.zeros(n_layers - 1, d_model, **like)
        if optimiser == "muon":
            matrices: Any = torch.optim.Muon(self.weights, lr=rate, weight_decay=0.0)
            self._optimisers = [matrices, torch.optim.Adam([self.bias], lr=LEARNING_RATES["adam"])]
        else:
            self._optimisers = [torch.optim.Adam([*self.weights, self.bias], lr=rate)]
        self._rates = [o.param_groups[0]["lr"] for o in self._optimisers]
        self.done = 0
        self.first_kl_bits = self.held_out_kl_bits()
        self.best_kl_bits = self.first_kl_bits.clone()
        self.best_weight, self.best_bias = self.weight, self.bias.clone()
        self.checks_without_gain = 0

    @property
    def weight(self) -> Float[Tensor, "translator d_model d_model"]:
        """The matrices as they stand."""
        return torch.stack(self.weights)

    def step(self, parts: Sequence[StateRows]) -> None:
        """One step on a batch."""
        self.done += 1
        rate = min(self.done / max(1, self.steps // 10), 1.0) * (1 - (self.done - 1) / self.steps)
        for optimiser, full in zip(self._optimisers, self._rates, strict=True):
            optimiser.param_groups[0]["lr"] = full * rate
        count = sum(part.n_read for part in parts)
        weight_grad, bias_grad = torch.zeros_like(self.weight), torch.zeros_like(self.bias)
        for part in parts:
            _, pull = self.divergence.kl_and_pull(self._moved(part), part)
            below = part.states[:-1]
            weight_grad += einsum(pull, below, "l p o, l p i -> l o i") / count
            bias_grad += pull.sum(1) / count
        for place, weight in enumerate(self.weights):
            weight.grad = weight_grad[place]
        self.bias.grad = bias_grad
        for optimiser in self._optimisers:
            optimiser.step()

    def check(self) -> None:
        """Look at the rows held out, and keep what got better there, layer by layer."""
        kl = self.held_out_kl_bits()
        better = kl < self.best_kl_bits
        gain = float((self.best_kl_bits - kl).clamp_min(0).mean())
        self.checks_without_gain = 0 if gain > LEAST_GAIN_BITS else self.checks_without_gain + 1
        self.best_kl_bits = torch.where(better, kl, self.best_kl_bits)
        self.best_weight[better] = self.weight[better]
        self.best_bias[better] = self.bias[better]

    def held_out_kl_bits(self) -> Float[Tensor, " translator"]:
        """Mean KL on the rows held out, by layer, with the translators as they stand."""
        total = torch.zeros(len(self.weights), dtype=torch.float32, device=self.bias.device)
        for part in self.held_out:
            kl = self.divergence.kl_bits(self._moved(part), part)
            total += kl[:, part.read].sum(1)
        return total / sum(part.n_read for part in self.held_out)

    def state(self) -> dict[str, Any]:
        """All that the rest of the fit depends on, as tensors and numbers."""
        return {
            "done": self.done,
            "checks_without_gain": self.checks_without_gain,
            "weights": self.weights,
            "bias": self.bias,
            "first_kl_bits": self.first_kl_bits,
            "best_kl_bits": self.best_kl_bits,
            "best_weight": self.best_weight,
            "best_bias": self.best_bias,
            "optimisers": [optimiser.state_dict() for optimiser in self._optimisers],
        }

    def resume(self, state: dict[str, Any]) -> None:
        """Go on where another fit of the same kind gave this state."""
        self.done, self.checks_without_gain = state["done"], state["checks_without_gain"]
        for own, held in zip(
            [*self.weights, self.bias], [*state["weights"], state["bias"]], strict=True
        ):
            own.copy_(held)
        for name in ("first_kl_bits", "best_kl_bits", "best_weight", "best_bias"):
            setattr(self, name, state[name].to(self.bias.device))
        for optimiser, held in zip(self._optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(held)

    def _moved(self, part: StateRows) -> Float[Tensor, "translator pos d_model"]:
        below = part.states[:-1]
        return below + einsum(self.weight, below, "l o i, l p i -> l p o") + self.bias[:, None]
