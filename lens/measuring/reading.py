"""The lens that a measurement reads with: which readout, and what it does to states before."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from lens.errors import ShapeError
from lens.lenses.logit import readout_of

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint


@runtime_checkable
class Translator(Protocol):
    """A lens that moves states into the last layer's basis before the readout: tuned, ridge."""

    @property
    def name(self) -> str:
        """A word for its kind, as in "tuned"."""
        ...

    @property
    def hash(self) -> str:
        """A digest of what was fitted."""
        ...

    def check(self, checkpoint: "Checkpoint") -> None:
        """Raise ProvenanceError where it was fitted on another model."""
        ...

    def translate(self, layer: int, states: Tensor) -> Tensor:
        """States [..., d_model] of a layer as the lens has the readout see them."""
        ...


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A lens on one checkpoint: "output", "input" or a translator, with a digest of it."""

    name: str
    hash: str
    readout: Any
    translator: Any = None

    def is_of_the_model(self, checkpoint: "Checkpoint") -> bool:
        """Whether its last layer is the model's own prediction: so W_E too, where it is W_U."""
        return self.translator is None and self.readout is checkpoint.readout

    def states(
        self, states: Float[Tensor, "layer pos d_model"], layers: range
    ) -> Float[Tensor, "layer pos d_model"]:
        """What goes into the readout."""
        if self.translator is None:
            return states
        moved = [
            self.translator.translate(layer, s) for layer, s in zip(layers, states, strict=True)
        ]
        for layer, (one, before) in enumerate(zip(moved, states, strict=True)):
            if one.shape != before.shape:
                raise ShapeError(
                    f"The {self.name} lens made {tuple(one.shape)} of layer {layer}'s states "
                    f"{tuple(before.shape)}; expected the same shape."
                )
        return torch.stack(moved)


def reading_of(checkpoint: "Checkpoint", lens: "str | Translator") -> Reading:
    """The reading of "output", "input" or a translator. Raises as `readout_of`, ProvenanceError."""
    if isinstance(lens, str):
        return Reading(name=lens, hash=lens, readout=readout_of(checkpoint, lens))
    lens.check(checkpoint)
    return Reading(name=lens.name, hash=lens.hash, readout=checkpoint.readout, translator=lens)
