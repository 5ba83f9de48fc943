"""The direct readout that a measurement cannot do without, or the refusal that says why not."""

from typing import TYPE_CHECKING

from lens.checkpoint.readout import DirectReadout
from lens.errors import UnsupportedArchitectureError

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint


def required_readout(model: "Checkpoint", what: str) -> DirectReadout:
    """The model's readout, where it is a direct one; `what` is the measurement that needs it.

    Raises UnsupportedArchitectureError where it is not.
    """
    if isinstance(model.readout, DirectReadout):
        return model.readout
    why = model.summary().why_not_direct or "it was put in place of the model's own"
    raise UnsupportedArchitectureError(
        f"{what} needs a direct readout, and this one is {model.readout.kind}: {why}. "
        "model.logit_lens and lens.measure read through any."
    )
