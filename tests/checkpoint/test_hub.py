"""Hub ids: from the cache without a connection, else from a hub that runs on this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lens.checkpoint.load import _resolve
from lens.errors import CheckpointNotFoundError
from tests.checkpoint import tiny_checkpoints as tiny
from tests.checkpoint.hub_stand_in import Repository, commit_of, fill_cache, serving

NAME = "some-lab/tiny"

_LOAD_ALL = """
import json, sys
import torch
from lens.checkpoint.load import _resolve
from lens.errors import LensError
out = []
for source, revision in json.loads(sys.argv[1]):
    try:
        model, tokenizer, origin = _resolve(source, revision=revision)
    except LensError as error:
        out.append({"error": type(error).__name__, "text": str(error)})
    else:
        with torch.no_grad():
            logits = model(torch.tensor([[3, 9, 4, 20]])).logits
        out.append({"revision": origin.revision, "id": origin.model_id, "hash": origin.files_hash,
                    "format": origin.format, "tokenizer": tokenizer is not None,
                    "logits": logits.double().flatten().tolist()})
print(json.dumps(out))
"""


@pytest.fixture
def revisions(tmp_path: Path) -> dict[str, Path]:
    """Two steps of a training run: the last one tied, the early one not."""
    return {
        "main": tiny.save(tiny.gpt2(tied=True), tmp_path / "main"),
        "step1000": tiny.save(tiny.gpt2(tied=False), tmp_path / "step1000"),
    }


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def _load_all(wanted: list[Any], home: Path, endpoint: str) -> list[dict[str, Any]]:
    """Load in a fresh interpreter: huggingface_hub reads its settings when it is imported."""
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("HF_")},
        "HF_HOME": str(home),
        "HF_ENDPOINT": endpoint,
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    done = subprocess.run(
        [sys.executable, "-c", _LOAD_ALL, json.dumps(wanted)],
        env=environment, check=False, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_cached_revision_is_read_without_a_socket(
    cache: Path, revisions: dict[str, Path], no_sockets: None
) -> None:
    fill_cache(cache, NAME, revisions)
    for revision, given in (("main", None), ("main", "main"), ("step1000", "step1000")):
        model, tokenizer, origin = _resolve(NAME, revision=given)
        assert torch.equal(tiny.logits(model), tiny.logits(_resolve(revisions[revision])[0]))
        assert origin.revision == commit_of(revision)
        assert origin.model_id == NAME
        assert origin.files_hash == _resolve(revisions[revision])[2].files_hash
        assert tokenizer is not None
    by_commit = _resolve(NAME, revision=commit_of("step1000"))[2]
    assert by_commit.revision == commit_of("step1000")


def test_what_is_not_cached_names_the_next_step(cache: Path, revisions: dict[str, Path]) -> None:
    with pytest.raises(CheckpointNotFoundError, match="Unset HF_HUB_OFFLINE"):
        _resolve(NAME)
    fill_cache(cache, NAME, revisions)
    with pytest.raises(CheckpointNotFoundError, match="at revision 'step7'"):
        _resolve(NAME, revision="step7")


def test_a_repository_that_is_cached_in_part_is_not_read(
    cache: Path, revisions: dict[str, Path]
) -> None:
    (revisions["main"] / "model.safetensors").unlink()
    fill_cache(cache, NAME, revisions)
    with pytest.raises(CheckpointNotFoundError, match="holds it only in part"):
        _resolve(NAME)


def test_a_hub_gives_each_revision_and_only_what_is_read(
    revisions: dict[str, Path], tmp_path: Path
) -> None:
    for folder in revisions.values():
        (folder / "pytorch_model.bin").write_bytes(b"not read")
        (folder / "modeling_evil.py").write_text("raise SystemExit", encoding="utf-8")
        (folder / "onnx").mkdir()
        (folder / "onnx" / "config.json").write_text("{}", encoding="utf-8")
    pickled = tiny.save(tiny.gpt2(), tmp_path / "pickled")
    (pickled / "model.safetensors").unlink()
    torch.save(tiny.gpt2().state_dict(), pickled / "pytorch_model.bin")
    repositories = {
        NAME: Repository(revisions),
        "some-lab/locked": Repository(revisions, gated=True),
        "some-lab/pickled": Repository({"main": pickled}),
    }
    with serving(repositories) as hub:
        wanted = [[NAME, None], [NAME, "step1000"], [NAME, "step7"], ["some-lab/tny", None],
                  ["some-lab/locked", None], ["some-lab/pickled", None]]  # fmt: skip
        main, step, no_step, no_name, gated, old = _load_all(wanted, tmp_path / "home", hub.url)
        assert hub.fetched.count("model.safetensors") == 2
        assert "modeling_evil.py" not in hub.fetched
        assert hub.fetched.count("pytorch_model.bin") == 1  # where there are no safetensors
        assert hub.fetched.count("config.json") == 3
    for got, revision in ((main, "main"), (step, "step1000")):
        expected = tiny.logits(_resolve(revisions[revision])[0])
        assert got["logits"] == expected.double().flatten().tolist()
        assert got["revision"] == commit_of(revision)
        assert got["tokenizer"]
        assert got["hash"] == _resolve(revisions[revision])[2].files_hash
    assert main["logits"] != step["logits"]
    assert old["format"] == "pytorch"
    assert old["logits"] == main["logits"]
    assert {e["error"] for e in (no_step, no_name, gated)} == {"CheckpointNotFoundError"}
    assert "no such branch" in no_step["text"]
    assert "neither a path here nor a repository" in no_name["text"]
    assert "hf auth login" in gated["text"]
    # The hub is gone: what it gave is read from the cache, what it did not give is an error.
    again, unknown = _load_all([[NAME, None], ["some-lab/new", None]], tmp_path / "home", hub.url)
    assert again == main
    assert unknown["error"] == "CheckpointNotFoundError"
    assert "cannot be reached" in unknown["text"]
