"""A readout with its norm's scale frozen at one state: a logit as a linear function of the state.

A norm divides what it made by a length of its input. Frozen at one state, what is left is a gain
for each dimension, with or without centring. Which one is found by trying, in float32 at the least,
and is proved at another state; no norm is known by its name.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lens.checkpoint.readout import DirectReadout, Step
from lens.errors import UnsupportedArchitectureError
from lens.measuring.precise_parts import HALF, Part, in_more_than_half, precise_parts

_MISFIT = 1e-4
_LINEAR = ("mul", "div", "add", "sub", "cast")


@dataclass(frozen=True, eq=False)
class LinearLogit:
    """logit = direction . state + constant, at the state where it was frozen.

    `quantity` says which number it is: "logit", or "logit before the soft-cap".
    """

    direction: Float[Tensor, " d_model"]
    constant: float
    quantity: str


def linear_logit(
    readout: DirectReadout,
    state: Float[Tensor, " d_model"],
    weights: dict[int, float],
) -> LinearLogit:
    """The weighted sum of these tokens' logits, with the norm's scale of `state`.

    Raises UnsupportedArchitectureError where what follows the norm is not linear.
    """
    with torch.no_grad():
        norm, rest = _split(readout, state)
    state = in_more_than_half(state)
    ids = torch.tensor(list(weights))
    factors = torch.tensor(list(weights.values()), dtype=torch.float64, device=state.device)
    scale, shift, quantity = _affine(readout.unembedding.steps, ids, state.device)
    rows = readout.unembedding.weight.detach()[ids].double().to(state.device)
    with torch.no_grad():
        at = _through(rest, state.new_zeros(norm.gain.shape)[None])[0].double().to(state.device)
    direction = _pulled_back(rest, norm.gain.shape[0], (factors * scale) @ rows, state)
    bias = readout.unembedding.bias
    added = shift + (0.0 if bias is None else scale * bias.detach()[ids].double().to(state.device))
    constant = float((factors * scale) @ (rows @ at) + (factors * added).sum())
    constant += float(direction @ norm.bias)
    return LinearLogit(norm.transposed(direction).detach(), constant, quantity)


def norm_bias(
    readout: DirectReadout, state: Float[Tensor, " d_model"]
) -> Float[Tensor, " d_unembed"] | None:
    """What the norm adds to the unembedding's input whatever the state; None where nothing.

    None too where what follows the norm is not linear, so that no such part can be told.
    """
    try:
        with torch.no_grad():
            norm, rest = _split(readout, state)
            state = in_more_than_half(state)
            zero = torch.zeros_like(norm.bias).to(state)
            added = _through(rest, norm.bias.to(state)[None])[0] - _through(rest, zero[None])[0]
            added = added.to(state.device)
    except UnsupportedArchitectureError:
        return None
    return added if bool(added.any()) else None


def frozen_norm(
    parts: Sequence[Part | nn.Module], state: Float[Tensor, " d"]
) -> "FrozenNorm | None":
    """Parts that are a norm, with its scale at this state; None where they are no such norm.

    A norm divides by one length, and has a gain.
    """
    with torch.no_grad():
        head = precise_parts(parts, state.dtype)
        state = in_more_than_half(state)
        return _frozen(head, state, _probes(state))


@dataclass(frozen=True, eq=False)
class FrozenNorm:
    """x -> gain * (x - share * mean x) + bias; share is 1 where the norm centres, else 0."""

    gain: Float[Tensor, " d"]
    bias: Float[Tensor, " d"]
    share: float

    def linear(self, x: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
        """All but the bias."""
        return self.gain * (x - self.share * x.mean())

    def transposed(self, y: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
        """The direction before the norm that y is behind it."""
        pulled = self.gain * y
        return pulled - self.share * pulled.mean()


Parts = tuple[Part, ...]


def _split(readout: DirectReadout, state: Tensor) -> tuple[FrozenNorm, Parts]:
    """The frozen norm and the parts after it, for the first place where both can be proved."""
    own = state.dtype
    parts, state = precise_parts(readout.preparation, own), in_more_than_half(state)
    probes = _probes(state)
    for cut in range(len(parts) + 1):
        head, rest = parts[:cut], parts[cut:]
        norm = _frozen(head, state, probes)
        if norm is not None and _is_affine(rest, norm.gain.shape[0], state):
            return norm, rest
    raise UnsupportedArchitectureError(
        f"The readout {readout.describe()} is not linear after its norm, so a logit is no sum of "
        "what the blocks wrote"
        + (f', or {own} hides it (load with dtype="float32")' if own in HALF else "")
        + ". Missing step: attribution. Use model.logit_lens by layer."
    )


def _probes(state: Tensor) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [
        (_noise(state.shape, generator) * state.float().std().cpu()).to(state) for _ in range(3)
    ]


def _noise(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _frozen(head: Parts, state: Tensor, probes: list[Tensor]) -> FrozenNorm | None:
    d = state.shape[0]
    if not head:
        one = torch.ones(d, dtype=torch.float64, device=state.device)
        return FrozenNorm(one, torch.zeros_like(one), 0.0)
    # What comes out lies where the norm is, which may be another device than the state's.
    bias = _through(head, torch.zeros_like(state)[None])[0].double().to(state.device)
    if bias.shape[0] != d or not bool(torch.isfinite(bias).all()):
        return None
    signs = _signs(state) * state.float().std()
    given = [signs, *probes, state]
    made = [_through(head, x.to(state)[None])[0].double().to(state.device) - bias for x in given]
    given = [x.double() for x in given]
    # At plus and minus one with mean zero, what comes out is the gain up to one factor.
    gain = made[0] / given[0]
    for share in (1.0, 0.0):
        centred = [x - share * x.mean() for x in given]
        fits = [_fitted(gain * x, y) for x, y in zip(centred, made, strict=True)]
        if all(misfit < _MISFIT for _, misfit in fits):
            return FrozenNorm(gain * fits[-1][0], bias, share)
    return None


def _signs(like: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
    """Plus and minus one in turn; of an odd number the last three are 1, 1, -2."""
    signs = 1.0 - 2.0 * (torch.arange(like.shape[0], device=like.device) % 2).float()
    if len(signs) % 2:
        signs[-3:] = torch.tensor([1.0, 1.0, -2.0]).to(signs)
    return signs


def _fitted(x: Tensor, y: Tensor) -> tuple[float, float]:
    """The factor k that brings k x nearest to y, and what is left of y."""
    factor = float((x * y).sum() / (x * x).sum().clamp_min(1e-300))
    return factor, float((factor * x - y).norm() / y.norm().clamp_min(1e-300))


def _is_affine(rest: Parts, d: int, like: Tensor) -> bool:
    generator = torch.Generator().manual_seed(11)
    x, y = _noise((2, 1, d), generator).to(like)
    try:
        zero = _through(rest, torch.zeros_like(x)).double()
        one, other = _through(rest, x).double() - zero, _through(rest, y).double() - zero
        both = _through(rest, 2 * x - 3 * y).double() - zero
    except RuntimeError:
        return False
    size = float(2 * one.norm() + 3 * other.norm())
    return float((both - 2 * one + 3 * other).norm()) <= _MISFIT * max(size, 1e-300)


def _through(parts: Parts, x: Tensor) -> Tensor:
    for part in parts:
        x = part(x)
    return x


def _pulled_back(rest: Parts, d: int, direction: Tensor, like: Tensor) -> Float[Tensor, " d"]:
    """The gradient of direction . rest(x): exact for an affine map, wherever it is taken."""
    if not rest:
        return direction
    with torch.enable_grad():
        x = torch.zeros((1, d), dtype=like.dtype, device=like.device, requires_grad=True)
        value = (_through(rest, x)[0].double().to(direction.device) * direction).sum()
        (gradient,) = torch.autograd.grad(value, [x])
    return gradient[0].double()


def _affine(
    steps: tuple[Step, ...], ids: Tensor, device: torch.device
) -> tuple[Float[Tensor, " token"], Float[Tensor, " token"], str]:
    """Scale and shift of the steps after the product, up to a soft-cap, on a device."""
    quantity = "logit"
    caps = [i for i, step in enumerate(steps) if step.kind not in _LINEAR]
    if caps:
        steps, quantity = steps[: caps[0]], "logit before the soft-cap"
        while steps and steps[-1].kind in ("div", "mul", "cast"):
            steps = steps[:-1]
    scale = torch.ones(len(ids), dtype=torch.float64, device=device)
    shift = torch.zeros_like(scale)
    for step in steps:
        if step.kind == "cast":
            continue
        value = step.value
        if isinstance(value, Tensor):
            value = value.detach().double().to(device)
            value = value[ids] if value.ndim else value
        if step.kind in ("mul", "div"):
            factor = value if step.kind == "mul" else 1 / value  # type: ignore[operator]
            scale, shift = scale * factor, shift * factor  # type: ignore[operator]
        else:
            shift = shift + value if step.kind == "add" else shift - value  # type: ignore[operator]
    return scale, shift, quantity
