"""Fitted translators are better on other documents, find what is known, and stop and go on."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import lens
from lens.checkpoint.checkpoint import Checkpoint
from lens.checkpoint.readout import DirectReadout
from lens.checkpoint.tail import OwnTail
from lens.corpus import read_corpus
from lens.errors import (
    ProvenanceError,
    ResultFileError,
    SelectionError,
    UnsupportedArchitectureError,
)
from lens.lenses.affine import AffineLens, AffineSource, load_affine, published_hash
from lens.lenses.state_divergence import StateDivergence, StateRows
from lens.measuring.measure import measure
from lens.measuring.ridge import fit_ridge
from lens.measuring.state_batches import StateBatches
from lens.measuring.translator_fit import TranslatorFit
from lens.measuring.tuning import Step, _apart, tune
from lens.measuring.windows import windows_of
from tests.architectures.build import architectures
from tests.measuring.small import checkpoint, id_corpus

OPTIONS: dict[str, Any] = {"window_tokens": 10}
SHORT: dict[str, Any] = {"steps": 6, "positions": 16, "check_every": 2, **OPTIONS}


def replayed(name: str = "gpt2") -> Checkpoint:
    model = checkpoint(name)
    model.readout = model.replay
    return model


@pytest.fixture(scope="module")
def tuned() -> AffineLens:
    fit, _ = id_corpus(40).split(fit_share=0.75)
    return tune(checkpoint(), fit, steps=40, positions=64, check_every=20, **OPTIONS)


def test_held_out_KL_is_below_the_logit_lens_at_every_layer(tuned: AffineLens) -> None:
    _, held_out = id_corpus(40).split(fit_share=0.75)
    model = checkpoint()
    plain = measure(model, held_out, **OPTIONS).mean("kl_bits")
    better = measure(model, held_out, lens=tuned, **OPTIONS).mean("kl_bits")
    assert np.all(better[:-1] < plain[:-1])
    assert better[-1] == 0.0
    told = tuned.source.options
    assert np.all(np.array(told["held_out_kl_bits"]) < np.array(told["logit_lens_kl_bits"]))


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_a_replay_fits_the_same_lens_as_the_direct_readout(name: str) -> None:
    """Whole windows are read here, so that both see the same rows."""
    options = {"steps": 4, "positions": 10_000, "check_every": 2, **OPTIONS}
    direct = tune(checkpoint(name), id_corpus(6), **options)
    other = tune(replayed(name), id_corpus(6), **options)
    assert float(direct.weight.abs().max()) > 1e-4
    torch.testing.assert_close(other.weight, direct.weight, rtol=0.02, atol=2e-5)
    told = [np.array(lens.source.options["held_out_kl_bits"]) for lens in (direct, other)]
    np.testing.assert_allclose(told[0], told[1], rtol=1e-3)


def rotated_states(model: Checkpoint, rotation: torch.Tensor, seed: int) -> StateRows:
    """Layer 0 holds the last states in a rotated basis: the true translator is known."""
    final = torch.randn(512, model.d_model, generator=torch.Generator().manual_seed(seed))
    return StateRows(
        states=torch.stack([final @ rotation, final]), read=torch.ones(512, dtype=torch.bool)
    )


@pytest.fixture(scope="module")
def rotation() -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    random = torch.randn(64, 64, generator=generator)
    # Half-way to a random rotation: near enough for 300 steps, far enough to ruin the reading.
    skew = 0.06 * (random - random.T)
    return torch.linalg.matrix_exp(skew)


@pytest.mark.parametrize(("optimiser", "rate"), [("adam", 5e-3), ("muon", 3e-2)])
def test_a_known_rotation_is_undone(rotation: torch.Tensor, optimiser: Any, rate: float) -> None:
    model = checkpoint()
    fit = TranslatorFit(
        StateDivergence(model),
        [rotated_states(model, rotation, 1)],
        steps=200,
        optimiser=optimiser,
        learning_rate=rate,
    )
    for seed in range(100, 300):
        fit.step([rotated_states(model, rotation, seed)])
    fit.check()
    before, after = float(fit.first_kl_bits[0]), float(fit.best_kl_bits[0])
    assert before > 0.03
    assert after < 0.03 * before
    moved = torch.eye(64) + fit.best_weight[0]
    # h R (I + W)^T = k h: the translator is R, up to the length that the norm takes off.
    cosines = [float((m * rotation).sum() / m.norm() / 8) for m in (moved, torch.eye(64))]
    assert cosines[0] > 0.97
    assert cosines[1] < 0.9


def test_a_layer_that_does_not_get_better_keeps_the_identity() -> None:
    model = checkpoint()
    final = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    same = StateRows(states=torch.stack([final, final]), read=torch.ones(50, dtype=torch.bool))
    fit = TranslatorFit(StateDivergence(model), [same], steps=5, learning_rate=0.1)
    for _ in range(3):
        noise = dataclasses.replace(same, states=torch.randn(2, 50, 64))
        fit.step([noise])
        fit.check()
    assert float(fit.weight.abs().max()) > 0
    assert torch.count_nonzero(fit.best_weight) == torch.count_nonzero(fit.best_bias) == 0
    assert fit.checks_without_gain == 3


def test_fitting_ends_when_nothing_is_gained() -> None:
    seen: list[Step] = []
    lens = tune(
        checkpoint(),
        id_corpus(6),
        **{**SHORT, "steps": 50, "patience": 3, "learning_rate": 1e-9},
        progress=seen.append,
    )
    assert [s.step for s in seen] == [2, 4, 6]
    assert lens.source.options["steps_taken"] == 6


def test_ridge_finds_the_linear_map_of_its_own_states() -> None:
    model = checkpoint()
    fit, held_out = id_corpus(60).split(fit_share=0.9)
    ridge = fit_ridge(model, fit, **OPTIONS)
    ids = [list(d.ids or ())[:10] for d in held_out.documents]
    states = model.capture(model.inputs_of(ids), layers=range(model.n_layers + 1))
    final = states[model.n_layers][:, 1:]
    for layer in range(model.n_layers):
        own = states[layer][:, 1:]
        moved = ridge.translate(layer, own)
        assert float((moved - final).square().sum()) < float((own - final).square().sum())
    assert torch.equal(ridge.translate(model.n_layers, final), final)


def test_fitting_leaves_no_gradient_in_the_model() -> None:
    for model in (checkpoint(), replayed()):
        tune(model, id_corpus(6), **{**SHORT, "steps": 2})
        assert all(p.grad is None for p in model.model.parameters())
        assert all(p.requires_grad for p in model.model.parameters())


def test_the_same_seed_fits_the_same_lens() -> None:
    one, other, third = (tune(checkpoint(), id_corpus(6), **SHORT, seed=seed) for seed in (0, 0, 1))
    assert one.hash == other.hash != third.hash


def odd(name: str) -> Checkpoint:
    return lens.load(next(a for a in architectures() if a.model_type == name).build())


def test_a_tail_that_only_the_model_itself_can_run_is_fitted_through() -> None:
    model = odd("gemma3n_text")  # four streams that the tail joins
    assert isinstance(model.readout, DirectReadout)
    assert any(isinstance(part, OwnTail) for part in model.readout.preparation)
    told = tune(model, id_corpus(6), **SHORT).source.options
    before, after = (np.array(told[f"{n}_kl_bits"]) for n in ("logit_lens", "held_out"))
    assert np.all(after <= before)
    assert after[0] < before[0]


def test_a_tail_without_a_gradient_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedArchitectureError, match="gradient of the tail"):
        tune(odd("reformer"), id_corpus(6), **SHORT)


class StoppedError(Exception):
    pass


def stopped_at(step: int) -> Any:
    def progress(now: Step) -> None:
        if now.step == step:
            raise StoppedError

    return progress


@pytest.mark.parametrize("optimiser", ["adam", "muon"])
def test_a_stopped_fit_goes_on_to_the_same_bits(optimiser: Any, tmp_path: Path) -> None:
    options = {**SHORT, "optimiser": optimiser}
    whole = tune(checkpoint(), id_corpus(6), **options)
    with pytest.raises(StoppedError):
        tune(checkpoint(), id_corpus(6), **options, folder=tmp_path, progress=stopped_at(4))
    seen: list[Step] = []
    resumed = tune(checkpoint(), id_corpus(6), **options, folder=tmp_path, progress=seen.append)
    assert [s.step for s in seen] == [6]
    assert resumed.hash == whole.hash
    assert load_affine(tmp_path).hash == whole.hash
    again = tune(checkpoint(), id_corpus(6), **options, folder=tmp_path, progress=stopped_at(2))
    assert again.hash == whole.hash  # nothing is fitted again


def test_a_folder_of_another_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        tune(checkpoint(), id_corpus(6), **SHORT, folder=tmp_path, progress=stopped_at(2))
    with pytest.raises(ProvenanceError, match="differs in seed"):
        tune(checkpoint(), id_corpus(6), **SHORT, seed=1, folder=tmp_path)
    with pytest.raises(ProvenanceError, match="corpus_hash"):
        tune(checkpoint(), id_corpus(7), **SHORT, folder=tmp_path)
    with pytest.raises(ProvenanceError, match="model, unembedding"):
        tune(checkpoint("gpt_neox"), id_corpus(6), **SHORT, folder=tmp_path)
    (tmp_path / "tuning.pt").write_bytes(b"nonsense")
    with pytest.raises(ResultFileError, match="cannot be read"):
        tune(checkpoint(), id_corpus(6), **SHORT, folder=tmp_path)
    for held in ({}, [1], None):
        torch.save(held, tmp_path / "tuning.pt")
        with pytest.raises(ResultFileError, match="no state of a fit"):
            tune(checkpoint(), id_corpus(6), **SHORT, folder=tmp_path)


KILLED = """
import os, signal, sys
from tests.measuring.small import checkpoint, id_corpus
from lens.measuring.tuning import tune
def progress(step):
    if step.step == 4 and sys.argv[2] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
options = dict(steps=6, positions=16, check_every=2, window_tokens=10)
print(tune(checkpoint(), id_corpus(6), **options, folder=sys.argv[1], progress=progress).hash)
"""


@pytest.mark.slow
def test_a_killed_process_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    def run(folder: str, *more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", KILLED, str(tmp_path / folder), *more]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)

    assert run("stopped", "kill").returncode == -signal.SIGKILL
    resumed, whole = run("stopped", "on"), run("whole", "on")
    assert resumed.stdout == whole.stdout != ""


def test_what_is_held_out_of_a_lone_document_is_not_fitted_on() -> None:
    model, text = checkpoint(), read_corpus([id_corpus(1, 60).documents[0].ids])
    windows = windows_of(model, text, window_tokens=10).by_document[0]
    fit, held_out = _apart(model, text, 10, 50, 0)
    assert len(windows) == 6
    assert [w.ids.tolist() for w in fit] == [w.ids.tolist() for w in windows[:-1]]
    [rows] = held_out
    last = model.inputs_of([windows[-1].ids.tolist()])
    state = model.capture(last, layers=[model.n_layers])[model.n_layers][0]
    assert torch.equal(rows.states[-1], state[1:])
    with pytest.raises(SelectionError, match="one window"):
        tune(model, text, steps=1, window_tokens=60)
    nothing_to_read = read_corpus([[5], *(d.ids for d in text.documents)])
    assert len(_apart(model, nothing_to_read, 10, 50, 0)[0]) == len(fit)


def test_every_window_is_seen_once_in_a_pass() -> None:
    model = checkpoint()
    by_document = windows_of(model, id_corpus(9), window_tokens=10).by_document
    windows = [w for d in by_document for w in d]
    batches = StateBatches(model, windows, positions=16, seed=0)
    seen = [batches._place(i) for i in range(2 * len(windows))]
    assert sorted(seen[: len(windows)]) == list(range(len(windows)))
    assert sorted(seen[len(windows) :]) == list(range(len(windows)))
    assert seen[: len(windows)] != seen[len(windows) :]
    (batch,) = batches.at(3)
    assert batch.n_read == 16
    assert torch.equal(batch.states, batches.at(3)[0].states)
    assert not torch.equal(batch.states, batches.at(4)[0].states)


def fitted(weight: torch.Tensor, bias: torch.Tensor) -> AffineLens:
    source = AffineSource(model_id="m", unembedding_hash="", fitted_on="", options={})
    return AffineLens(name="tuned", weight=weight, bias=bias, source=source)


@pytest.mark.parametrize("made", [checkpoint, replayed])
def test_the_pull_on_states_is_the_slope_of_KL(made: Callable[[str], Checkpoint]) -> None:
    """Against differences of KL along random directions; the soft-cap and the norm are in it."""
    model = made("gemma2")
    inputs = model.inputs_of([list(range(3, 11))])
    captured = model.capture(inputs, layers=range(model.n_layers + 1))
    states = torch.stack([captured[layer][0] for layer in range(model.n_layers + 1)])
    read = torch.tensor([False, *[True] * 7])
    rows = StateRows(states=states, read=read, inputs=inputs)
    divergence = StateDivergence(model)
    moved = states[:-1]
    kl, pull = divergence.kl_and_pull(moved, rows)
    torch.testing.assert_close(kl, divergence.kl_bits(moved, rows))
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        way = torch.randn(moved.shape, generator=generator)
        step = 1e-2

        def total(sign: float, way: torch.Tensor = way, step: float = step) -> float:
            there = divergence.kl_bits(moved + sign * step * way, rows)
            return float(there[:, read].double().sum())

        slope = (total(1) - total(-1)) / (2 * step)
        assert float((pull * way).sum()) == pytest.approx(slope, rel=0.05, abs=2e-3)
    assert not pull[:, 0].any()  # position 0 does not count


def test_a_lens_reads_back_equal_and_is_refused_by_another_model(
    tuned: AffineLens, tmp_path: Path
) -> None:
    back = load_affine(tuned.save(tmp_path / "lens"))
    assert back.hash == tuned.hash
    assert back.source == tuned.source
    back.check(checkpoint())
    with pytest.raises(ProvenanceError, match="unembedding is another"):
        measure(checkpoint("gpt_neox"), id_corpus(3), lens=back, **OPTIONS)
    with pytest.raises(ProvenanceError, match="3 translators"):
        back.check(checkpoint(n_layers=5))
    with pytest.raises(SelectionError, match="0 to 3"):
        back.translate(4, torch.zeros(1, 64))
    with pytest.raises(ResultFileError, match="neither"):
        load_affine(tmp_path)
    whole = load_file(tmp_path / "lens" / "translators.safetensors")
    for damaged in (
        {"bias": whole["bias"][:, :-1].clone()},
        {"weight": whole["weight"][0].clone()},
        {"weight": torch.full_like(whole["weight"], torch.nan)},
        {"bias": whole["bias"].int()},
    ):
        save_file({**whole, **damaged}, tmp_path / "lens" / "translators.safetensors")
        with pytest.raises(ResultFileError, match="cannot be read as a lens"):
            load_affine(tmp_path / "lens")
    save_file(whole, tmp_path / "lens" / "translators.safetensors")
    note = tmp_path / "lens" / "translators.json"
    held = json.loads(note.read_text("utf-8"))
    for raw in (None, [], held | {"source": held["source"] | {"unembedding_hash": None}}):
        note.write_text(json.dumps(raw), encoding="utf-8")
        with pytest.raises(ResultFileError, match="cannot be read as a lens"):
            load_affine(tmp_path / "lens")
    (tmp_path / "lens" / "translators.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ResultFileError, match="cannot be read"):
        load_affine(tmp_path / "lens")


def test_the_published_format_loads_with_translator_i_after_i_blocks(tmp_path: Path) -> None:
    model = checkpoint()
    state = {f"{i}.weight": torch.full((64, 64), float(i)) for i in range(3)}
    state |= {f"{i}.bias": torch.full((64,), 10.0 * i) for i in range(3)}
    torch.save(state, tmp_path / "params.pt")
    config = {
        "base_model_name_or_path": "tiny",
        "d_model": 64,
        "num_hidden_layers": 3,
        "bias": True,
        "lens_type": "linear_tuned_lens",
        "unembed_hash": published_hash(model),
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    lens = load_affine(tmp_path)
    lens.check(model)
    ones = torch.ones(1, 64)
    for layer in range(3):
        assert torch.equal(lens.translate(layer, ones), ones + 64.0 * layer + 10.0 * layer)
    (tmp_path / "config.json").write_text(json.dumps({**config, "unembed_hash": "0" * 64}))
    with pytest.raises(ProvenanceError, match="unembedding is another"):
        load_affine(tmp_path).check(model)


def test_a_readout_by_hand_has_no_gradient_and_is_refused() -> None:
    class ByHand:
        kind, d_vocab = "mine", 160

        def logits(self, states: Sequence[float]) -> Any:
            raise NotImplementedError

    model = checkpoint()
    model.readout = ByHand()  # type: ignore[assignment]
    with pytest.raises(UnsupportedArchitectureError, match="by hand"):
        tune(model, id_corpus(6), **SHORT)
    with pytest.raises(SelectionError, match="adam, muon"):
        tune(checkpoint(), id_corpus(6), **SHORT, optimiser="sgd")
    assert fit_ridge(replayed(), id_corpus(6), **OPTIONS).name == "ridge"
