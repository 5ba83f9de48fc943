"""The free terms of a correction as numbers of like size, for an optimiser.

States have directions thousands of times longer than others. Every free number is measured in how
far it moves a typical state, so that a few dozen steps of L-BFGS suffice.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from lens.linear import cross_product
from lens.measuring.correction import Correction

SMALLEST_VARIANCE = 1e-2
"""Directions with less than this part of the median variance are not stretched further."""

_LOG_TEMPERATURE_UNIT = 0.3


@dataclass(frozen=True, kw_only=True, eq=False)
class Frame:
    """The centre of states (0 where no shift is free), their root mean square, and whitening."""

    centre: Float[Tensor, " d_model"]
    size: float
    spread: Float[Tensor, " d_model"]
    whitener: Float[Tensor, "d_model d_model"]

    @classmethod
    def of(cls, states: Float[Tensor, "pos d_model"], *, centred: bool) -> "Frame":
        """The frame of these states."""
        centre = states.mean(0) if centred else torch.zeros_like(states[0])
        second = cross_product(states - centre, states - centre) / len(states)
        values, vectors = torch.linalg.eigh(second)
        floor = SMALLEST_VARIANCE * float(values.clamp_min(0).median()) + 1e-30
        whitener = vectors * values.clamp_min(floor).rsqrt() @ vectors.T
        variance = second.diagonal().clamp_min(floor)
        return cls(
            centre=centre,
            size=float(second.diagonal().mean().sqrt()),
            spread=variance.sqrt().to(states),
            whitener=whitener.to(states),
        )


class FreeParameters:
    """Leaves of a graph around a correction: all zero is the correction itself."""

    def __init__(
        self,
        start: Correction,
        free: frozenset[str],
        frame: Frame,
        bias_unit: Float[Tensor, " d_vocab"],
    ):
        self.start, self.free, self.frame, self.bias_unit = start, free, frame, bias_unit
        d, like = len(start.shift), start.shift
        shapes: dict[str, tuple[int, ...]] = {
            "temperature": (),
            "frequency": (len(start.bias),),
            "shift": (d,),
            "scale": (d,),
            "rotation": (d, d),
            "other linear": (d, d),
        }
        wanted = set(free)
        if "other linear" in free:
            wanted -= {"scale", "rotation"}
        self.leaves = {
            name: torch.zeros(shape, dtype=torch.float32, device=like.device, requires_grad=True)
            for name, shape in shapes.items()
            if name in wanted
        }
        base = start.rotation
        rotated = (start.scale * frame.spread) ** 2
        if base is not None:
            rotated = base**2 @ rotated
        self._turn_unit = frame.size / (rotated[:, None] + rotated[None, :]).sqrt()
        self._offset = start.map @ frame.centre + start.shift

    @property
    def of_the_map(self) -> list[str]:
        """The leaves that act on the states."""
        return [name for name in self.leaves if name not in ("temperature", "frequency")]

    @property
    def temperature(self) -> float:
        """The temperature as it stands."""
        if "temperature" not in self.leaves:
            return self.start.temperature
        moved = float(self.leaves["temperature"].detach()) * _LOG_TEMPERATURE_UNIT
        return self.start.temperature * float(torch.tensor(moved, dtype=torch.float32).exp())

    @property
    def bias(self) -> Float[Tensor, " d_vocab"]:
        """The bias as it stands."""
        if "frequency" not in self.leaves:
            return self.start.bias
        return self.start.bias + self.leaves["frequency"].detach() * self.bias_unit

    def moved(self, states: Float[Tensor, "pos d_model"]) -> Float[Tensor, "pos d_model"]:
        """A h + c, differentiable in the leaves."""
        with torch.enable_grad():
            centred = states - self.frame.centre
            offset = self._offset
            if "shift" in self.leaves:
                offset = offset + self.leaves["shift"] * self.frame.size
            if "other linear" in self.leaves:
                white = (centred @ self.frame.whitener) * self.frame.size
                return centred @ self.start.map.T + white @ self.leaves["other linear"].T + offset
            scaled = centred * self._scale()
            rotation = self._rotation()
            return (scaled if rotation is None else scaled @ rotation.T) + offset

    def correction(self) -> Correction:
        """What the leaves stand for now."""
        with torch.no_grad():
            found = replace(self.start, temperature=self.temperature, bias=self.bias)
            if "other linear" in self.leaves:
                more = self.leaves["other linear"] @ self.frame.whitener * self.frame.size
                found = replace(found, matrix=self.start.map + more)
            else:
                found = replace(found, scale=self._scale(), rotation=self._rotation())
            if "shift" in self.leaves:
                offset = self._offset + self.leaves["shift"] * self.frame.size
                found = replace(found, shift=offset - found.map @ self.frame.centre)
            return found

    def gradient_units(self) -> tuple[float, Float[Tensor, " d_vocab"]]:
        """d temperature / d its leaf, and d bias / d its leaf."""
        return self.temperature * _LOG_TEMPERATURE_UNIT, self.bias_unit

    def _scale(self) -> Float[Tensor, " d_model"]:
        if "scale" not in self.leaves:
            return self.start.scale
        return self.start.scale + self.leaves["scale"] * self.frame.size / self.frame.spread

    def _rotation(self) -> Float[Tensor, "d_model d_model"] | None:
        if "rotation" not in self.leaves:
            return self.start.rotation
        turn = (self.leaves["rotation"] - self.leaves["rotation"].T) * self._turn_unit
        eye = torch.eye(len(turn), dtype=turn.dtype, device=turn.device)
        # Cayley's map of a skew matrix: a rotation for every value of the leaf.
        turned = torch.linalg.solve(eye + turn, eye - turn)
        return turned if self.start.rotation is None else turned @ self.start.rotation
