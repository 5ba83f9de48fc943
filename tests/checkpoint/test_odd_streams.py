"""Residual streams of other shapes: streams, prefixes, padding, pairs, blocks called past hooks."""

import numpy as np
import pytest
import torch
from torch import nn

import lens
from lens.checkpoint import proof
from lens.checkpoint.checkpoint import Checkpoint
from lens.checkpoint.layout import Layout, layouts_of_rows, plain_layout
from lens.checkpoint.listening import listening
from lens.checkpoint.slots import InputSlot, JoinedInput, JoinedOutput, OutputSlot
from lens.errors import CaptureError
from tests.architectures.build import architectures
from tests.checkpoint.test_exactness import own_logits

BATCH, POS, D = 3, 7, 4
SHAPES = {
    "batch pos d": (BATCH, POS, D),
    "pos batch d": (POS, BATCH, D),
    "batch d pos": (BATCH, D, POS),
    "batch pos stream d": (BATCH, POS, 2, D),
    "stream batch pos d": (2, BATCH, POS, D),
}


def _point(model_type: str) -> Checkpoint:
    return lens.load(next(a for a in architectures() if a.model_type == model_type).build())


@pytest.mark.parametrize("axes", SHAPES)
def test_a_state_goes_to_rows_and_back_whatever_its_order(axes: str) -> None:
    state = torch.arange(float(np.prod(SHAPES[axes]))).reshape(SHAPES[axes])
    layout = plain_layout(state, batch=BATCH, pos=POS)
    assert layout is not None
    assert layout.axes == axes
    rows = layout.canonical(state, length=POS)
    assert rows.shape == (BATCH, POS, D * layout.n_streams)
    assert torch.equal(layout.native(rows, None), state)


def test_rows_that_are_not_the_prompts_are_left_as_they_were() -> None:
    layout = Layout("batch pos d", before=2, padded=True)
    state = torch.randn(BATCH, 12, D)
    rows = layout.canonical(state, length=POS)
    assert torch.equal(rows, state[:, 2:9])
    back = layout.native(rows + 1, state)
    assert torch.equal(back[:, :2], state[:, :2])
    assert torch.equal(back[:, 9:], state[:, 9:])
    assert torch.equal(back[:, 2:9], rows + 1)


def test_rows_that_were_not_there_at_load_are_refused() -> None:
    with pytest.raises(CaptureError, match="carry 16 positions for a prompt of 9"):
        Layout("batch pos d").canonical(torch.zeros(BATCH, 16, D), length=9)
    with pytest.raises(CaptureError, match="expected 41"):
        Layout("batch pos d", before=32).canonical(torch.zeros(BATCH, 40, D), length=9)


def test_the_prompts_rows_are_told_by_a_change_of_its_last_token() -> None:
    before = torch.randn(BATCH, 12, D)
    after = before.clone()
    after[:, 8] += 1
    (layout,) = layouts_of_rows(before, after, batch=BATCH, pos=POS)
    assert (layout.before, layout.padded) == (2, True)
    after[:, 4] += 1
    assert layouts_of_rows(before, after, batch=BATCH, pos=POS) == ()


def test_two_slots_are_read_and_written_as_one_state() -> None:
    given, taken = (
        JoinedOutput((OutputSlot(0), OutputSlot(2))),
        JoinedInput((InputSlot(1), InputSlot("b"))),
    )
    a, b, state = torch.randn(2, 3), torch.randn(2, 3), torch.randn(2, 6)
    assert torch.equal(given.get((a, "x", b)), torch.cat([a, b], -1))
    first, other, second = given.put((a, "x", b), state)
    assert other == "x"
    assert torch.equal(torch.cat([first, second], -1), state)
    assert given.alone((a, b, b), a)[1] is None
    args, kwargs = taken.put((0, a), {"b": b}, state)
    assert torch.equal(taken.get(args, kwargs), state)


def test_a_forward_called_past_the_hooks_is_heard_and_left_as_it_was() -> None:
    module, heard = nn.Linear(2, 2), []
    options = {
        "before": lambda m, a, k: heard.append("in"),
        "after": lambda m, a, o: heard.append("out"),
    }
    with listening([module], **options):
        module.forward(torch.ones(2))
    assert heard == []
    with listening([module], **options, past_hooks=True):
        module.forward(torch.ones(2))
    assert heard == ["in", "out"]
    assert "forward" not in vars(module)


@pytest.mark.parametrize(
    "name",
    ["cpmant", "longformer", "reformer", "squeezebert", "xlnet", "gemma3n_text", "deepseek_v4"],
)
def test_an_odd_stream_is_read_edited_and_described(name: str) -> None:
    point = _point(name)
    ids = [20, 21, 22, 23, 24]
    predictions = point.logit_lens(ids)
    assert predictions.top_ids.shape[:2] == (point.n_layers + 1, len(ids))
    assert (predictions.kl_bits[-1] == 0).all()
    inputs = point.inputs_of([ids])
    plain = own_logits(point, inputs)
    for layer in (0, 1):
        with point.edit(layer, [2], lambda states: states * 1):
            assert torch.equal(own_logits(point, inputs), plain)
        with point.edit(layer, [2], lambda states: states * 0 + 0.5):
            assert not torch.equal(own_logits(point, inputs)[:, 2], plain[:, 2])
    described = point.summary().residual_layout
    assert described != "state batch pos d"


@pytest.mark.parametrize("mapping", ["causal", "masked"])
@pytest.mark.parametrize("length", [16, 17, 30, 32])
def test_rows_that_come_behind_longer_prompts_are_learnt_and_left_out(
    mapping: str, length: int
) -> None:
    """Reformer fills prompts that are longer than a chunk of 16 up to a multiple of it."""
    found = (a for a in architectures() if a.model_type == "reformer" and a.mapping == mapping)
    model = next(found).build()
    point = lens.load(model)
    ids = [20 + i % 7 for i in range(length)]
    predictions = point.logit_lens(ids)
    assert predictions.top_ids.shape[:2] == (point.n_layers + 1, length)
    assert (predictions.kl_bits[-1] == 0).all()
    assert point.trunk.layout.padded is (length % 16 != 0)
    seen = []
    with torch.no_grad():
        inputs = point.inputs_of([ids])
        point.trunk.blocks[-1].register_forward_hook(lambda m, a, out: seen.append(out))
        truth = own_logits(point, inputs)
    last = point.trunk.output_slot.get(seen[-1])[:, :length]
    assert torch.equal(point.readout.logits(last), truth)
    # Short prompts are read as before.
    assert (point.logit_lens([20, 21, 22]).kl_bits[-1] == 0).all()


def test_rows_that_cannot_be_told_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    point = _point("reformer")
    monkeypatch.setattr(proof, "layouts_of_rows", lambda *args, **options: ())
    with pytest.raises(CaptureError, match="does not show which are the prompt's"):
        point.logit_lens(list(range(20, 40)))


def test_a_readout_that_fails_at_a_longer_prompt_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    point = _point("reformer")
    monkeypatch.setattr(proof, "same_numbers", lambda a, b: False)
    with pytest.raises(CaptureError, match="its readout is not the model's there"):
        point.logit_lens(list(range(20, 40)))
