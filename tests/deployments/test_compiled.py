"""torch.compile: taken off where it wraps the whole model, refused where hooks would not fire."""

import pytest
import torch

import lens
from lens.errors import UnsupportedModelStateError
from tests.checkpoint.tiny import BY_NAME
from tests.deployments.reading import exact


def test_a_compiled_model_is_read_uncompiled_and_says_so() -> None:
    model = BY_NAME["llama"].build()
    point = exact(torch.compile(model), run=model)
    assert point.model is model
    assert any("torch.compile" in note for note in point.origin.notes)


def test_a_model_compiled_in_place_is_refused() -> None:
    model = BY_NAME["llama"].build()
    model.compile()
    with pytest.raises(UnsupportedModelStateError, match="compiled in place"):
        lens.load(model)


def test_a_compiled_block_is_refused_by_name() -> None:
    model = BY_NAME["llama"].build()
    model.model.layers[1] = torch.compile(model.model.layers[1])
    with pytest.raises(UnsupportedModelStateError, match=r"model\.layers\.1"):
        lens.load(model)
