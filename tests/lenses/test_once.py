"""One short prompt is read without numba; more than that is worth its start."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import lens
from lens.lenses import chunks, reduction
from lens.lenses.reduction import WORTH_STARTING, fuses

PROMPT = "It is a truth"
CPU = torch.device("cpu")


@pytest.fixture
def twin() -> lens.Checkpoint:
    return lens.load("tied-twin")


def test_the_choice_depends_on_how_much_is_read_and_on_nothing_else() -> None:
    assert not fuses(CPU, once_cells=WORTH_STARTING - 1)
    assert fuses(CPU, once_cells=WORTH_STARTING)
    assert fuses(CPU)
    assert not fuses(torch.device("cuda"), once_cells=WORTH_STARTING)


@pytest.mark.parametrize(("least", "loaded"), [(WORTH_STARTING, False), (1, True)])
def test_a_short_prompt_starts_no_numba(least: int, loaded: bool) -> None:
    code = (
        "import sys, lens\nfrom lens.lenses import reduction\n"
        f"reduction.WORTH_STARTING = {least}\n"
        f"lens.load('tied-twin').logit_lens({PROMPT!r})\nprint('numba' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == [str(loaded)]


def test_both_ways_say_the_same(twin: lens.Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    short = twin.logit_lens(PROMPT)
    monkeypatch.setattr(reduction, "WORTH_STARTING", 1)
    fused = twin.logit_lens(PROMPT)
    assert isinstance(short, lens.LayerPredictions)
    assert isinstance(fused, lens.LayerPredictions)
    np.testing.assert_array_equal(short.top_ids, fused.top_ids)
    np.testing.assert_allclose(short.kl_bits, fused.kl_bits, rtol=5e-5, atol=5e-4)
    np.testing.assert_allclose(short.entropy_bits, fused.entropy_bits, atol=5e-5)


def test_prompts_of_a_list_count_together(
    twin: lens.Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int | None] = []

    def asked(device: torch.device, *, once_cells: int | None = None) -> bool:
        seen.append(once_cells)
        return fuses(device, once_cells=once_cells)

    monkeypatch.setattr(chunks, "fuses", asked)
    twin.logit_lens([[1, 2, 3], [4, 5]], layers=[0, 3])
    assert set(seen) == {5 * 2 * twin.d_vocab}
    seen.clear()
    twin.logit_lens([1, 2, 3], positions=[-1])
    assert set(seen) == {1 * 7 * twin.d_vocab}
