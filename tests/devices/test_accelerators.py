"""Everything that is measured on a CPU is measured on an accelerator too, with the same numbers."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lens
from lens.checkpoint.checkpoint import Checkpoint
from lens.checkpoint.origin import Origin
from lens.measuring import geometry as geometry_module
from lens.measuring.adam_paths import AdamSettings
from lens.measuring.neighbours import Nearest
from tests.checkpoint.tiny import BY_NAME, TINY
from tests.devices.pretended import CPU, FIRST, SECOND, accelerators, move, place_of
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

SLOW = {"compare", "decompose", "readout arms", "continued", "report"}
"""What puts others of these together."""

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


@pytest.fixture(scope="module")
def on_the_cpu() -> Checkpoint:
    return wrapped(BY_NAME["gpt2"].build(tied=False))


@pytest.fixture(scope="module")
def on_the_device() -> Checkpoint:
    with accelerators():
        return wrapped(move(BY_NAME["gpt2"].build(tied=False)))


@pytest.mark.parametrize(
    "use", [pytest.param(use, marks=[pytest.mark.slow] * (use in SLOW)) for use in USES]
)
def test_a_measurement_says_the_same(
    use: str, on_the_cpu: Checkpoint, on_the_device: Checkpoint, tmp_path: Path
) -> None:
    for name in ("cpu", "device"):
        (tmp_path / name).mkdir()
    expected = USES[use](on_the_cpu, tmp_path / "cpu")
    with accelerators():
        assert on_the_device.device == FIRST
        found = USES[use](on_the_device, tmp_path / "device")
        assert_same(found, expected)


def reading(model: Checkpoint) -> Any:
    source = {"source": [4, 5, 6]} if model.model.config.is_encoder_decoder else {}
    return model.logit_lens(PROMPT, **source), model.logit_lens(PROMPT, lens="input", **source)


@pytest.mark.parametrize("name", [tiny.name for tiny in TINY])
def test_every_architecture_is_read(name: str) -> None:
    expected = wrapped(BY_NAME[name].build())
    with accelerators():
        model = wrapped(move(BY_NAME[name].build()))
        assert (model.readout.kind, model.tie.verdict) == (
            expected.readout.kind,
            expected.tie.verdict,
        )
        assert_same(reading(model), reading(expected))


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "olmo2"])
def test_a_norm_behind_each_part_is_attributed(name: str) -> None:
    expected = lens.attribution(wrapped(BY_NAME[name].build()), PROMPT)
    with accelerators():
        assert_same(lens.attribution(wrapped(move(BY_NAME[name].build())), PROMPT), expected)


def test_a_tensor_left_behind_is_found(
    on_the_device: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    nearest = geometry_module.nearest_rows

    def left_on_the_device(queries: Any, *args: Any, **options: Any) -> Nearest:
        near = nearest(queries, *args, **options)
        return Nearest(near.by_cosine.to(queries.device), near.by_dot.to(queries.device))

    monkeypatch.setattr(geometry_module, "nearest_rows", left_on_the_device)
    with accelerators(), pytest.raises(RuntimeError, match="indices should be"):
        lens.geometry(on_the_device)


MIXTURES: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], str]] = {
    "a sum": (lambda there, cpu: there + cpu, "same device"),
    "a sum of two devices": (lambda there, cpu: there + there.to(SECOND), "same device"),
    "a number of another device": (lambda there, cpu: there.to(SECOND).sum() * there, "same"),
    "a stack": (lambda there, cpu: torch.stack([there, cpu]), "same device"),
    "equality": (lambda there, cpu: torch.equal(there, cpu), "same device"),
    "numpy": (lambda there, cpu: there.numpy(), "numpy"),
    "asarray": (lambda there, cpu: np.asarray(there), "numpy"),
    "indices": (lambda there, cpu: cpu[there.long()], "indices should be"),
    "chosen rows": (lambda there, cpu: there.__setitem__(cpu.long(), cpu), "index_put_"),
    "a generator": (
        lambda there, cpu: torch.randn(3, generator=torch.Generator(), device=FIRST),
        "generator",
    ),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_what_a_device_refuses_is_refused(name: str) -> None:
    mix, message = MIXTURES[name]
    with accelerators():
        there = torch.arange(3.0, device=FIRST)
        with pytest.raises((RuntimeError, TypeError), match=message):
            mix(there, torch.arange(3.0))


def test_what_a_device_takes_is_taken() -> None:
    with accelerators():
        there, cpu = torch.arange(3.0, device=FIRST), torch.arange(3.0)
        assert place_of(there + cpu.sum()) == FIRST
        assert place_of(there[cpu.long()]) == FIRST
        assert place_of(torch.zeros_like(there)) == place_of(cpu.to(there)) == FIRST
        assert place_of(there.to(SECOND)) == torch.ones(1, device=SECOND).device == SECOND
        assert place_of(there.cpu()) == place_of(torch.zeros(3).copy_(there)) == CPU
        there[1:] = cpu[:2]
        assert there.tolist() == [0, 0, 1]
