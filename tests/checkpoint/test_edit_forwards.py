"""An edit acts on the positions of each prompt, however the user's own forward is called."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers

from lens.checkpoint import residual
from lens.errors import SelectionError
from tests.checkpoint.test_exactness import checkpoint
from tests.checkpoint.tiny import BY_NAME

PADDED = torch.tensor([[0, 0, 5, 6, 7], [5, 6, 7, 8, 9]])
MASK = (PADDED != 0).long()
GENERATE: dict[str, Any] = {
    "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip


class Seen:
    """Keeps the states that an edit is given, and changes nothing."""

    def __init__(self) -> None:
        self.states: list[torch.Tensor] = []

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        self.states.append(states.clone())
        return states


def test_a_mask_by_place_is_heard_like_one_by_name() -> None:
    point, seen = checkpoint(BY_NAME["llama"].build()), Seen()
    with torch.no_grad(), point.edit(1, [0], seen):
        point.model(PADDED, attention_mask=MASK)
        point.model(PADDED, MASK)
        point.model(PADDED)
    named, placed, unmasked = seen.states
    assert torch.equal(named, placed)
    assert not torch.equal(named, unmasked)


class Wrapped(transformers.LlamaForCausalLM):
    """Takes what it passes on as *args and **kwargs."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_a_mask_that_a_wrapper_passes_on_is_heard() -> None:
    point, seen = checkpoint(Wrapped(BY_NAME["llama"].build().config).eval()), Seen()
    with torch.no_grad(), point.edit(0, [0], seen):
        point.model(PADDED, attention_mask=MASK)
        point.model(input_ids=PADDED[:1, 2:])
    masked, alone = seen.states
    assert torch.equal(masked[0], alone[0])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_position_is_edited_once_in_a_generation(name: str) -> None:
    point, first, last, fourth = checkpoint(BY_NAME[name].build()), Seen(), Seen(), Seen()
    with torch.no_grad(), point.edit(1, [0], first), point.edit(1, [-1], last):
        made = point.model.generate(PADDED[1:], attention_mask=MASK[1:], **GENERATE)
    assert made.shape[1] == 8
    assert len(first.states) == 1
    assert len(last.states) == 3
    with torch.no_grad(), point.edit(1, [3], fourth):
        point.model.generate(PADDED[1:], attention_mask=MASK[1:], **GENERATE)
    assert len(fourth.states) == 1
    whole = point.capture(point.inputs_of([made[0].tolist()]), layers=[1])[1][0]
    torch.testing.assert_close(first.states[0][0, 0], whole[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(fourth.states[0][0, 0], whole[3], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(last.states[2][0, 0], whole[6], atol=1e-5, rtol=1e-4)


def test_a_cache_that_does_not_count_is_refused_but_for_the_last_position() -> None:
    point, first, last = checkpoint(BY_NAME["mamba"].build()), Seen(), Seen()
    with torch.no_grad(), point.edit(1, [-1], last):
        point.model.generate(PADDED[1:], **GENERATE)
    assert len(last.states) == 3
    with torch.no_grad(), point.edit(1, [0], first), pytest.raises(SelectionError, match="count"):
        point.model.generate(PADDED[1:], **GENERATE)
    assert len(first.states) == 1


def test_a_mask_that_hides_the_padding_is_refused() -> None:
    for name in ("llama", "gemma2"):
        point, seen = checkpoint(BY_NAME[name].build()), Seen()
        more = {**GENERATE, "cache_implementation": "static", "disable_compile": True}
        with (
            torch.no_grad(),
            point.edit(1, [0], seen),
            pytest.raises(SelectionError, match="a static cache makes"),
        ):
            point.model.generate(PADDED, attention_mask=MASK, **more)
        with torch.no_grad(), point.edit(1, None, seen):
            point.model.generate(PADDED, attention_mask=MASK, **more)
        assert seen.states


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_labels_are_the_decoders_and_not_masked_as_the_source(name: str) -> None:
    point, seen = checkpoint(BY_NAME[name].build()), Seen()
    source = torch.tensor([[5, 6, 7, 8, 0, 0], [5, 6, 7, 8, 9, 10]])
    labels = torch.tensor([[20, 21, 22, 23]] * 2)
    model, mask = point.model, (source != 0).long()
    shifted = model.prepare_decoder_input_ids_from_labels(labels)
    with torch.no_grad(), point.edit(0, [-1], seen):
        model(input_ids=source, attention_mask=mask, labels=labels)
        model(input_ids=source, attention_mask=mask, decoder_input_ids=shifted)
        model(source, mask, decoder_input_ids=shifted)
    assert torch.equal(seen.states[0], seen.states[1])
    assert torch.equal(seen.states[0], seen.states[2])


def opt() -> Any:
    config = transformers.OPTConfig(
        vocab_size=160, hidden_size=32, ffn_dim=48, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=64, word_embed_proj_dim=32,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config).eval()


@pytest.mark.parametrize("points", ["post", "mid"])
def test_an_edit_does_not_act_on_questions_of_the_library(
    points: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, shapes = list(range(5, 15)), []

    def fixed(states: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(states.shape))
        return states + torch.ones(1, 10, 32)

    point = checkpoint(opt())
    with point.edit(1, None, fixed):
        point.logit_lens(ids, points=points)
    assert set(shapes) == {(1, 10, 32)}
    # Where edits act on every forward, the first reading asks the model about its context.
    monkeypatch.setattr(residual, "probing", nullcontext)
    other = checkpoint(opt())
    with other.edit(1, None, fixed), pytest.raises(RuntimeError, match="must match"):
        other.logit_lens(ids, points=points)
