"""A model is known by its matrix, and what is told of it follows from its numbers."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lens.checkpoint.checkpoint import Checkpoint
from lens.errors import ResultFileError, SelectionError
from lens.measuring import known_profile as module
from lens.measuring.known_profile import KnownProfile, known_of, known_profile, read_known, shipped
from lens.measuring.measure import measure
from tests.measuring.small import checkpoint, id_corpus


@pytest.fixture(scope="module")
def known() -> KnownProfile:
    model = checkpoint()
    profile = measure(model, id_corpus(4), fit_on=id_corpus(3, seed=1), window_tokens=10)
    return known_of(model, profile, name="tiny", date="2026-01-01")


def test_a_profile_reads_back_and_is_found_by_the_matrix(
    known: KnownProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = known.save(tmp_path)
    back = read_known(path.name, path.read_text())
    for field in dataclasses.fields(KnownProfile):
        ours, theirs = getattr(known, field.name), getattr(back, field.name)
        np.testing.assert_allclose(ours, theirs, atol=1e-6) if isinstance(
            ours, np.ndarray
        ) else None
        assert isinstance(ours, np.ndarray) or ours == theirs
    monkeypatch.setattr(module, "shipped", lambda: iter([back]))
    found = known_profile(checkpoint())
    assert found is back
    assert known_profile(checkpoint(tied=True)) is None  # of the same sizes, another matrix
    assert known_profile(checkpoint(n_layers=2)) is None
    replayed: Any = checkpoint()
    replayed.readout = replayed.replay
    assert known_profile(replayed) is None


def test_the_sentence_says_from_which_layer_on(known: KnownProfile) -> None:
    told = dataclasses.replace(
        known,
        skill=np.array([0.5, -1.0, 0.2, 1.0]),
        agreement=np.array([0.9, 0.1, 0.4, 1.0]),
    )
    assert (told.beats_a_guess_from, told.agrees_from) == (2, 3)
    assert "from layer 2 of 3 on" in str(told)
    assert "half of the positions from layer 3 on" in str(told)


def test_only_the_output_lens_with_a_baseline_is_kept() -> None:
    model = checkpoint()
    without = measure(model, id_corpus(3), window_tokens=10)
    with pytest.raises(SelectionError, match="with a baseline"):
        known_of(model, without, name="x", date="")
    with pytest.raises(ResultFileError, match="not of format"):
        read_known("x.json", '{"format": "other"}')


def test_shipped_profiles_are_whole_and_end_at_the_model() -> None:
    held = list(shipped())
    assert held
    for profile in held:
        assert len(profile.kl_bits) == profile.n_layers + 1
        assert profile.kl_bits[-1] == 0
        assert profile.skill[-1] == 1
        assert profile.agreement[-1] == 1
        assert np.all(profile.kl_low_95 <= profile.kl_high_95)
        assert profile.n_documents > 1


def test_smollm2_is_known(smollm2: Checkpoint) -> None:
    found = known_profile(smollm2)
    assert found is not None
    assert found.model_id == "SmolLM2-135M-Instruct"
    assert 1 < found.beats_a_guess_from <= found.n_layers == 30
