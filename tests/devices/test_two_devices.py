"""A model over two devices, as accelerate lays one out, is measured as on one."""

from pathlib import Path

import pytest

import lens
from lens.checkpoint.checkpoint import Checkpoint
from tests.checkpoint.tiny import BY_NAME
from tests.devices.pretended import accelerators, spread
from tests.devices.uses import USES, assert_same, quick, wrapped

SPREAD = {"untied": ("llama", False), "tied": ("gpt2", True)}

QUICK = {
    *("a prompt", "the input lens", "within blocks", "states", "measure", "tune"),
    *("attribution", "geometry", "gradients", "token energy"),
}

LEFT_OUT = {"continued", "surgery", "tied"}
"""Torch's Adam groups tensors by a device that these are not asked for; surgery wants two matrices,
and one of the pair has one."""


@pytest.fixture(scope="module", params=SPREAD)
def pair(request: pytest.FixtureRequest) -> tuple[Checkpoint, Checkpoint]:
    """A model on the CPU, and the same over two devices."""
    name, tied = SPREAD[request.param]
    with accelerators():
        over_two = wrapped(spread(BY_NAME[name].build(tied=tied)))
    return wrapped(BY_NAME[name].build(tied=tied)), over_two


@pytest.mark.parametrize("use", quick(sorted(USES.keys() - LEFT_OUT), QUICK))
def test_a_model_over_two_devices_says_the_same(
    use: str, pair: tuple[Checkpoint, Checkpoint], tmp_path: Path
) -> None:
    for name in ("cpu", "devices"):
        (tmp_path / name).mkdir()
    expected = USES[use](pair[0], tmp_path / "cpu")
    with accelerators():
        model = pair[1]
        places = {model.W_E.device, model.W_U.device}
        assert (model.readout.kind, len(places)) == ("direct", 1 if model.tie.is_tied else 2)
        assert_same(USES[use](model, tmp_path / "devices"), expected)


def test_matrices_on_two_devices_are_not_joined() -> None:
    with accelerators():
        model = wrapped(spread(BY_NAME["llama"].build(tied=False)))
        with pytest.raises(lens.UnsupportedModelStateError, match="cannot be on both"):
            lens.tie(model, keep="mean")
