"""Fit one member of the family of corrections by KL, with more terms free at each call."""

import math
from collections import deque
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from lens.checkpoint.readout import Unembedding
from lens.lenses.differentiable import prepared, pulled_back
from lens.lenses.divergence import NATS_TO_BITS, FinalRows, divergence, mean_lens
from lens.linear import cross_product, ridge_map, rotation_of
from lens.measuring.correction import Correction
from lens.measuring.free_parameters import Frame, FreeParameters
from lens.measuring.reduced_vocabulary import ReducedVocabulary

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint

KEEP_BYTES = 2**28
"""The model's own distributions are kept where they take less than this."""

ROUND = 5
"""Steps of L-BFGS between two looks at the documents that are kept back."""

PATIENCE = 2
LEAST_GAIN_BITS = 1e-4
_PENALTIES = (1e-2, 1e-1, 1.0)
_BIAS_STEPS = 3
_FARTHEST_BIAS = 30.0


class LastStates:
    """The model's last states at some positions, and its own distributions there."""

    def __init__(
        self,
        checkpoint: "Checkpoint",
        unembedding: Unembedding,
        states: Float[Tensor, "pos d_model"],
    ):
        self.states = states.float()
        rows = prepared(checkpoint, states).detach()
        self.final = FinalRows(unembedding, rows, keep_bytes=KEEP_BYTES)

    @cached_property
    def mean(self) -> Float[Tensor, " d_vocab"]:
        """The mean of the model's own distributions, in float64."""
        return self.final.mean()


class GapProblem:
    """One layer's states, the model's own predictions at them, and what fits them.

    Rows of `states` are fitted on, rows of `check_states` tell when to stop. `bias_sd` is the
    prior's standard deviation of each entry of the bias over the vocabulary, in nats. Steps are
    taken on a reduced vocabulary where the whole is large, and the bias is free for its likely
    tokens alone; whether a step is taken over is decided on the whole.
    """

    def __init__(
        self,
        checkpoint: "Checkpoint",
        unembedding: Unembedding,
        states: Float[Tensor, "pos d_model"],
        last: "LastStates",
        check_states: Float[Tensor, "check d_model"],
        check_last: "LastStates",
        *,
        bias_sd: float,
        seed: int = 0,
    ):
        self.checkpoint = checkpoint
        # Corrections have an entry for each token, and lie where the unembedding does.
        device = unembedding.weight.device
        self.states, self.check_states = (s.float().to(device) for s in (states, check_states))
        self.last, self.check_last = last, check_last
        self.unembedding = unembedding
        # -ln prior, shared over the positions: what one more nat squared of bias costs.
        self.bias_weight = 0.0 if math.isinf(bias_sd) else 1 / (len(states) * bias_sd**2)
        rows = prepared(checkpoint, self.states).detach()
        likely = last.mean + mean_lens(unembedding, rows)
        self.vocabulary = ReducedVocabulary.of(likely.to(rows.device), seed=seed)
        self._near = self.vocabulary.unembedding(unembedding)
        self._near_final, self._near_check = (
            FinalRows(
                self.vocabulary.unembedding(part.final.unembedding),
                part.final.rows,
                offset=self.vocabulary.log_weight,
                keep_bytes=KEEP_BYTES,
            )
            for part in (last, check_last)
        )
        self._near_mean = self._near_final.mean()
        # A pass over the whole vocabulary is dear, and each rung asks for the one before.
        self._known: deque[tuple[Correction, float]] = deque(maxlen=4)

    def none(self) -> Correction:
        """The logit lens as it is."""
        return Correction.none(
            d_model=self.states.shape[1],
            d_vocab=self.unembedding.weight.shape[0],
            device=self.states.device,
        )

    def loss_bits(self, correction: Correction) -> float:
        """Mean KL on the rows fitted on, plus the prior of the bias."""
        return self.fit_kl_bits(correction) + self._penalty_bits(correction.bias)

    def fit_kl_bits(self, correction: Correction) -> float:
        """Mean KL on the rows fitted on."""
        for known, kl in self._known:
            if known is correction:
                return kl
        kl = float(self.kl_bits(correction, self.states, self.last.final).mean())
        self._known.append((correction, kl))
        return kl

    def check_kl_bits(self, correction: Correction) -> float:
        """Mean KL on the rows that are kept back."""
        return float(self.kl_bits(correction, self.check_states, self.check_last.final).mean())

    def kl_bits(
        self, correction: Correction, states: Float[Tensor, "pos d_model"], final: FinalRows
    ) -> Float[Tensor, " pos"]:
        """KL(final || corrected lens) of other rows."""
        with torch.no_grad():
            states = states.to(self.states.device)
            rows = prepared(self.checkpoint, correction.moved(states)).detach()
            return divergence(
                self.unembedding,
                rows[None],
                final,
                temperature=correction.temperature,
                bias=correction.bias if bool(correction.bias.any()) else None,
                with_pull=False,
            ).kl_bits[0]

    def fitted(
        self, start: Correction, free: frozenset[str], *, freed: str, max_steps: int
    ) -> Correction:
        """The correction with these terms free, from `start` on; never worse on its own rows.

        `freed` is the term that `start` did not have yet: where a closed form gives a guess of
        it, fitting begins there if that is better. Of all that fitting passed, that with the
        least KL on the rows kept back is taken.
        """
        begin, before = self._begin(start, free, freed)
        # `start` is kept too: a freed term may have nothing to give.
        best, least = start, self._near_check_kl(start)
        if begin is not start and (kl := self._near_check_kl(begin)) < least:
            best, least = begin, kl
        frame = Frame.of(self.states, centred="shift" in free)
        parameters = FreeParameters(begin, free, frame, self._bias_unit(begin))
        optimiser = torch.optim.LBFGS(
            list(parameters.leaves.values()),
            max_iter=ROUND,
            history_size=20,
            tolerance_grad=0,
            tolerance_change=0,
            line_search_fn="strong_wolfe",
        )
        since = 0
        for _ in range(-(-max_steps // ROUND)):
            optimiser.step(lambda: self._value(parameters))  # type: ignore[arg-type]
            found = parameters.correction()
            now, kl = self._near_loss(found), self._near_check_kl(found)
            if not now <= before:
                break
            since = 0 if kl < least else since + 1
            if kl < least:
                best, least = found, kl
            if since >= PATIENCE or before - now < LEAST_GAIN_BITS * max(1.0, before):
                break
            before = now
        return best if best is start or self.loss_bits(best) <= self.loss_bits(start) else start

    def _begin(
        self, start: Correction, free: frozenset[str], freed: str
    ) -> tuple[Correction, float]:
        """Where fitting begins, and the loss there."""
        before = self._near_loss(start)
        guess = self._best_guess(start, free, freed)
        if guess is not start and (guessed := self._near_loss(guess)) < before:
            return guess, guessed
        return start, before

    def _near_loss(self, correction: Correction) -> float:
        kl = self._near_kl(correction, self.states, self._near_final)
        return kl + self._penalty_bits(correction.bias)

    def _near_check_kl(self, correction: Correction) -> float:
        return self._near_kl(correction, self.check_states, self._near_check)

    def _near_kl(
        self, correction: Correction, states: Float[Tensor, "pos d_model"], final: FinalRows
    ) -> float:
        """Mean KL over the reduced vocabulary."""
        with torch.no_grad():
            rows = prepared(self.checkpoint, correction.moved(states)).detach()
            found = divergence(
                self._near,
                rows[None],
                final,
                temperature=correction.temperature,
                bias=self._near_bias(correction.bias),
                with_pull=False,
            )
        return float(found.kl_bits.mean())

    def _near_bias(self, bias: Float[Tensor, " d_vocab"]) -> Float[Tensor, " kept"]:
        """The bias of the tokens that are kept, with what they stand for."""
        return bias[self.vocabulary.ids] + self.vocabulary.log_weight

    def _value(self, parameters: FreeParameters) -> Tensor:
        """The loss over the reduced vocabulary, with the gradient laid into the leaves."""
        n, leaves = len(self.states), parameters.leaves
        rows = prepared(self.checkpoint, parameters.moved(self.states))
        bias = parameters.bias
        found = divergence(
            self._near,
            rows.detach()[None],
            self._near_final,
            temperature=parameters.temperature,
            bias=self._near_bias(bias),
        )
        names = parameters.of_the_map
        if names:
            grads = pulled_back(rows, [leaves[name] for name in names], found.pull[0] / n)
            for name, grad in zip(names, grads, strict=True):
                leaves[name].grad = grad.contiguous()
        unit, bias_unit = parameters.gradient_units()
        if "temperature" in leaves:
            slope = found.temperature_pull / n * unit
            leaves["temperature"].grad = torch.full_like(leaves["temperature"], slope)
        if "frequency" in leaves:
            assert found.bias_pull is not None
            slopes = self.bias_weight * bias * NATS_TO_BITS
            slopes[self.vocabulary.ids] += found.bias_pull / n
            leaves["frequency"].grad = slopes * bias_unit
        return found.kl_bits.mean() + self._penalty_bits(bias)

    def _penalty_bits(self, bias: Float[Tensor, " d_vocab"]) -> float:
        return 0.5 * self.bias_weight * float(bias.double().square().sum()) * NATS_TO_BITS

    def _bias_unit(self, correction: Correction) -> Float[Tensor, " d_vocab"]:
        """How far each entry of the bias moves for like curvature of the loss; 0 for the rest."""
        curvature = self._near_mean + self._mean_lens(correction) + 2 * self.bias_weight
        unit = torch.zeros_like(correction.bias)
        head = self.vocabulary.ids[: self.vocabulary.n_head]
        unit[head] = curvature.clamp_min(1e-7).rsqrt().to(unit)[: len(head)]
        return unit

    def _mean_lens(self, correction: Correction) -> Float[Tensor, " kept"]:
        with torch.no_grad():
            rows = prepared(self.checkpoint, correction.moved(self.states)).detach()
        return mean_lens(
            self._near,
            rows,
            temperature=correction.temperature,
            bias=self._near_bias(correction.bias),
        )

    def _best_guess(self, start: Correction, free: frozenset[str], freed: str) -> Correction:
        if freed == "frequency":
            return self._biased(start)
        if freed == "rotation":
            guesses = [self._procrustes(free)]
        elif freed == "other linear":
            guesses = [self._ridge(free, penalty) for penalty in _PENALTIES]
        else:
            return start
        plain = self.none()
        tried = []
        for guess in guesses:
            kept = replace(guess, temperature=start.temperature, bias=start.bias)
            tried.append(kept)
            if free & {"temperature", "frequency"}:
                tried.append(replace(kept, temperature=1.0, bias=plain.bias))
        return min(tried, key=self._near_check_kl)

    def _biased(self, start: Correction) -> Correction:
        """Some steps that each must lower the loss: exp(step) brings mean q to mean p.

        Each minimises a bound of the loss that is apart for every token:
        -p b + q (e^b - 1) + weight (old + b)^2 / 2, p and q being the means.
        """
        head = self.vocabulary.ids[: self.vocabulary.n_head]
        p = self._near_mean[: len(head)].clamp_min(1e-38)
        found = start
        for _ in range(_BIAS_STEPS):
            q = self._mean_lens(found)[: len(head)].clamp_min(1e-38)
            old = found.bias[head].double().cpu()
            step = (p / q).log()
            for _ in range(30 if self.bias_weight else 0):
                slope = -p + q * step.exp() + self.bias_weight * (old + step)
                step = step - slope / (q * step.exp() + self.bias_weight)
            bias = found.bias.clone()
            bias[head] = (old + step.clamp(-_FARTHEST_BIAS, _FARTHEST_BIAS)).to(bias)
            found = found.with_bias(bias)
        return found

    def _procrustes(self, free: frozenset[str]) -> Correction:
        """The rotation and the one factor that bring the states nearest to the last ones."""
        x, y, mean_x, mean_y = self._pair(free)
        rotation = rotation_of(cross_product(x, y)).T
        factor = float((x.double() @ rotation.T * y.double()).sum() / x.double().square().sum())
        plain = self.none()
        return replace(
            plain,
            scale=plain.scale * factor,
            rotation=rotation.to(plain.scale),
            shift=mean_y - factor * (rotation.to(mean_x) @ mean_x),
        )

    def _ridge(self, free: frozenset[str], penalty: float) -> Correction:
        """The linear map that brings the states nearest to the last ones (Din et al. 2023)."""
        x, y, mean_x, mean_y = self._pair(free)
        gram, cross = cross_product(x, x), cross_product(x, y - x)
        matrix = ridge_map(gram, cross, penalty=penalty).T.to(x) + torch.eye(x.shape[1]).to(x)
        return replace(self.none(), matrix=matrix, shift=mean_y - matrix @ mean_x)

    def _pair(self, free: frozenset[str]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """States and last states, centred where a shift is free, and what was taken off."""
        x, y = self.states, self.last.states.to(self.states.device)
        if "shift" not in free:
            zero = torch.zeros_like(x[0])
            return x, y, zero, zero
        return x - x.mean(0), y - y.mean(0), x.mean(0), y.mean(0)
