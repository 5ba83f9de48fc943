"""One law for every way to run a model: the lens' last layer is what that same model says."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import transformers

import lens
from lens.checkpoint.capturing import capture_parts
from lens.checkpoint.checkpoint import Checkpoint
from lens.checkpoint.inputs import forward_arguments
from lens.checkpoint.proof import same_numbers
from lens.errors import UnsupportedArchitectureError
from tests.checkpoint.test_exactness import some_inputs
from tests.conftest import absent

NO_MID = (
    transformers.BertForMaskedLM,
    transformers.BartForConditionalGeneration,
    transformers.CohereForCausalLM,
    transformers.MambaForCausalLM,
)


def package(name: str) -> None:
    """Skip, or fail where CI=true, without this package."""
    if find_spec(name) is None:
        absent(f"The package {name}", 'pip install -c .ci/constraints.txt -e ".[dev]"')


def _parts_add_up(point: Checkpoint) -> None:
    """resid_mid is there where the architecture has one, and no state is off (CaptureError)."""
    if isinstance(point.model, NO_MID):
        with pytest.raises(UnsupportedArchitectureError, match="has no resid_mid"):
            _ = point.mid
        return
    parts = capture_parts(point, some_inputs(point), range(point.n_layers))
    assert len(parts) == point.n_layers


def exact(model: Any, *, run: Callable[..., Any] | None = None) -> Checkpoint:
    """Read `model`; its lens at the last layer and at a random state is `run`, bit for bit.

    `run` is the user's own way to call it (a wrapper), the model itself where None.
    """
    point = lens.load(model)
    inputs = some_inputs(point)
    arguments = forward_arguments(point.model, inputs, seq2seq=point.seq2seq)
    call = run or point.model
    generator = torch.Generator().manual_seed(5)
    last = point.capture(inputs, layers=[point.n_layers])[point.n_layers]
    other = torch.randn(last.shape, generator=generator).to(last)
    with torch.no_grad():
        truth = call(**arguments).logits
        with point.edit(point.n_layers, None, lambda _: other):
            forced = call(**arguments).logits
    assert not same_numbers(truth, forced)
    for state, logits in ((last, truth), (other, forced)):
        assert same_numbers(point.replay.logits(state, inputs), logits)
        assert same_numbers(point.readout.logits(state), logits)
    predictions = point.logit_lens(
        inputs.ids[0].tolist(), source=[5, 6, 7] if point.seq2seq else None
    )
    assert (predictions.kl_bits[-1] == 0).all()
    _parts_add_up(point)
    assert predictions.provenance.dtype == str(last.dtype).removeprefix("torch.")
    return point
