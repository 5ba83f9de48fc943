"""What needs a direct readout says so in the same words, before it reads anything."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lens.checkpoint.checkpoint import Checkpoint
from lens.errors import CorpusError, UnsupportedArchitectureError
from lens.measuring.causal_fidelity import causal_fidelity
from lens.measuring.decompose import decompose
from lens.measuring.frequency import frequency
from lens.measuring.neighbourhood_copy import neighbourhood_copy
from lens.measuring.readout_arms import readout_arms
from lens.measuring.required_readout import required_readout
from lens.measuring.token_energy import token_energy
from tests.measuring.small import checkpoint

NEED_ONE = {
    "Causal fidelity": causal_fidelity,
    "A decomposition of the gap": decompose,
    "Where frequency is kept": frequency,
    "The probability of chosen tokens": neighbourhood_copy,
    "A change of the readout's parts": readout_arms,
    "Token energy": token_energy,
}
NO_CORPUS = "no-such-corpus.jsonl"


def replayed(model: Checkpoint, *, why: str | None) -> Checkpoint:
    model.readout = model.replay
    model._proved = replace(model._proved, why_not_direct=why)
    return model


@pytest.mark.parametrize("what", NEED_ONE)
def test_without_a_direct_readout_it_is_refused_and_with_one_the_corpus_is_read(what: str) -> None:
    measure: Callable[..., Any] = NEED_ONE[what]
    with pytest.raises(UnsupportedArchitectureError) as found:
        measure(replayed(checkpoint(), why="the tail branches"), NO_CORPUS)
    told = str(found.value)
    assert told.startswith(f"{what} needs a direct readout, and this one is replay: ")
    assert "the tail branches" in told
    with pytest.raises(CorpusError):
        measure(checkpoint(), NO_CORPUS)


def test_a_readout_that_was_put_in_by_hand_has_no_reason_of_the_model_s() -> None:
    model = checkpoint()
    assert required_readout(model, "This") is model.readout
    with pytest.raises(UnsupportedArchitectureError, match="put in place of the model's own"):
        required_readout(replayed(model, why=None), "This")
