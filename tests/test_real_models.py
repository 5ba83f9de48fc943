"""The laws again, on real pretrained weights, with no socket opened."""

import socket
from typing import Any

import numpy as np
import pytest
import torch

from lens.checkpoint.checkpoint import Checkpoint
from lens.checkpoint.inputs import forward_arguments
from lens.checkpoint.tying import SHARED_PARAMETER, UNTIED
from lens.lenses.predictions import LayerPredictions

PROMPT = "The Eiffel Tower is located in the city of"
SHORT_IDS = list(range(5, 25))

REAL = {
    # fixture: (verdict, d_vocab, n_layers, steps of the readout)
    "smollm2": (SHARED_PARAMETER, 49_152, 30, "LlamaRMSNorm -> W_U"),
    "gemma3": (SHARED_PARAMETER, 262_144, 18, "Gemma3RMSNorm -> W_U"),
    "antiberty": (SHARED_PARAMETER, 25, 8, "BertPredictionHeadTransform -> W_U + b_U"),
    "core_charlm": (UNTIED, 102, 4, "LayerNorm -> W_U"),
    "opennmt_lm": (UNTIED, 16_377, 2, "LayerNorm -> W_U + b_U"),
    "stories260k": (SHARED_PARAMETER, 512, 5, "LlamaRMSNorm -> W_U"),
}


@pytest.fixture(params=sorted(REAL))
def real(request: pytest.FixtureRequest) -> tuple[str, Checkpoint]:
    return request.param, request.getfixturevalue(request.param)


def ids_for(point: Checkpoint) -> list[int]:
    return [i % point.d_vocab for i in SHORT_IDS]


def test_it_is_what_its_files_say(real: tuple[str, Checkpoint]) -> None:
    name, point = real
    verdict, d_vocab, n_layers, steps = REAL[name]
    summary = point.summary()
    assert (summary.tie, summary.d_vocab, summary.n_layers) == (verdict, d_vocab, n_layers)
    assert (summary.readout, summary.readout_steps) == ("direct", steps)


def test_last_layer_of_the_logit_lens_equals_the_model(real: tuple[str, Checkpoint]) -> None:
    _, point = real
    inputs = point.inputs_of([ids_for(point), ids_for(point)[::-1]])
    with torch.no_grad():
        truth = point.model(**forward_arguments(point.model, inputs, seq2seq=False)).logits
    last = point.capture(inputs, layers=[point.n_layers])[point.n_layers]
    assert torch.equal(point.replay.logits(last, inputs), truth)
    assert torch.equal(point.readout.logits(last), truth)


def test_a_random_state_reads_as_the_model_with_that_state_in_place(
    real: tuple[str, Checkpoint],
) -> None:
    _, point = real
    inputs = point.inputs_of([ids_for(point)])
    generator = torch.Generator().manual_seed(8)
    state = 5 * torch.randn((1, len(SHORT_IDS), point.d_model), generator=generator)
    with point.edit(point.n_layers, None, lambda _: state), torch.no_grad():
        truth = point.model(**forward_arguments(point.model, inputs, seq2seq=False)).logits
    assert torch.equal(point.replay.logits(state, inputs), truth)
    assert torch.equal(point.readout.logits(state), truth)


def test_last_row_of_the_predictions_is_the_models_own(real: tuple[str, Checkpoint]) -> None:
    _, point = real
    ids = ids_for(point)
    predictions: Any = point.logit_lens(ids, layers=[0, point.n_layers])
    with torch.no_grad():
        logits = point.model(torch.tensor([ids])).logits[0]
    truth = logits.double().log_softmax(-1) / np.log(2)
    top = truth.topk(5).values
    got = torch.from_numpy(predictions.top_logprob_bits[-1]).double()
    torch.testing.assert_close(got, top, atol=2e-4, rtol=0)
    assert (predictions.kl_bits[-1] == 0).all()
    assert (predictions.kl_bits[0] > 0).all()


@pytest.mark.parametrize(("name", "probability"), [("smollm2", 0.70), ("gemma3", 0.76)])
def test_the_eiffel_tower_is_in_paris(
    name: str, probability: float, request: pytest.FixtureRequest
) -> None:
    point = request.getfixturevalue(name)
    predictions: LayerPredictions = point.logit_lens(PROMPT, targets={"right": [" Paris"]})
    last = predictions.select(layers=[point.n_layers], positions=[len(predictions.input_ids) - 1])
    assert predictions.vocabulary[int(last.top_ids[0, 0, 0])] == " Paris"
    assert abs(2.0 ** float(last.top_logprob_bits[0, 0, 0]) - probability) <= 0.02
    right = predictions.set_probability("right")[-1, -1]
    assert abs(float(right) - 2.0 ** float(last.top_logprob_bits[0, 0, 0])) < 1e-5


def test_gemma_scales_its_lookup_by_the_square_root_of_its_width(gemma3: Checkpoint) -> None:
    assert gemma3.lookup_scale == pytest.approx(np.sqrt(640), rel=1e-3)


def test_smollm2_does_not_scale_its_lookup(smollm2: Checkpoint) -> None:
    assert smollm2.lookup_scale == pytest.approx(1.0, rel=1e-6)


def test_a_dropped_bias_is_attached_and_told(opennmt_lm: Checkpoint) -> None:
    bias = opennmt_lm.b_U
    assert bias is not None
    assert float(bias.detach().std()) > 0.1
    assert any("lm_head.bias" in note for note in opennmt_lm.origin.notes)


def test_an_untied_model_reads_better_through_w_u_than_through_w_e(core_charlm: Checkpoint) -> None:
    text = "that is the question which I have been asking"
    out: Any = core_charlm.logit_lens(text)
    inp: Any = core_charlm.logit_lens(text, lens="input")
    assert (out.kl_bits.mean(1) < inp.kl_bits.mean(1)).all()
    assert out.kl_bits.mean(1)[-1] == 0 < inp.kl_bits.mean(1)[-1]


def test_no_socket_is_opened_between_a_folder_and_its_heatmap(
    models_folder: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    import lens

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"a socket was opened: {args[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with pytest.raises(AssertionError, match="a socket was opened"):
        socket.create_connection(("127.0.0.1", 9))
    point = lens.load(models_folder / "core-charlm")
    page = point.logit_lens("what a piece of work").save(tmp_path / "page.html")
    assert page.stat().st_size > 10_000
