import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel

import lens
from lens.checkpoint.checkpoint import Checkpoint
from lens.checkpoint.load import _resolve, load
from lens.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    SelectionError,
    TokenizerError,
    UnsupportedArchitectureError,
    UnsupportedModelStateError,
)
from tests.checkpoint import tiny_checkpoints as tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.save(tiny.gpt2(), tmp_path / "tiny-gpt2")


def test_a_folder_gives_the_model_that_was_saved(folder: Path, no_sockets: None) -> None:
    checkpoint = load(folder)
    assert isinstance(checkpoint, Checkpoint)
    assert torch.equal(tiny.logits(checkpoint.model), tiny.logits(tiny.gpt2()))
    assert checkpoint.tie.is_tied
    assert checkpoint.origin.model_id == "tiny-gpt2"
    assert checkpoint.origin.format == "safetensors"
    assert len(checkpoint.origin.files_hash) == 64
    assert "lm_head.weight" not in checkpoint.origin.checkpoint_keys
    assert checkpoint.ids_of("ab c") == [3, 4, 2, 5]


def test_a_path_as_text_and_a_pickle_give_the_same_model(folder: Path, tmp_path: Path) -> None:
    model = tiny.gpt2()
    pickled = tiny.save(model, tmp_path / "pickled")
    (pickled / "model.safetensors").unlink()
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    read, _, origin = _resolve(str(pickled))
    assert origin.format == "pytorch"
    assert torch.equal(tiny.logits(read), tiny.logits(_resolve(str(folder))[0]))


def test_dtype_is_that_of_the_files_unless_asked(tmp_path: Path) -> None:
    path = tiny.save(tiny.gpt2().to(torch.bfloat16), tmp_path / "half")
    assert _resolve(path)[0].dtype == torch.bfloat16
    assert _resolve(path, dtype="float32")[0].dtype == torch.float32
    assert _resolve(path, dtype=torch.float16)[0].dtype == torch.float16


@pytest.mark.parametrize(
    ("option", "part"),
    [
        ({"dtype": "int8"}, "none of float32"),
        ({"dtype": "floaty"}, "none of float32"),
        ({"device": "cpu:3"}, "not on this machine"),
        ({"device": "toaster"}, "no device of torch"),
        ({"device": "mps"}, "lens adds up in float64"),
        ({"device": "cpu", "device_map": "cpu"}, "not both"),
        ({"revision": "step1"}, "belongs to a hub id"),
    ],
)
def test_an_option_that_cannot_be_met_is_refused(folder: Path, option: Any, part: str) -> None:
    with pytest.raises(SelectionError, match=part):
        _resolve(folder, **option)


def test_device_map_places_the_model(folder: Path) -> None:
    model = _resolve(folder, device_map={"": "cpu"})[0]
    assert torch.equal(tiny.logits(model), tiny.logits(tiny.gpt2()))


def test_a_missing_path_names_its_neighbours(folder: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="there is tiny-gpt2"):
        _resolve(folder.parent / "tiny-gtp2")
    with pytest.raises(CheckpointNotFoundError, match="is no folder"):
        _resolve(str(folder / "deeper" / "still.gguf"))
    with pytest.raises(CheckpointNotFoundError):
        _resolve("")


def test_a_file_that_is_no_gguf_names_its_folder(folder: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="Pass the folder that it lies in"):
        _resolve(folder / "model.safetensors")


def test_a_folder_without_weights_or_config_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointNotFoundError, match="holds no weights"):
        _resolve(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"no config\.json"):
        _resolve(folder)


def test_a_damaged_config_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ', encoding="utf-8")
    with pytest.raises(CorruptCheckpointError, match="is no JSON"):
        _resolve(folder)


def test_truncated_weights_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(CorruptCheckpointError, match="truncated") as caught:
        _resolve(folder)
    assert f"{len(whole):,}" in str(caught.value)
    path.write_bytes(whole[:5])
    with pytest.raises(CorruptCheckpointError, match="was cut"):
        _resolve(folder)


def test_weights_of_another_shape_than_the_config_are_refused(folder: Path) -> None:
    text = (folder / "config.json").read_text("utf-8")
    (folder / "config.json").write_text(text.replace('"n_embd": 16', '"n_embd": 32'), "utf-8")
    with pytest.raises(IncompleteCheckpointError, match="another shape"):
        _resolve(folder)


def test_an_unknown_model_type_is_refused(folder: Path) -> None:
    text = (folder / "config.json").read_text("utf-8").replace('"gpt2"', '"gpt77"')
    (folder / "config.json").write_text(text, "utf-8")
    with pytest.raises(UnsupportedArchitectureError, match=r"transformers 5.*'gpt77'"):
        _resolve(folder)
    text = text.replace("{", '{"auto_map": {"AutoConfig": "c.C"},', 1)
    (folder / "config.json").write_text(text, "utf-8")
    with pytest.raises(UnsupportedArchitectureError, match="trust_remote_code=True"):
        _resolve(folder)


_OWN_CODE = """
from transformers import GPT2Config, GPT2LMHeadModel
class OwnConfig(GPT2Config):
    model_type = "own"
class OwnLM(GPT2LMHeadModel):
    config_class = OwnConfig
"""


def test_code_that_comes_with_a_model_is_run_only_when_asked(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_sockets: None
) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    (folder / "own.py").write_text(_OWN_CODE, encoding="utf-8")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config |= {"model_type": "own", "architectures": ["OwnLM"]}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnLM"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UnsupportedArchitectureError, match="trust_remote_code=True"):
        _resolve(folder)
    model = _resolve(folder, trust_remote_code=True)[0]
    assert type(model).__name__ == "OwnLM"
    assert torch.equal(tiny.logits(model), tiny.logits(tiny.gpt2()))


def test_an_adapter_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}", "utf-8")
    with pytest.raises(UnsupportedModelStateError, match="merge_and_unload"):
        _resolve(folder)


def test_weights_that_are_not_finite_are_refused(folder: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["transformer.h.1.mlp.c_fc.weight"][0, 0] = float("nan")

    tiny.edit_weights(folder, spoil)
    with pytest.raises(CorruptCheckpointError, match=r"h\.1\.mlp\.c_fc\.weight"):
        _resolve(folder)


def test_without_a_tokenizer_ids_are_read_and_text_is_an_error(tmp_path: Path) -> None:
    checkpoint = load(tiny.save(tiny.gpt2(), tmp_path / "bare", with_tokenizer=False))
    assert checkpoint.tokenizer is None
    assert any("no tokenizer" in note for note in checkpoint.origin.notes)
    assert checkpoint.ids_of([3, 4]) == [3, 4]
    with pytest.raises(TokenizerError, match="Pass token ids"):
        checkpoint.ids_of("ab")


def test_a_tokenizer_may_be_given_beside_the_model(tmp_path: Path) -> None:
    bare = tiny.save(tiny.gpt2(), tmp_path / "bare", with_tokenizer=False)
    tiny.tokenizer().save_pretrained(tmp_path / "tokenizer")
    for given in (tiny.tokenizer(), tmp_path / "tokenizer"):
        assert load(bare, tokenizer=given).ids_of("ab") == [3, 4]
    with pytest.raises(TokenizerError, match="neither a folder"):
        _resolve(bare, tokenizer=str(tmp_path / "nowhere"))


def test_a_model_in_memory_is_not_changed() -> None:
    model = tiny.gpt2().train()
    before = {name: id(p) for name, p in model.named_parameters()}
    checkpoint = load(model, tokenizer=tiny.tokenizer())
    assert checkpoint.model is model
    assert model.training
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert checkpoint.origin.format == "memory"
    assert checkpoint.origin.model_id == "GPT2LMHeadModel"


@pytest.mark.parametrize("option", [{"dtype": "bfloat16"}, {"device": "cpu"}, {"revision": "a"}])
def test_a_model_in_memory_takes_no_option_that_would_change_it(option: Any) -> None:
    with pytest.raises(SelectionError, match="cannot be applied to a model in memory"):
        load(tiny.gpt2(), **option)


def test_a_model_on_the_meta_device_is_refused() -> None:
    with torch.device("meta"):
        model = GPT2LMHeadModel(tiny.gpt2().config)
    with pytest.raises(UnsupportedModelStateError, match="meta device"):
        load(model)


def test_a_model_on_a_device_without_float64_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.gpt2()
    assert load(model).device.type == "cpu"
    there = types.SimpleNamespace(device=torch.device("mps"))
    monkeypatch.setattr(model, "parameters", lambda recurse=True: iter([there]))
    with pytest.raises(SelectionError, match="which the device mps does not have"):
        load(model)


def test_the_public_entrance_is_this_one() -> None:
    assert lens.load is load
