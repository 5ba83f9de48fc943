"""The logit lens on prompts: batches, targets, the two lenses, and every prompt that is refused."""

from typing import Any

import numpy as np
import pytest
import torch

from lens.checkpoint.checkpoint import Checkpoint
from lens.errors import (
    ContextLengthError,
    LensError,
    PromptError,
    SelectionError,
    TokenizerError,
    UnsupportedArchitectureError,
)
from lens.lenses.predictions import LayerPredictions
from tests.checkpoint.test_exactness import checkpoint
from tests.checkpoint.tiny import BY_NAME, D_VOCAB, N_LAYERS

IDS = [4, 5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def tied() -> Checkpoint:
    return checkpoint(BY_NAME["llama"].build(tied=True))


@pytest.fixture(scope="module")
def untied() -> Checkpoint:
    return checkpoint(BY_NAME["gpt2"].build(tied=False))


def only(result: Any) -> LayerPredictions:
    assert isinstance(result, LayerPredictions)
    return result


@pytest.mark.parametrize("name", ["gpt2", "llama", "bloom", "mamba", "bert", "gemma2", "t5"])
def test_a_prompt_alone_equals_the_same_prompt_in_a_padded_batch(name: str) -> None:
    point = checkpoint(BY_NAME[name].build())
    source = [5, 6, 7] if point.seq2seq else None
    alone = only(point.logit_lens(IDS[:3], source=source))
    _, padded = point.logit_lens([IDS, IDS[:3]], source=source)
    assert padded.input_ids.tolist() == IDS[:3]
    assert padded.kl_bits.shape == (N_LAYERS + 1, 3)
    # Another batch shape may round otherwise; float32 sums of 64 terms leave 1e-5 of a logit.
    np.testing.assert_allclose(alone.entropy_bits, padded.entropy_bits, atol=2e-4)
    np.testing.assert_allclose(alone.kl_bits, padded.kl_bits, atol=2e-4)


def test_chosen_layers_and_positions_are_cut_from_the_whole(tied: Checkpoint) -> None:
    whole = only(tied.logit_lens(IDS))
    part = only(tied.logit_lens(IDS, layers=[3, 1], positions=[-1, 0]))
    assert part.layers.tolist() == [3, 1]
    assert part.positions.tolist() == [5, 0]
    expected = whole.select(layers=[3, 1], positions=[5, 0])
    assert (part.top_ids == expected.top_ids).all()
    np.testing.assert_allclose(part.entropy_bits, expected.entropy_bits, atol=1e-4)


def test_both_lenses_of_a_tied_model_are_the_same_and_that_is_said(tied: Checkpoint) -> None:
    out, inp = only(tied.logit_lens(IDS)), only(tied.logit_lens(IDS, lens="input"))
    assert np.array_equal(out.kl_bits, inp.kl_bits)
    assert any("are the same" in note for note in inp.provenance.notes)
    assert not any("are the same" in note for note in out.provenance.notes)


def test_the_input_lens_of_an_untied_model_reads_through_w_e(untied: Checkpoint) -> None:
    predictions = only(untied.logit_lens(IDS, lens="input"))
    state = untied.residual_states(IDS).states[-1]
    through_w_e = (untied.model.transformer.ln_f(state) @ untied.W_E.T).detach()
    truth = through_w_e.log_softmax(-1)
    assert (predictions.top_ids[-1] == truth.topk(5).indices.numpy()).all()
    # Its last row is not the model's prediction; KL is from the model's own all the same.
    final = (untied.model.transformer.ln_f(state) @ untied.W_U.T).detach().log_softmax(-1)
    kl = (final.exp() * (final - truth)).sum(-1) / np.log(2)
    np.testing.assert_allclose(predictions.kl_bits[-1], kl.numpy(), atol=1e-4)
    assert predictions.kl_bits[-1].min() > 0
    assert not any("are the same" in note for note in predictions.provenance.notes)


def test_target_sets_sum_probabilities_and_differences_are_logit_differences(
    tied: Checkpoint,
) -> None:
    result = only(tied.logit_lens(IDS, targets={"right": [7, 9], "wrong": [11]}))
    state = tied.residual_states(IDS).states
    logits = tied.replay.logits(state).log_softmax(-1)
    probability = logits.exp()[..., [7, 9]].sum(-1)
    np.testing.assert_allclose(result.set_probability("right"), probability.numpy(), rtol=1e-4)
    single = only(tied.logit_lens(IDS, targets={"a": [7], "b": [11]}))
    difference = (logits[..., 7] - logits[..., 11]) / np.log(2)
    np.testing.assert_allclose(single.logit_difference("a", "b"), difference.numpy(), atol=1e-4)
    with pytest.raises(SelectionError, match="holds: right, wrong"):
        result.set_probability("middle")


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ([], {}, PromptError, "empty"),
        (None, {}, PromptError, "Pass one of"),
        ([[3], []], {}, PromptError, "empty"),
        ([3, D_VOCAB], {}, PromptError, "out of range"),
        ([3, -1], {}, PromptError, "out of range"),
        ([3] * 65, {}, ContextLengthError, "1 more than the context of 64"),
        ("some text", {}, TokenizerError, "token ids"),
        (IDS, {"layers": [99]}, SelectionError, "no layer 99"),
        (IDS, {"layers": []}, SelectionError, "empty list"),
        (IDS, {"layers": [1, 1]}, SelectionError, "twice"),
        (IDS, {"layers": [3, -1]}, SelectionError, "twice"),
        (IDS, {"positions": [6]}, SelectionError, "no position 6"),
        (IDS, {"top_k": 0}, SelectionError, "top_k is 0"),
        (IDS, {"top_k": D_VOCAB + 1}, SelectionError, "top_k"),
        (IDS, {"lens": "middle"}, SelectionError, "no 'middle' lens"),
        (IDS, {"targets": {"a": []}}, SelectionError, "must be a list"),
        (IDS, {"targets": {"a": [D_VOCAB]}}, SelectionError, "the vocabulary is"),
        (IDS, {"source": [3]}, SelectionError, "no encoder"),
    ],
    ids=str,
)
def test_bad_input_is_one_clear_error(
    tied: Checkpoint, prompt: Any, options: dict[str, Any], error: type[LensError], message: str
) -> None:
    with pytest.raises(error, match=message):
        tied.logit_lens(prompt, **options)


def test_truncation_is_asked_for_and_cuts_the_end(tied: Checkpoint) -> None:
    ids = [3 + i % 50 for i in range(70)]
    assert only(tied.logit_lens(ids, truncate=True)).input_ids.tolist() == ids[:64]


def test_an_encoder_decoder_without_a_source_is_an_error() -> None:
    with pytest.raises(PromptError, match="source"):
        checkpoint(BY_NAME["t5"].build()).logit_lens(IDS)


def test_the_input_lens_says_why_it_cannot_read_a_factorised_width() -> None:
    point = checkpoint(BY_NAME["opt_project_out"].build(tied=False))
    assert only(point.logit_lens(IDS, lens="input")).kl_bits.shape == (N_LAYERS + 1, 6)
    replayed = checkpoint(BY_NAME["llama"].build(tied=False), readout=None)
    replayed.readout = replayed.replay
    with pytest.raises(UnsupportedArchitectureError, match="needs a direct readout"):
        replayed.logit_lens(IDS, lens="input")


@pytest.mark.parametrize("name", ["gpt2", "cohere", "gemma2", "marian"])
def test_replay_and_direct_give_the_same_predictions(name: str) -> None:
    point = checkpoint(BY_NAME[name].build())
    source = [5, 6] if point.seq2seq else None
    direct = only(point.logit_lens(IDS, source=source))
    point.readout = point.replay
    replay = only(point.logit_lens(IDS, source=source))
    assert (direct.provenance.readout, replay.provenance.readout) == ("direct", "replay")
    assert np.array_equal(direct.top_ids, replay.top_ids)
    np.testing.assert_allclose(direct.kl_bits, replay.kl_bits, atol=2e-4)
    np.testing.assert_allclose(direct.entropy_bits, replay.entropy_bits, atol=5e-5)


LEFT = {
    "input_ids": torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]),
}


def test_a_tokenizers_right_padded_output_is_read_as_its_prompts(tied: Checkpoint) -> None:
    right = {name: values.flip(-1) for name, values in LEFT.items()}
    short, whole = tied.logit_lens(right)
    assert short.input_ids.tolist() == [6, 5]
    assert whole.input_ids.tolist() == [10, 9, 8, 7]


def test_left_padding_needs_positions_that_count_from_0(tied: Checkpoint) -> None:
    with pytest.raises(PromptError, match="Prompt 0 has padding before"):
        tied.logit_lens(LEFT)
    counted = {**LEFT, "position_ids": torch.tensor([[0, 0, 0, 1], [0, 1, 2, 3]])}
    short, _ = tied.logit_lens(counted)
    assert short.input_ids.tolist() == [5, 6]
    with pytest.raises(PromptError, match="do not count"):
        tied.logit_lens({**LEFT, "position_ids": torch.arange(4)})


def test_a_mapping_that_holds_no_prompt_is_refused(tied: Checkpoint) -> None:
    with pytest.raises(PromptError, match="Expected input_ids"):
        tied.logit_lens({"ids": [3]})
    with pytest.raises(PromptError, match="The attention mask has shape"):
        tied.logit_lens({"input_ids": [[3, 4]], "attention_mask": [[1]]})


def test_the_forms_that_a_prompt_comes_in_are_read_alike(untied: Checkpoint) -> None:
    rows = [[4, 5, 6], [7, 8]]
    expected = untied.logit_lens(rows)
    for same in (
        {"input_ids": rows, "token_type_ids": [[0, 0, 0], [0, 0]]},
        [np.array(row) for row in rows],
        [torch.tensor(row) for row in rows],
    ):
        for one, other in zip(untied.logit_lens(same), expected, strict=True):
            assert np.array_equal(one.top_ids, other.top_ids)
    assert np.array_equal(untied.logit_lens(np.array(rows[0])).top_ids, expected[0].top_ids)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ({"input_ids": [[4, 5]], "token_type_ids": [[0, 1]]}, "token_type_ids"),
        ({"input_ids": [4, 5], "token_type_ids": torch.tensor([0, 1])}, "token_type_ids"),
        (torch.tensor([1.5, 2.0]), "whole numbers"),
        (5, "list of token ids"),
    ],
)
def test_what_cannot_be_read_as_it_stands_is_refused(
    prompt: Any, says: str, untied: Checkpoint
) -> None:
    with pytest.raises(PromptError, match=says):
        untied.logit_lens(prompt)
