"""Everything that is measured on a CPU is measured on an accelerator too, with the same numbers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lens
from lens.checkpoint.checkpoint import Checkpoint
from lens.measuring import geometry as geometry_module
from lens.measuring.neighbours import Nearest
from tests.checkpoint.tiny import BY_NAME
from tests.devices.pretended import CPU, FIRST, SECOND, accelerators, move, place_of
from tests.devices.uses import PROMPT, USES, assert_same, quick, wrapped

SLOW = {"compare", "decompose", "readout arms", "continued", "report"}
"""What puts others of these together."""

FAMILIES = ("gpt2", "llama", "gemma2", "bloom", "mamba", "bert", "t5")


@pytest.fixture(scope="module")
def on_the_cpu() -> Checkpoint:
    return wrapped(BY_NAME["gpt2"].build(tied=False))


@pytest.fixture(scope="module")
def on_the_device() -> Checkpoint:
    with accelerators():
        return wrapped(move(BY_NAME["gpt2"].build(tied=False)))


@pytest.mark.parametrize("use", quick(USES, USES.keys() - SLOW))
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


@pytest.mark.parametrize("name", quick(BY_NAME, FAMILIES))
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
