"""Encoder-decoders: the decoder's lens, a target of its own writing, the encoder's lens."""

import numpy as np
import pytest
import torch

from lens.checkpoint.greedy import greedy_target
from lens.errors import PromptError, UnsupportedArchitectureError
from tests.checkpoint.test_exactness import checkpoint
from tests.checkpoint.tiny import BY_NAME

SOURCE = [5, 6, 7, 8, 9]
SHARED = ["t5", "bart", "marian"]


@pytest.mark.parametrize("name", SHARED)
def test_the_encoders_last_layer_is_its_output_times_the_shared_matrix(name: str) -> None:
    model = BY_NAME[name].build(tied=True)
    encoder = checkpoint(model).encoder
    with torch.no_grad():
        out = model.get_encoder()(input_ids=torch.tensor([SOURCE])).last_hidden_state
        truth = torch.nn.functional.linear(out, model.get_output_embeddings().weight)
    predictions = encoder.logit_lens(SOURCE)
    assert predictions.top_ids.shape[0] == encoder.n_layers + 1 == 3
    assert (predictions.top_ids[-1] == truth[0].topk(5).indices.numpy()).all()
    expected = (truth[0].double().log_softmax(-1) / np.log(2)).topk(5).values.numpy()
    np.testing.assert_allclose(predictions.top_logprob_bits[-1], expected, atol=5e-5)
    assert predictions.target_ids.tolist() == SOURCE
    assert any("encoder" in note for note in predictions.provenance.notes)


@pytest.mark.parametrize("name", SHARED)
def test_encoder_and_decoder_have_layers_of_their_own_and_one_matrix(name: str) -> None:
    point = checkpoint(BY_NAME[name].build(tied=True))
    assert (point.n_layers, point.encoder.n_layers) == (3, 2)
    assert point.encoder.W_U is point.W_U
    assert point.encoder.tie.is_tied


def test_an_encoder_that_shares_no_matrix_with_the_head_is_refused() -> None:
    model = BY_NAME["t5"].build(tied=True)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    with pytest.raises(UnsupportedArchitectureError, match="are two matrices"):
        _ = checkpoint(model).encoder


def test_a_decoder_alone_has_no_encoder() -> None:
    with pytest.raises(UnsupportedArchitectureError, match="has no encoder"):
        _ = checkpoint(BY_NAME["llama"].build()).encoder


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_without_a_prompt_the_decoder_writes_what_generate_writes(name: str) -> None:
    model = BY_NAME[name].build()
    model.generation_config.forced_eos_token_id = None
    point = checkpoint(model)
    ids = greedy_target(point, SOURCE, max_tokens=9)
    # T5's cache counts the encoder's layers and breaks where the decoder has more.
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": 1, "use_cache": False}
    written = model.generate(torch.tensor([SOURCE]), **options)
    assert ids == written[0].tolist()
    predictions = point.logit_lens(source=SOURCE)
    whole = greedy_target(point, SOURCE)
    assert predictions.input_ids.tolist() == whole
    # Greedy: the model's own best token at each position is the next one.
    assert predictions.top_ids[-1, :-1, 0].tolist() == whole[1:]


def test_a_decoder_needs_a_source_and_says_so() -> None:
    with pytest.raises(PromptError):
        checkpoint(BY_NAME["t5"].build()).logit_lens()
