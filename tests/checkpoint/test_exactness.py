"""The law of the toolkit: the last layer of the logit lens is the model, on every architecture."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lens.checkpoint.checkpoint import Checkpoint
from lens.checkpoint.inputs import Inputs, forward_arguments
from lens.checkpoint.origin import Origin
from lens.checkpoint.readout import DirectReadout
from tests.checkpoint.tiny import BY_NAME, D_VOCAB, TINY, Tiny

CASES = [
    pytest.param(tiny, tied, id=f"{tiny.name}-{'tied' if tied else 'untied'}")
    for tiny in TINY
    for tied in (True, False)
]


def checkpoint(model: Any, **options: Any) -> Checkpoint:
    return Checkpoint.from_model(
        model, tokenizer=None, origin=Origin(model_id="tiny", format="memory"), **options
    )


def some_inputs(point: Checkpoint, *, batch: int = 2, pos: int = 9) -> Inputs:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, D_VOCAB, (batch, pos), generator=generator)
    source = torch.randint(3, D_VOCAB, (batch, 6), generator=generator) if point.seq2seq else None
    return Inputs(ids=ids, source_ids=source)


def own_logits(point: Checkpoint, inputs: Inputs) -> Tensor:
    with torch.no_grad():
        return point.model(**forward_arguments(point.model, inputs, seq2seq=point.seq2seq)).logits


@pytest.mark.parametrize(("tiny", "tied"), CASES)
def test_last_layer_of_the_logit_lens_equals_the_model(tiny: Tiny, tied: bool) -> None:
    point = checkpoint(tiny.build(tied=tied))
    inputs = some_inputs(point)
    last = point.capture(inputs, layers=[point.n_layers])[point.n_layers]
    truth = own_logits(point, inputs)
    assert torch.equal(point.replay.logits(last, inputs), truth)
    assert torch.equal(point.readout.logits(last), truth)


@pytest.mark.parametrize(("tiny", "tied"), CASES)
def test_a_random_state_reads_as_the_model_with_that_state_in_place(tiny: Tiny, tied: bool) -> None:
    point = checkpoint(tiny.build(tied=tied))
    inputs = some_inputs(point)
    generator = torch.Generator().manual_seed(5)
    state = 3 * torch.randn((*inputs.ids.shape, point.d_model), generator=generator)
    with point.edit(point.n_layers, None, lambda _: state):
        truth = own_logits(point, inputs)
    assert torch.equal(point.replay.logits(state, inputs), truth)
    assert torch.equal(point.readout.logits(state), truth)


@pytest.mark.parametrize("tiny", TINY, ids=lambda tiny: tiny.name)
def test_the_direct_readout_is_made_of_the_steps_that_the_model_takes(tiny: Tiny) -> None:
    point = checkpoint(tiny.build())
    assert isinstance(point.readout, DirectReadout), point.summary().why_not_direct
    if tiny.steps is not None:
        assert point.readout.describe() == tiny.steps


@pytest.mark.parametrize("tiny", TINY, ids=lambda tiny: tiny.name)
def test_the_last_row_of_layer_predictions_is_the_models_own_distribution(tiny: Tiny) -> None:
    point = checkpoint(tiny.build())
    ids = some_inputs(point, batch=1).ids[0].tolist()
    source = [5, 6, 7] if point.seq2seq else None
    predictions = point.logit_lens(ids, source=source)
    inputs = point.inputs_of([ids], source=source)
    truth = own_logits(point, inputs)[0].double().log_softmax(-1) / torch.log(torch.tensor(2.0))
    top = truth.topk(5)
    got = torch.from_numpy(predictions.top_logprob_bits[-1]).double()
    torch.testing.assert_close(got, top.values, atol=5e-5, rtol=0)
    assert (predictions.kl_bits[-1] == 0).all()
    assert predictions.agreement[-1].all()
    chosen = truth.gather(-1, torch.from_numpy(predictions.top_ids[-1]))
    torch.testing.assert_close(chosen, top.values, atol=5e-5, rtol=0)


@pytest.mark.parametrize("name", ["bert", "roberta", "albert"])
def test_a_bidirectional_model_is_scored_against_the_token_itself(name: str) -> None:
    point = checkpoint(BY_NAME[name].build())
    assert point.target == "same"
    predictions = point.logit_lens([5, 6, 7])
    assert predictions.target_ids.tolist() == [5, 6, 7]


def test_a_causal_model_is_scored_against_the_next_token() -> None:
    point = checkpoint(BY_NAME["llama"].build())
    assert point.target == "next"
    assert point.logit_lens([5, 6, 7]).target_ids.tolist() == [6, 7, -1]


def test_every_architecture_of_the_table_is_a_different_case() -> None:
    assert len(TINY) >= 30
    assert len({tiny.model_type for tiny in TINY}) >= 25
    assert len({tiny.name for tiny in TINY}) == len(TINY)
