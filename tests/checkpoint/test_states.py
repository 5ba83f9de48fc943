"""Residual states: captured by layer and position, kept, changed, read again."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lens.checkpoint import changes
from lens.checkpoint.checkpoint import Checkpoint
from lens.checkpoint.states import load_states, save_states
from lens.errors import (
    CaptureError,
    ExportError,
    ProvenanceError,
    ResultFileError,
    SelectionError,
    ShapeError,
)
from tests.checkpoint.test_exactness import checkpoint
from tests.checkpoint.tiny import BY_NAME, N_LAYERS

IDS = [4, 5, 6, 7, 8]


@pytest.fixture(scope="module")
def llama() -> Checkpoint:
    return checkpoint(BY_NAME["llama"].build(tied=True))


def test_layer_0_is_what_enters_block_0_and_layer_l_what_block_l_minus_1_returns(
    llama: Checkpoint,
) -> None:
    entered: list[Tensor] = []
    returned: list[Tensor] = []
    handles = [
        block.register_forward_pre_hook(lambda m, a: entered.append(a[0]))
        for block in llama.model.model.layers
    ]
    handles += [
        block.register_forward_hook(lambda m, a, out: returned.append(out))
        for block in llama.model.model.layers
    ]
    with torch.no_grad():
        llama.model(torch.tensor([IDS]))
    for handle in handles:
        handle.remove()
    states = llama.residual_states(IDS).states
    assert len(states) == N_LAYERS + 1
    assert torch.equal(states[0], entered[0][0])
    for layer in range(1, N_LAYERS + 1):
        assert torch.equal(states[layer], returned[layer - 1][0])


def test_albert_counts_calls_of_its_one_block() -> None:
    albert = checkpoint(BY_NAME["albert"].build())
    assert albert.n_layers == N_LAYERS
    assert len(albert.trunk.distinct_blocks) == 1
    states = albert.residual_states(IDS).states
    assert all(not torch.equal(a, b) for a, b in pairwise(states))


@pytest.mark.parametrize("name", ["gpt2", "opt_project_out", "t5", "mamba", "albert"])
def test_some_layers_and_positions_equal_the_same_cut_from_all(name: str) -> None:
    point = checkpoint(BY_NAME[name].build())
    source = [5, 6] if point.seq2seq else None
    whole = point.residual_states(IDS, source=source).states
    part = point.residual_states(IDS, layers=[2, 0], positions=[-1, 1], source=source)
    assert part.layers == (2, 0)
    assert torch.equal(part.states, whole[[2, 0]][:, [4, 1]])


def test_a_forward_that_stops_early_gives_the_same_states(llama: Checkpoint) -> None:
    inputs = llama.inputs_of([IDS])
    early = llama.capture(inputs, layers=[1])
    assert torch.equal(early[1], llama.capture(inputs, layers=[1, N_LAYERS])[1])


def test_states_round_trip_through_a_file(llama: Checkpoint, tmp_path: Path) -> None:
    states = llama.residual_states(IDS, layers=[0, 2])
    again = load_states(save_states(states, tmp_path / "states.safetensors"))
    assert torch.equal(states.states, again.states)
    assert torch.equal(states.input_ids, again.input_ids)
    assert (states.layers, states.model_hash) == (again.layers, again.model_hash)


def test_saved_states_are_read_as_the_lens_reads_them(llama: Checkpoint, tmp_path: Path) -> None:
    file = llama.residual_states(IDS).save(tmp_path / "s.safetensors")
    readings = llama.read(load_states(file), layer=2, top_k=5)
    predictions = llama.logit_lens(IDS)
    assert (readings.top_ids == predictions.top_ids[2]).all()
    assert readings.layer == 2


def test_states_of_other_weights_are_refused(llama: Checkpoint) -> None:
    states = llama.residual_states(IDS)
    other = checkpoint(BY_NAME["llama"].build(tied=False))
    with pytest.raises(ProvenanceError, match="Read them with the model"):
        other.read(states)
    with pytest.raises(SelectionError, match="was not captured"):
        llama.read(llama.residual_states(IDS, layers=[1]), layer=2)


def test_states_are_not_written_half(llama: Checkpoint, tmp_path: Path) -> None:
    states = llama.residual_states(IDS)
    with pytest.raises(ExportError, match="Cannot write in"):
        states.save(tmp_path / "absent" / "s.safetensors")
    with pytest.raises(ExportError, match="safetensors"):
        states.save(tmp_path / "s.txt")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"not a file of tensors at all", b"\x10" * 100])
def test_a_file_that_holds_no_states_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "s.safetensors"
    file.write_bytes(content)
    with pytest.raises(ResultFileError):
        load_states(file)
    with pytest.raises(ResultFileError, match="No file"):
        load_states(tmp_path / "other.safetensors")


@pytest.mark.parametrize("layer", range(N_LAYERS + 1))
def test_an_edit_changes_its_layer_and_nothing_before(llama: Checkpoint, layer: int) -> None:
    plain = llama.residual_states(IDS).states
    with llama.edit(layer, [2], lambda states: states + 1):
        edited = llama.residual_states(IDS).states
    assert torch.equal(edited[:layer], plain[:layer])
    expected = plain[layer].clone()
    expected[2] += 1
    assert torch.equal(edited[layer], expected)
    # Causal: positions before the edited one stay.
    assert torch.equal(edited[:, :2], plain[:, :2])
    assert torch.equal(llama.residual_states(IDS).states, plain)


def test_a_patched_run_equals_the_run_that_it_was_patched_from(llama: Checkpoint) -> None:
    donor = llama.residual_states([9, 10, 11, 12, 13])
    with llama.edit(1, None, lambda _: donor.at(1)[None]):
        patched = llama.residual_states(IDS).states
    assert torch.equal(patched[1:], donor.states[1:])


def test_an_edit_of_one_call_of_a_shared_block_leaves_its_other_calls(tmp_path: Path) -> None:
    albert = checkpoint(BY_NAME["albert"].build())
    plain = albert.residual_states(IDS).states
    with albert.edit(2, None, lambda states: states * 2):
        edited = albert.residual_states(IDS).states
    assert torch.equal(edited[:2], plain[:2])
    assert torch.equal(edited[2], plain[2] * 2)


def test_an_edited_last_layer_is_the_edited_models_output(llama: Checkpoint) -> None:
    with llama.edit(-1, None, lambda states: -states):
        predictions = llama.logit_lens(IDS)
        with torch.no_grad():
            truth = llama.model(torch.tensor([IDS])).logits
    assert (predictions.final_top_ids == truth[0].argmax(-1).numpy()).all()


class _Dropping(nn.Module):
    """Wraps a model so that it can skip its last block, as layer drop does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner, self.config, self.drop = model, model.config, False

    def get_input_embeddings(self) -> nn.Module:
        return self.inner.get_input_embeddings()  # type: ignore[operator]

    def forward(self, input_ids: Tensor) -> object:
        layers = self.inner.model.layers  # type: ignore[union-attr]
        last = layers[-1]  # type: ignore[index]
        if self.drop:
            del layers[-1]  # type: ignore[operator]
            self.inner.config.num_hidden_layers -= 1  # type: ignore[union-attr,operator]
        out = self.inner(input_ids=input_ids, use_cache=False)
        if self.drop:
            layers.append(last)  # type: ignore[union-attr,operator]
            self.inner.config.num_hidden_layers += 1  # type: ignore[union-attr,operator]
        return out


def test_a_state_that_does_not_pass_by_is_an_error_and_never_zeros(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrapped = _Dropping(BY_NAME["llama"].build())
    point = checkpoint(wrapped)
    assert point.residual_states(IDS).states.shape[0] == N_LAYERS + 1
    wrapped.drop = True
    with pytest.raises(CaptureError, match="ran 2 of the 3 block calls"):
        point.residual_states(IDS)
    # Where nothing shows that the model was changed.
    monkeypatch.setattr(changes, "marks", lambda *a: point._marks)
    with pytest.raises(CaptureError, match="did not pass by"):
        point.residual_states(IDS)


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        (torch.zeros(3, 7), "width of this model"),
        (torch.zeros(0, 64), "no vector"),
        (torch.full((1, 64), torch.nan), "NaN or inf"),
        (torch.tensor(1.0), "expected"),
    ],
    ids=["width", "empty", "nan", "scalar"],
)
def test_vectors_that_cannot_be_read_are_refused(
    llama: Checkpoint, vectors: Tensor, message: str
) -> None:
    with pytest.raises(ShapeError, match=message):
        llama.read(vectors)


def test_any_vectors_are_read_as_the_model_would_read_them(llama: Checkpoint) -> None:
    vectors = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(2))
    readings = llama.read(vectors, top_k=4)
    truth = llama.replay.logits(vectors).flatten(0, 1).log_softmax(-1)
    assert readings.shape == (2, 3)
    assert (readings.top_ids == truth.topk(4).indices.numpy()).all()
    entropy = -(truth.exp() * truth).sum(-1) / torch.log(torch.tensor(2.0))
    torch.testing.assert_close(torch.from_numpy(readings.entropy_bits), entropy, rtol=0, atol=5e-5)
    assert len(readings.to_frame()) == 24


def test_an_edit_counts_the_positions_of_each_prompt() -> None:
    """Padded in a batch, every prompt is changed where it would be changed alone."""
    model = checkpoint(BY_NAME["llama"].build())
    prompts = [[5, 6], [7, 8, 9, 10, 11]]
    for positions in ([-1], [-1, 0]):
        with model.edit(1, positions, lambda states: 0 * states):
            together = model.logit_lens(prompts)
            alone = [model.logit_lens(prompt) for prompt in prompts]
        plain = model.logit_lens(prompts)
        for one, both, before in zip(alone, together, plain, strict=True):
            assert both.entropy_bits == pytest.approx(one.entropy_bits, abs=1e-4)
            assert abs(both.entropy_bits[-1] - before.entropy_bits[-1]).max() > 1e-3


def test_an_edit_of_a_position_that_a_prompt_has_not_is_refused() -> None:
    model = checkpoint(BY_NAME["llama"].build())
    for positions in ([2], [-3], [0, -2]):
        with (
            model.edit(1, positions, lambda states: states),
            pytest.raises(SelectionError, match="position"),
        ):
            model.logit_lens([[5, 6], [7, 8, 9]])
    assert len(model.logit_lens([5, 6]).positions) == 2


def test_more_vectors_than_a_context_are_read_by_a_replay() -> None:
    direct = checkpoint(BY_NAME["gpt2"].build())
    replay = checkpoint(direct.model, readout=direct.replay)
    assert replay.readout.kind == "replay"
    assert replay.n_ctx is not None
    vectors = torch.randn(2 * replay.n_ctx + 3, replay.d_model)
    found, expected = replay.read(vectors), direct.read(vectors)
    assert found.shape == (2 * replay.n_ctx + 3,)
    assert found.entropy_bits == pytest.approx(expected.entropy_bits, abs=1e-4)
    assert (found.top_ids[:, 0] == expected.top_ids[:, 0]).mean() > 0.99


def test_vectors_that_overflow_the_models_dtype_are_refused() -> None:
    half = checkpoint(BY_NAME["gpt2"].build().half())
    with pytest.raises(ShapeError, match=r"inf as torch\.float16"):
        half.read(torch.full((2, half.d_model), 1e5))


def test_a_file_of_states_has_the_rights_of_any_file(llama: Checkpoint, tmp_path: Path) -> None:
    saved = llama.residual_states(IDS).save(tmp_path / "s.safetensors")
    other = tmp_path / "other"
    other.touch()
    assert saved.stat().st_mode == other.stat().st_mode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "s.safetensors"]
