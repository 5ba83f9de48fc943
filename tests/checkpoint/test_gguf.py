"""GGUF files: read once, kept as safetensors, bit for bit the same afterwards."""

import struct
from pathlib import Path

import pytest
import torch

from lens.checkpoint import conversions, gguf
from lens.checkpoint.gguf_header import read_header
from lens.checkpoint.load import _resolve, load
from lens.errors import (
    CorruptCheckpointError,
    LensError,
    SelectionError,
    UnsupportedArchitectureError,
    UnsupportedModelStateError,
)
from tests.checkpoint import tiny_checkpoints as tiny


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its own cache for each test."""
    monkeypatch.setenv("LENS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tiny.write_gguf(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_kept_conversion_gives_the_same_logits(
    file: Path, dtype: str | None, no_sockets: None
) -> None:
    direct, tokenizer, origin = _resolve(file, dtype=dtype, cache=False)
    first, first_tokenizer, _ = _resolve(file, dtype=dtype)
    again, _, again_origin = _resolve(file, dtype=dtype)
    assert direct.dtype == (torch.float32 if dtype is None else torch.bfloat16)
    assert torch.equal(tiny.logits(first), tiny.logits(direct))
    assert torch.equal(tiny.logits(again), tiny.logits(direct))
    assert first_tokenizer("ab ba")["input_ids"] == tokenizer("ab ba")["input_ids"]
    assert again_origin == origin
    assert origin.format == "gguf"


def test_without_cache_nothing_is_kept(file: Path, cache: Path) -> None:
    _resolve(file, cache=False)
    assert not cache.exists()
    _resolve(file)
    assert [path.name.split("-")[0] for path in cache.iterdir() if path.is_dir()] == [
        _resolve(file)[2].files_hash
    ]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("keep", [True, False])
def test_an_absent_output_matrix_means_tied(tmp_path: Path, tied: bool, keep: bool) -> None:
    checkpoint = load(tiny.write_gguf(tmp_path / "t.gguf", tied=tied), cache=keep)
    assert checkpoint.tie.is_tied is tied
    assert ("lm_head.weight" in checkpoint.origin.checkpoint_keys) is not tied


def test_a_folder_that_holds_one_gguf_is_that_file(file: Path) -> None:
    assert _resolve(file.parent)[2] == _resolve(file)[2]
    tiny.write_gguf(file.with_name("other.gguf"))
    with pytest.raises(SelectionError, match=r"other\.gguf, tiny\.gguf"):
        _resolve(file.parent)


def test_a_gguf_without_vocabulary_has_no_tokenizer(tmp_path: Path) -> None:
    path = tiny.write_gguf(tmp_path / "mute.gguf", with_tokenizer=False)
    assert _resolve(path)[1] is None
    assert _resolve(path, cache=False)[1] is None


def test_a_file_that_is_cut_anywhere_is_refused(file: Path) -> None:
    whole = file.read_bytes()
    read_header(file)
    for length in (0, 3, 10, 60, len(whole) // 4, len(whole) // 2, len(whole) - 200):
        file.write_bytes(whole[:length])
        with pytest.raises(CorruptCheckpointError, match="Get"):
            _resolve(file)


def test_a_damaged_count_in_the_header_is_refused(file: Path) -> None:
    whole = file.read_bytes()
    for position in (4, 8, 16, 24):
        file.write_bytes(whole[:position] + b"\xff" * 8 + whole[position + 8 :])
        with pytest.raises(CorruptCheckpointError):
            read_header(file)


def test_an_architecture_that_cannot_be_dequantised_is_named(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"llama", b"lxmxx"))
    with pytest.raises(UnsupportedArchitectureError, match="'lxmxx'"):
        _resolve(file)


def test_a_part_of_a_split_file_is_refused(file: Path) -> None:
    whole = file.read_bytes()
    key = b"split.count"
    field = struct.pack("<Q", len(key)) + key + struct.pack("<IH", 2, 3)
    n_fields = struct.unpack("<Q", whole[16:24])[0] + 1
    file.write_bytes(whole[:16] + struct.pack("<Q", n_fields) + field + whole[24:])
    with pytest.raises(UnsupportedModelStateError, match="one of 3 parts"):
        read_header(file)


@pytest.mark.parametrize(
    ("key", "kind", "value"),
    [(b"general.alignment", 4, 0), (b"split.count", 8, None), (b"general.alignment", 8, None)],
)
def test_a_field_that_cannot_be_counted_with_is_refused(
    file: Path, key: bytes, kind: int, value: int | None
) -> None:
    raw = file.read_bytes()
    number = b"\1" + b"\0" * 7 + b"x" if value is None else value.to_bytes(4, "little")
    entry = len(key).to_bytes(8, "little") + key + kind.to_bytes(4, "little") + number
    count = int.from_bytes(raw[16:24], "little") + 1
    file.write_bytes(raw[:16] + count.to_bytes(8, "little") + entry + raw[24:])
    with pytest.raises(CorruptCheckpointError, match="damaged or cut"):
        read_header(file)


def test_a_conversion_that_fails_leaves_nothing(file: Path, cache: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"llama", b"lxmxx"))
    with pytest.raises(LensError):
        _resolve(file)
    assert [path for path in cache.iterdir() if path.suffix != ".lock"] == []


def test_a_cache_that_cannot_be_written_costs_time_and_no_result(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "blocked").write_text("a file, not a folder")
    monkeypatch.setenv("LENS_CACHE", str(tmp_path / "blocked" / "cache"))
    model, _, origin = _resolve(file)
    assert torch.equal(tiny.logits(model), tiny.logits(_resolve(file, cache=False)[0]))
    assert any("could not be kept" in note for note in origin.notes)


def test_a_damaged_conversion_is_made_again(file: Path) -> None:
    before = tiny.logits(_resolve(file)[0])
    (folder,) = (path for path in conversions.cache_folder().iterdir() if path.is_dir())
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-8:] = b"\x00" * 8
    weights.write_bytes(data)
    assert torch.equal(tiny.logits(_resolve(file)[0]), before)
    weights.write_bytes(weights.read_bytes()[:-8])
    assert torch.equal(tiny.logits(_resolve(file)[0]), before)


@pytest.mark.slow
def test_a_trained_model_is_kept_bit_for_bit(smollm2_path: Path) -> None:
    kept, tokenizer, _ = _resolve(smollm2_path)
    direct, _, _ = _resolve(smollm2_path, cache=False)
    ids = tokenizer("The Eiffel Tower is located in the city of", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(kept(ids).logits, direct(ids).logits)


def test_a_file_made_for_the_occasion_goes_again() -> None:
    seen = []
    with gguf.written(lambda path: path.write_bytes(b"x") and None, "name.gguf")() as path:
        seen.append(path)
        assert path.read_bytes() == b"x"
    assert not seen[0].parent.exists()
