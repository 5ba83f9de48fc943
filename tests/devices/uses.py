"""What is done with a model on one device and on another, and how the results are compared."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lens
from lens.checkpoint.checkpoint import Checkpoint
from lens.checkpoint.origin import Origin
from lens.measuring.adam_paths import AdamSettings
from tests.measuring.small import id_corpus

PROMPT = [3, 4, 5, 6, 7]
TEXTS, FIT = id_corpus(5, 16), id_corpus(5, 16, seed=1)


def wrapped(model: Any) -> Checkpoint:
    return Checkpoint.from_model(
        model, tokenizer=None, origin=Origin(model_id="tiny", format="memory")
    )


def edited(model: Checkpoint) -> Any:
    with model.edit(1, [-1], lambda states: 2 * states):
        return model.logit_lens(PROMPT)


def vectors(model: Checkpoint) -> torch.Tensor:
    return torch.randn(4, model.d_model, generator=torch.Generator().manual_seed(0))


def read_again(model: Checkpoint, folder: Path) -> Any:
    path = lens.save_states(model.residual_states(PROMPT), folder / "states.safetensors")
    return model.read(lens.load_states(path))


def continued(model: Checkpoint, folder: Path) -> Any:
    settings = lens.Continuation(steps=1, batch_windows=1, window_tokens=16)
    lens.continue_twins(model, TEXTS, folder / "continued", settings=settings)
    return [p.name for p in sorted((folder / "continued").iterdir())]


def reported(model: Checkpoint, folder: Path) -> Any:
    lens.report(
        {"a": model, "b": model},
        TEXTS,
        folder / "report.html",
        fit_on=FIT,
        prompts=[PROMPT],
        translator="tuned",
        tune_steps=2,
    )
    return (folder / "report.html").is_file()


USES: dict[str, Callable[[Checkpoint, Path], Any]] = {
    "a prompt": lambda m, _: m.logit_lens(PROMPT),
    "a batch": lambda m, _: m.logit_lens([PROMPT[:3], PROMPT]),
    "within blocks": lambda m, _: m.logit_lens(
        PROMPT, points="all", positions=[-1, 1], targets={"three": [3]}
    ),
    "the input lens": lambda m, _: m.logit_lens(PROMPT, lens="input"),
    "padding rows masked": lambda m, _: m.logit_lens(PROMPT, mask_padding_rows=True),
    "an edit": lambda m, _: edited(m),
    "vectors": lambda m, _: m.read(vectors(m)),
    "states": lambda m, _: m.read(m.residual_states(PROMPT)),
    "saved states": read_again,
    "parts of blocks": lambda m, _: m.block_states(PROMPT),
    "the hash": lambda m, _: m.model_hash,
    "the tie": lambda m, _: m.tie,
    "measure": lambda m, _: lens.measure(m, TEXTS, fit_on=FIT, sample_positions=32),
    "measure through ridge": lambda m, _: lens.measure(m, TEXTS, lens=lens.fit_ridge(m, FIT)),
    "tune": lambda m, _: lens.tune(m, FIT, steps=2, positions=16),
    "jacobian": lambda m, _: lens.fit_jacobian(m, FIT, first_position=2),
    "compare": lambda m, _: lens.compare({"a": m, "b": m}, TEXTS, fit_on=FIT),
    "decompose": lambda m, _: lens.decompose(
        m, TEXTS, fit_on=FIT, positions=32, fit_positions=32, max_steps=1
    ),
    "attribution": lambda m, _: lens.attribution(m, PROMPT),
    "causal fidelity": lambda m, _: lens.causal_fidelity(
        m, TEXTS, n_directions=3, max_windows=1, max_steps=1
    ),
    "frequency": lambda m, _: lens.frequency(m, TEXTS, n_layers=3),
    "geometry": lambda m, _: lens.geometry(m),
    "gradients": lambda m, _: lens.gradients(m, TEXTS, adam=AdamSettings()),
    "known profile": lambda m, _: lens.known_profile(m),
    "neighbourhood copy": lambda m, _: lens.neighbourhood_copy(m, TEXTS, positions=32),
    "readout arms": lambda m, _: lens.readout_arms(m, TEXTS),
    "meaning": lambda m, _: lens.similarity_of_meaning(m, TEXTS, contexts=16, tokens=32),
    "surgery": lambda m, _: lens.surgery_sweep(m, TEXTS, alphas=(0.0, 0.5), rotate=True),
    "tied": lambda m, _: lens.tie(m, keep="input").logit_lens(PROMPT),
    "token energy": lambda m, _: lens.token_energy(m, TEXTS, positions=32),
    "saved": lambda m, folder: lens.save_checkpoint(m, folder / "saved").name,
    "continued": continued,
    "report": reported,
}

APART = {"provenance", "source", "device", "kl_bins"}
"""Fields that say where a result is from, and counts that a last bit moves to the next bin."""


def leaves(found: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every number and text of a result, with its path."""
    if dataclasses.is_dataclass(found):
        found = {f.name: getattr(found, f.name) for f in dataclasses.fields(found)}
    if isinstance(found, dict):
        for name, value in found.items():
            if name not in APART:
                yield from leaves(value, f"{path}.{name}")
    elif isinstance(found, list | tuple):
        for i, value in enumerate(found):
            yield from leaves(value, f"{path}.{i}")
    elif isinstance(found, torch.Tensor):
        yield path, found.detach().cpu().numpy()
    else:
        yield path, found


def assert_same(found: Any, expected: Any) -> None:
    mine, theirs = dict(leaves(found)), dict(leaves(expected))
    assert mine.keys() == theirs.keys()
    assert mine
    for path, value in theirs.items():
        if np.asarray(value).dtype.kind == "f":
            np.testing.assert_allclose(mine[path], value, rtol=2e-4, atol=2e-5, err_msg=path)
        elif np.asarray(value).dtype.kind in "iu":
            # Ids and counts alike; a sum of a million units may differ by its last bits.
            np.testing.assert_allclose(mine[path], value, rtol=1e-6, atol=0, err_msg=path)
        elif np.asarray(value).dtype.kind in "bSU":
            np.testing.assert_array_equal(mine[path], value, err_msg=path)


def quick(names: Iterable[str], chosen: Iterable[str]) -> list[Any]:
    """Parameters for pytest, of which the chosen run in the quick suite."""
    return [pytest.param(n, marks=[] if n in chosen else [pytest.mark.slow]) for n in names]
