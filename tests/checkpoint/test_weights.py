"""What weight files hold, and whether what a model holds are numbers."""

import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lens.checkpoint import weights
from lens.errors import CorruptCheckpointError, UnsupportedModelStateError


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


def test_names_shapes_and_values_are_read_from_either_format(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    assert weights.find_weights(tmp_path) is None
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    pickled = weights.find_weights(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    safe = weights.find_weights(tmp_path)
    assert pickled is not None
    assert safe is not None
    assert (pickled.format, safe.format) == ("pytorch", "safetensors")
    for found in (pickled, safe):
        assert found.keys == {"a", "b"}
        assert found.shapes == {"a": (2, 3), "b": (4,)}
        assert torch.equal(found.read("a"), tensors["a"])


def test_a_file_of_the_oldest_torch_format_is_read(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(tensors, path, _use_new_zipfile_serialization=False)
    found = weights.find_weights(tmp_path)
    assert found is not None
    assert found.keys == {"a", "b"}


def test_parts_are_found_by_their_index(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    for key, name in names.items():
        save_file({key: tensors[key]}, tmp_path / name)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}), encoding="utf-8")
    found = weights.find_weights(tmp_path)
    assert found is not None
    assert [path.name for path in found.paths] == sorted(names.values())
    assert torch.equal(found.read("b"), tensors["b"])
    (tmp_path / names["b"]).unlink()
    with pytest.raises(CorruptCheckpointError, match="lacks 1 of its 2 weight files"):
        weights.find_weights(tmp_path)
    for held in ('{"weight_map": 3}', "[]", '{"weight_map": {"a": 3}}'):
        index.write_text(held, encoding="utf-8")
        with pytest.raises(CorruptCheckpointError, match="no index"):
            weights.find_weights(tmp_path)


@pytest.mark.parametrize("cut", [0, 4, 20, -1])
def test_a_cut_safetensors_file_is_refused(
    tensors: dict[str, torch.Tensor], tmp_path: Path, cut: int
) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CorruptCheckpointError, match="Get the file again"):
        weights.find_weights(tmp_path)


def test_a_pickle_runs_no_code(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "sprung",))

    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": Trap()}, path)
    with pytest.raises(CorruptCheckpointError, match="a pickle can run code"):
        weights.find_weights(tmp_path)
    assert not (tmp_path / "sprung").exists()
    torch.load(path, weights_only=False)  # the trap was a real one
    assert (tmp_path / "sprung").exists()


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 and no more", pickle.dumps([1])[:-1]])
def test_a_damaged_pickle_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(data)
    with pytest.raises(CorruptCheckpointError):
        weights.find_weights(tmp_path)


def test_the_hash_of_one_file_is_that_of_sha256sum(tmp_path: Path) -> None:
    one, two = tmp_path / "1", tmp_path / "2"
    one.write_bytes(b"abc")
    two.write_bytes(b"x" * 5_000_000)
    alone = hashlib.sha256(b"abc").hexdigest()
    assert weights.hash_files([one]) == alone
    lines = f"{alone}  1\n{hashlib.sha256(two.read_bytes()).hexdigest()}  2\n"
    assert weights.hash_files([two, one]) == hashlib.sha256(lines.encode()).hexdigest()


def test_a_file_of_the_hub_cache_is_hashed_by_its_name(tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / ("0" * 64)
    blob.parent.mkdir()
    blob.write_bytes(b"abc")
    (tmp_path / "model.safetensors").symlink_to(blob)
    assert weights.hash_file(tmp_path / "model.safetensors") == "0" * 64


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_value_that_is_no_number_is_found(dtype: torch.dtype, bad: float) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(dtype)
    weights.check_finite(model)
    with torch.no_grad():
        model[0].weight[1, 2] = bad
    with pytest.raises(CorruptCheckpointError, match=r"first 0\.weight"):
        weights.check_finite(model)


def test_a_bad_value_in_a_saved_buffer_is_found() -> None:
    model = nn.BatchNorm1d(2)
    assert model.running_mean is not None
    model.running_mean[0] = float("nan")
    with pytest.raises(CorruptCheckpointError, match="running_mean"):
        weights.check_finite(model)


def test_two_infinities_that_cancel_are_found() -> None:
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[float("inf"), float("-inf")]]))
    with pytest.raises(CorruptCheckpointError):
        weights.check_finite(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_large_but_finite_values_pass(dtype: torch.dtype) -> None:
    model = nn.Linear(64, 64).to(dtype)
    with torch.no_grad():
        model.weight.fill_(torch.finfo(dtype).max)
    weights.check_finite(model)


def test_weights_without_values_are_refused_unless_something_brings_them() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    weights.check_materialized(model)
    meta = nn.Sequential(nn.Linear(2, 2, device="meta"))
    with pytest.raises(UnsupportedModelStateError, match=r"2 weights .* first 0\.weight"):
        weights.check_materialized(meta)
    from accelerate import cpu_offload

    weights.check_materialized(cpu_offload(model))
