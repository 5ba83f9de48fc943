import hashlib

import pytest
import torch

import lens
from lens.checkpoint import fingerprint as module
from lens.checkpoint.fingerprint import ModelHashes, fingerprint, hashed, summed
from tests.checkpoint.tiny import BY_NAME


@pytest.fixture
def twin() -> lens.Checkpoint:
    return lens.load("tied-twin")


def test_every_byte_dtype_and_shape_counts() -> None:
    one = torch.arange(6, dtype=torch.float32)
    assert fingerprint([one]) == fingerprint([one.clone()])
    others = [
        one.reshape(2, 3),
        one.to(torch.float64),
        one.clone().index_fill_(0, one[5:].long(), 9.0),
    ]
    assert len({fingerprint([t]) for t in (one, *others)}) == 4
    assert fingerprint([one, one]) != fingerprint([one])


def test_parts_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PART_BYTES", 8)
    tensor = torch.arange(64)
    raw = tensor.numpy().tobytes()
    digests = b"".join(
        hashlib.blake2b(raw[i : i + 8], digest_size=16).digest() for i in range(0, len(raw), 8)
    )
    assert hashed(tensor).digests == b"torch.int64(64,)" + digests


def test_a_change_in_place_is_seen() -> None:
    tensor = torch.ones(3)
    found = hashed(tensor)
    assert found.is_of(tensor)
    assert not found.is_of(tensor.clone())
    tensor.add_(1)
    assert not found.is_of(tensor)
    with torch.inference_mode():
        fixed = torch.ones(3)
    assert hashed(fixed).is_of(fixed)


def test_a_matrix_is_hashed_once_and_again_when_it_changed(
    twin: lens.Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = fingerprint([twin.W_U])
    assert twin.model_hash != own
    asked: list[torch.Size] = []

    def counted(tensor: torch.Tensor) -> module.HashedTensor:
        asked.append(tensor.shape)
        return hashed(tensor)

    monkeypatch.setattr("lens.checkpoint.fingerprint.hashed", counted)
    assert twin.unembedding_hash == own
    assert asked == []
    with torch.no_grad():
        twin.W_U[0, 0] += 1
    found = twin.unembedding_hash
    assert asked == [twin.W_U.shape]
    assert found == fingerprint([twin.W_U]) != own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_no_number_of_a_sum_can_change_or_move(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 1025).to(dtype)
    told = {summed(tensor), summed(tensor.flatten())}
    for place in (0, 1023, 1024, 2049, 3074):
        other = tensor.clone()
        other.flatten()[place] = 1
        told.add(summed(other))
    assert len(told) == 7
    assert summed(tensor.clone()) == summed(tensor)
    # A view that begins within a word has the sums of its copy.
    assert summed(tensor.flatten()[3:]) == summed(tensor.flatten()[3:].clone())


def test_any_weight_of_any_block_makes_another_model(twin: lens.Checkpoint) -> None:
    def afresh() -> str:
        return ModelHashes(twin.model, twin.trunk.distinct_blocks).of_model()

    parameters = list(twin.model.parameters())
    assert len(parameters) > 70
    told = {afresh()}
    with torch.no_grad():
        for parameter in parameters:
            last = parameter.view(-1)[-1:]
            before = last.clone()
            last += 0.5
            told.add(afresh())
            last.copy_(before)
    assert len(told) == len(parameters) + 1
    assert afresh() in told


def test_a_persistent_buffer_counts() -> None:
    model = BY_NAME["gpt2"].build()
    block = model.get_submodule("transformer.h.0")
    block.register_buffer("kept", torch.zeros(3))
    block.register_buffer("scratch", torch.zeros(3), persistent=False)
    first = lens.load(model).model_hash
    block.get_buffer("scratch").add_(1)
    assert lens.load(model).model_hash == first
    block.get_buffer("kept").add_(1)
    assert lens.load(model).model_hash != first
