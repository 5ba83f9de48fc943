import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lens.corpus import read_corpus
from lens.errors import (
    ExportError,
    PromptError,
    ProvenanceError,
    ResultFileError,
    SelectionError,
    UnsupportedArchitectureError,
)
from lens.lenses.logit import readout_of
from lens.measuring import metrics
from lens.measuring.columns import TAUS
from lens.measuring.measure import Progress, measure
from lens.measuring.neighbourhood_copy import neighbourhood_copy
from lens.measuring.profile import LensProfile, merged
from lens.measuring.profile_file import read_profile
from lens.measuring.tuning_folder import TuningFolder
from lens.trust.evidence import confidence_gap
from lens.trust.verdict import states_of
from tests.measuring.small import checkpoint, id_corpus, padded_lookup

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def profile() -> LensProfile:
    fit, held_out = id_corpus(12).split()
    return measure(checkpoint(), held_out, fit_on=fit, window_tokens=10, sample_positions=4096)


def whole_logits(lens: str = "output", *, name: str = "gpt2", tied: bool = False) -> tuple:
    """Logits [layer, pos, v] of every read position of the fixture's corpus, ids and targets."""
    model = checkpoint(name, tied=tied)
    _, held_out = id_corpus(12).split()
    readout, parts, ids, targets, zero = readout_of(model, lens), [], [], [], []
    for document in held_out.documents:
        content = list(document.ids or ())
        for start in range(0, len(content), 10):
            window = content[start : start + 10]
            if len(window) < 2:
                continue
            states = model.capture(model.inputs_of([window]), layers=range(model.n_layers + 1))
            rows = torch.stack([states[layer][0] for layer in range(model.n_layers + 1)])
            logits = torch.stack([readout.logits(r[None])[0] for r in rows]).double().numpy()
            parts.append(logits[:, 1:])
            zero.append(logits[:, 0])
            ids += window[1:]
            following = content[start + 2 : start + 11]
            targets += [*following, *[-1] * (len(window) - 1 - len(following))]
    return np.concatenate(parts, axis=1), np.array(ids), np.array(targets), np.stack(zero, axis=1)


def test_the_means_are_those_of_the_definitions(profile: LensProfile) -> None:
    logits, ids, targets, zero = whole_logits()
    final = np.broadcast_to(logits[-1], logits.shape)
    wide = np.broadcast_to(ids, logits.shape[:2])
    scored = targets >= 0
    chosen = np.broadcast_to(targets[scored], (len(logits), scored.sum()))
    expected = {
        "kl_bits": metrics.kl_bits(final, logits),
        "reverse_kl_bits": metrics.reverse_kl_bits(final, logits),
        "entropy_bits": metrics.entropy_bits(logits),
        "nll_bits": metrics.cross_entropy_bits(logits[:, scored], chosen),
        "brier": metrics.brier(logits[:, scored], chosen),
        "reciprocal_rank": 1 / (1 + metrics.rank(logits[:, scored], chosen)),
        "agreement": metrics.agreement(final, logits),
        "top_k_overlap": metrics.top_k_overlap(final, logits, 5),
        "self_copy_mass": metrics.self_copy_mass(logits, wide),
        "copies": logits.argmax(-1) == wide,
        "js_bits": metrics.js_bits(final, logits),
        "total_variation": metrics.total_variation(final, logits),
        "copy_bits": metrics.copy_split_bits(final, logits, wide)[0],
        "rest_bits": metrics.copy_split_bits(final, logits, wide)[1],
        "zero_kl_bits": metrics.kl_bits(np.broadcast_to(zero[-1], zero.shape), zero),
    }
    for name, cells in expected.items():
        # float32 logits of 160 tokens: a few roundings of 2^-24 on numbers of order 10.
        np.testing.assert_allclose(profile.mean(name), cells.mean(axis=1), atol=3e-5, err_msg=name)


def test_the_copy_split_adds_up_to_kl(profile: LensProfile) -> None:
    both = profile.mean("copy_bits") + profile.mean("rest_bits")
    np.testing.assert_allclose(both, profile.mean("kl_bits"), atol=3e-5)


def test_position_0_is_in_no_mean(profile: LensProfile) -> None:
    _, ids, targets, zero = whole_logits()
    assert profile.n_positions == len(ids)
    assert profile.counts["n_targets"].sum() == (targets >= 0).sum()
    assert profile.counts["n_zero"].sum() == zero.shape[1]


def test_medians_and_trimmed_means_are_the_exact_ones_within_a_bin(profile: LensProfile) -> None:
    logits, *_ = whole_logits()
    kl = metrics.kl_bits(np.broadcast_to(logits[-1], logits.shape), logits)[:-1]
    exact = np.quantile(kl, 0.5, axis=1, method="inverted_cdf")
    np.testing.assert_allclose(profile.median_kl_bits[:-1], exact, rtol=0.006)


def test_calibration_knows_what_the_model_gives_the_lens_top_token(profile: LensProfile) -> None:
    logits, *_ = whole_logits()
    q, p = np.exp2(metrics.logprob_bits(logits)), np.exp2(metrics.logprob_bits(logits[-1]))
    top = logits.argmax(-1)
    found = profile.calibration
    weight = found.count / found.count.sum(axis=1, keepdims=True)
    given = np.take_along_axis(p[None], top[..., None], axis=-1)[..., 0].mean(axis=1)
    np.testing.assert_allclose(np.nansum(found.final * weight, axis=1), given, atol=1e-5)
    own = np.nansum(found.confidence * weight, axis=1)
    np.testing.assert_allclose(own, q.max(-1).mean(axis=1), atol=1e-5)
    assert found.gap_to_final[-1] < 1e-6


def test_skill_and_marginal_bias_follow_their_definitions(profile: LensProfile) -> None:
    logits, *_ = whole_logits()
    p = np.exp2(metrics.logprob_bits(logits[-1]))
    bias = [metrics.marginal_bias_bits(logits[-1], layer) for layer in logits]
    np.testing.assert_allclose(profile.marginal_bias_bits, bias, atol=1e-5)
    assert np.all(profile.marginal_bias_bits <= profile.mean("kl_bits") + 1e-6)
    guess = profile.final_sums["baseline_kl_bits"].sum() / profile.n_positions
    own = (p * (np.log2(p) - np.log2(p.mean(axis=0)))).sum(-1).mean()
    # No guess fits the measured documents better than their own mean does.
    assert guess > own
    assert guess < 3 * own
    assert profile.skill[-1] == 1.0
    np.testing.assert_allclose(profile.skill, 1 - profile.mean("kl_bits") / guess)


def test_the_best_temperature_is_the_grid_s(profile: LensProfile) -> None:
    logits, *_ = whole_logits()
    final = logits[-1]
    for layer in range(len(logits)):
        kls = [metrics.kl_bits(final, logits[layer] / tau).mean() for tau in TAUS]
        found = profile.tau_kl_bits[:, layer].sum(axis=0) / profile.counts["n_sampled"].sum()
        np.testing.assert_allclose(found, kls, atol=3e-5)
    assert profile.best_temperature[-1] == 1.0


def test_the_last_layer_is_the_model(profile: LensProfile) -> None:
    assert profile.mean("kl_bits")[-1] == 0.0
    assert profile.mean("agreement")[-1] == 1.0
    assert profile.usefulness_bits[-1] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("cut", [1, 4, 7])
def test_two_parts_merge_to_the_whole_bit_for_bit(profile: LensProfile, cut: int) -> None:
    fit, held_out = id_corpus(12).split()
    options = {"fit_on": fit, "window_tokens": 10, "sample_positions": 4096}
    count = len(held_out)
    first = measure(checkpoint(), held_out, documents=range(cut), **options)
    second = measure(checkpoint(), held_out, documents=range(cut, count), **options)
    assert first != profile
    assert second.merge(first) == profile


def test_parts_of_different_measurements_do_not_merge(profile: LensProfile) -> None:
    fit, held_out = id_corpus(12).split()
    options = {"fit_on": fit, "window_tokens": 10, "sample_positions": 4096}
    part = measure(checkpoint(), held_out, documents=[0], **options)
    with pytest.raises(SelectionError, match=r"\[0\] stand in more than one"):
        part.merge(part)
    for change, named in (
        ({"window_tokens": 12}, "window_tokens"),
        ({"fit_on": None}, "baseline_hash"),
        ({"lens": "input"}, "lens"),
        ({"sample_positions": 0}, "sample_positions"),
    ):
        other = measure(checkpoint(), held_out, documents=[1], **{**options, **change})
        with pytest.raises(ProvenanceError, match=f"differ in {named}"):
            part.merge(other)
    other = measure(checkpoint(tied=True), held_out, documents=[1], **options)
    with pytest.raises(ProvenanceError, match="model_hash"):
        part.merge(other)


def test_a_profile_reads_back_equal(profile: LensProfile, tmp_path: Path) -> None:
    for name in ("p.parquet", "p.PARQUET"):
        assert read_profile(profile.save(tmp_path / name)) == profile
    with pytest.raises(ExportError, match="parquet"):
        profile.save(tmp_path / "p.csv")
    (tmp_path / "bad.parquet").write_bytes(b"nonsense")
    with pytest.raises(ResultFileError, match="cannot be read"):
        read_profile(tmp_path / "bad.parquet")
    profile.to_frame().to_parquet(tmp_path / "other.parquet")
    with pytest.raises(ResultFileError, match="format"):
        read_profile(tmp_path / "other.parquet")


KILLED = """
import os, signal
from lens.measuring.measure import measure
from tests.measuring.small import checkpoint, id_corpus

count = 0
def stop(progress):
    global count
    count += 1
    if count == 19:
        os.kill(os.getpid(), signal.SIGKILL)

fit, held_out = id_corpus(30).split()
measure(checkpoint(), held_out, fit_on=fit, window_tokens=10, folder={folder!r}, progress=stop)
"""


def test_a_killed_run_continues_and_ends_bit_equal(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = subprocess.run(
        [sys.executable, "-c", KILLED.format(folder=str(folder))],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == -signal.SIGKILL
    assert len(list(folder.glob("documents-*.parquet"))) == 2
    fit, held_out = id_corpus(30).split()
    seen: list[Progress] = []
    options = {"fit_on": fit, "window_tokens": 10}
    again = measure(checkpoint(), held_out, folder=folder, progress=seen.append, **options)
    assert len(seen) == len(held_out) - 16
    assert seen[-1].done == seen[-1].total == again.n_positions
    assert seen[-1].resumed > 0
    assert again == measure(checkpoint(), held_out, **options)
    assert list(folder.glob("*.partial")) == []


def test_a_part_of_a_measured_folder_holds_the_documents_asked_for(tmp_path: Path) -> None:
    corpus, options = id_corpus(16), {"window_tokens": 10}
    whole = measure(checkpoint(), corpus, folder=tmp_path, **options)
    for part in ([0, *range(8, 16)], [0], [3, 12], list(range(8))):
        again = measure(checkpoint(), corpus, documents=part, folder=tmp_path, **options)
        assert again.documents.tolist() == part
        assert again == measure(checkpoint(), corpus, documents=part, **options)
    seen: list[Progress] = []
    again = measure(checkpoint(), corpus, folder=tmp_path, progress=seen.append, **options)
    assert again == whole
    assert seen == []


def test_a_folder_of_another_measurement_is_refused(tmp_path: Path) -> None:
    corpus = id_corpus(4)
    measure(checkpoint(), corpus, window_tokens=10, folder=tmp_path)
    for model, texts, change, named in (
        (checkpoint(), id_corpus(4, seed=1), {}, "corpus_hash"),
        (checkpoint(), corpus, {"lens": "input"}, "lens"),
        (checkpoint(tied=True), corpus, {}, "model_hash"),
        (checkpoint(), corpus, {"window_tokens": 12}, "window_tokens"),
    ):
        with pytest.raises(ProvenanceError, match=named):
            measure(model, texts, **{"window_tokens": 10, "folder": tmp_path, **change})


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("measurement.json", b"{"),
        ("measurement.json", b"[1]"),
        ("measurement.json", b"\xff"),
        ("baseline.npz", b"PK junk"),
        ("baseline.npz", b""),
    ],
)
def test_a_damaged_file_of_a_folder_is_named(name: str, damage: bytes, tmp_path: Path) -> None:
    options = {"fit_on": id_corpus(2, seed=1), "window_tokens": 10, "folder": tmp_path}
    measure(checkpoint(), id_corpus(2), documents=[0], **options)
    (tmp_path / name).write_bytes(damage)
    with pytest.raises(ResultFileError, match=name):
        measure(checkpoint(), id_corpus(2), **options)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ExportError, match="name of a folder"):
            measure(checkpoint(), id_corpus(2), window_tokens=10, folder=place)
        with pytest.raises(ExportError, match="name of a folder"):
            TuningFolder(place, {})
    (tmp_path / "tuning.json").write_text("{")
    with pytest.raises(ResultFileError, match=r"tuning\.json"):
        TuningFolder(tmp_path, {})


def test_a_finished_folder_is_read_without_running_the_model(tmp_path: Path) -> None:
    model, corpus = checkpoint(), id_corpus(4)
    first = measure(model, corpus, window_tokens=10, folder=tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the model ran")

    handle = model.model.register_forward_pre_hook(refuse)
    try:
        assert measure(model, corpus, window_tokens=10, folder=tmp_path) == first
    finally:
        handle.remove()


def test_tokens_that_the_unembedding_has_no_row_for_are_no_copies_and_no_sample() -> None:
    """The same windows with one token of no row, against the mean over the other positions."""
    model = padded_lookup()
    ids = np.random.default_rng(0).integers(3, model.d_vocab, (4, 10))
    ids[:, 5] = model.d_vocab
    found = measure(model, read_corpus(ids.tolist()), window_tokens=10, sample_positions=4096)
    states = model.capture(model.inputs_of(ids.tolist()), layers=range(model.n_layers + 1))
    q = torch.stack([model.readout.logits(states[i]) for i in range(model.n_layers + 1)])
    q = torch.softmax(q.double(), -1).detach().numpy()
    rows, columns = np.nonzero(np.broadcast_to((np.arange(10) > 0) & (np.arange(10) != 5), (4, 10)))
    mass = q[:, rows, columns, ids[rows, columns]].mean(axis=1)
    np.testing.assert_allclose(found.mean("self_copy_mass"), mass, atol=1e-5)
    assert found.counts["n"].tolist() == [9] * 4
    assert found.counts["n_known"].tolist() == found.counts["n_sampled"].tolist() == [8] * 4
    assert np.isfinite(found.mean("copy_bits")).all()
    chosen = neighbourhood_copy(model, read_corpus(ids.tolist()), window_tokens=10)
    assert chosen.n_positions == 32
    np.testing.assert_allclose(chosen.itself.estimate, mass, atol=1e-5)
    with pytest.raises(PromptError, match="end at 48"):
        neighbourhood_copy(model, read_corpus([[48] * 10, [49] * 10]), window_tokens=10)


def test_the_input_lens_of_an_untied_model_ends_elsewhere() -> None:
    _, held_out = id_corpus(12).split()
    found = measure(checkpoint(), held_out, lens="input", window_tokens=10)
    logits, *_ = whole_logits("input")
    final, *_ = whole_logits()
    expected = metrics.kl_bits(np.broadcast_to(final[-1], logits.shape), logits).mean(axis=1)
    np.testing.assert_allclose(found.mean("kl_bits"), expected, atol=3e-5)
    assert found.mean("kl_bits")[-1] > 0.1
    assert found.depth_shares()[-1] > 0


def test_on_a_tied_model_both_lenses_measure_the_same() -> None:
    _, held_out = id_corpus(12).split()
    model = checkpoint(tied=True)
    output = measure(model, held_out, window_tokens=10)
    through_input = measure(model, held_out, lens="input", window_tokens=10)
    np.testing.assert_array_equal(output.mean("kl_bits"), through_input.mean("kl_bits"))


@pytest.mark.parametrize("name", ["gemma2", "cohere", "gptj", "bert"])
def test_scales_caps_and_biases_are_in_the_numbers(name: str) -> None:
    """The second pass reads whole logits, the first streams them; both give one KL."""
    found = measure(checkpoint(name), id_corpus(4), window_tokens=10, sample_positions=4096)
    split = found.mean("copy_bits") + found.mean("rest_bits")
    np.testing.assert_allclose(split, found.mean("kl_bits"), atol=1e-4)
    assert found.calibration.gap_to_final[-1] < 1e-6


def test_a_replayed_readout_measures_the_same_as_a_direct_one() -> None:
    direct, replayed = checkpoint(), checkpoint()
    replayed.readout = replayed.replay
    corpus = id_corpus(3)
    options = {"window_tokens": 10, "sample_positions": 50}
    a, b = (measure(m, corpus, **options) for m in (direct, replayed))
    for name in ("kl_bits", "nll_bits", "js_bits", "self_copy_mass"):
        np.testing.assert_allclose(a.mean(name), b.mean(name), atol=3e-5)
    with pytest.raises(UnsupportedArchitectureError):
        measure(replayed, corpus, lens="input", window_tokens=10)


def test_measuring_leaves_the_model_as_it_was() -> None:
    model = checkpoint()
    ids = torch.arange(3, 13)[None]
    with torch.no_grad():
        before = model.model(ids).logits
        measure(model, id_corpus(2), window_tokens=10)
        assert torch.equal(model.model(ids).logits, before)
    assert sum(len(m._forward_hooks) for m in model.model.modules()) == 0


def test_what_is_not_there_is_named(profile: LensProfile) -> None:
    with pytest.raises(SelectionError, match="kl_bits"):
        profile.mean("klbits")
    with pytest.raises(SelectionError, match=r"0\.5 bit"):
        profile.depth_shares("2 bit")
    with pytest.raises(SelectionError, match="0 to 8"):
        measure(checkpoint(), id_corpus(9), documents=[9], window_tokens=10)
    with pytest.raises(SelectionError, match="0 to 4096"):
        measure(checkpoint(), id_corpus(9), sample_positions=5000, window_tokens=10)


def test_a_document_that_is_fitted_on_is_not_measured() -> None:
    model, corpus = checkpoint(), id_corpus(6)
    with pytest.raises(SelectionError, match="6 of the 6 documents"):
        measure(model, corpus, fit_on=corpus, window_tokens=10)
    part = {"fit_on": corpus.take(1), "window_tokens": 10}
    with pytest.raises(SelectionError, match=r"1 of the 2 .* the first of them '0'"):
        measure(model, corpus, documents=[0, 1], **part)
    assert measure(model, corpus, documents=[1, 2], **part).skill[-1] == 1


def test_a_cell_that_is_no_number_makes_its_layer_no_number(profile: LensProfile) -> None:
    whole = profile.calibration
    assert np.isfinite([profile.median_kl_bits, profile.trimmed_kl_bits, whole.ece]).all()
    kl_bins = profile.kl_bins.copy()
    kl_bins[np.nonzero(kl_bins[:, 1].sum(axis=-1))[0][0], 1] = 0
    confidence = {name: fine.copy() for name, fine in profile.confidence.items()}
    for fine in confidence.values():
        fine[0, 2] = 0
    lost = dataclasses.replace(profile, kl_bins=kl_bins, confidence=confidence)
    for found in (lost.median_kl_bits, lost.trimmed_kl_bits, lost.kl_quantile(0.9)):
        assert np.isnan(found).tolist() == [False, True, False, False]
    for name in ("ece", "gap_to_final"):
        found = getattr(lost.calibration, name)
        assert np.isnan(found).tolist() == [False, False, True, False]
        assert np.array_equal(found[[0, 1, 3]], getattr(whole, name)[[0, 1, 3]])
    gap = confidence_gap(lost)
    assert np.isnan(gap.band_low).tolist() == [False, False, True, False]
    assert states_of(gap, 1.0, "lower")[2] == "absent"


class Unreadable:
    """A translator that makes a position of layer 1 NaN each time it is asked."""

    name, hash, spoilt = "tuned", "unreadable", 0

    def check(self, _: object) -> None:
        return None

    def translate(self, layer: int, states: torch.Tensor) -> torch.Tensor:
        spoilt = states.clone()
        if layer == 1:
            spoilt[3] = torch.nan
            self.spoilt += 1
        return spoilt


def test_a_state_that_cannot_be_read_is_in_no_bin_and_told() -> None:
    lens = Unreadable()
    found = measure(checkpoint(), id_corpus(2), lens=lens, window_tokens=10)
    read = [found.kl_bins.sum(axis=(0, 2)), found.confidence["count"].sum(axis=(0, 2))]
    for counts in read:
        assert counts[[0, 2, 3]].tolist() == [found.n_positions] * 3
        assert counts[1] == found.n_positions - lens.spoilt < found.n_positions
    assert np.isnan(found.calibration.gap_to_final).tolist() == [False, True, False, False]
    assert np.isnan(found.median_kl_bits).tolist() == [False, True, False, False]


def test_without_a_guess_there_is_no_skill() -> None:
    found = measure(checkpoint(), id_corpus(3), window_tokens=10)
    assert np.isnan(found.skill).all()
    assert "no skill" in repr(found)
    assert merged([found]) == found


def test_the_table_has_a_row_for_each_layer_with_units(profile: LensProfile) -> None:
    table = profile.to_frame()
    assert table["layer"].tolist() == [0, 1, 2, 3]
    assert table["mean_kl_bits"].tolist() == profile.mean("kl_bits").tolist()
    assert (table["kl_bits_low_95"] <= table["mean_kl_bits"]).all()
    area = profile.skill_area_interval()
    assert area.low[0] <= profile.skill_area <= area.high[0]
    assert area.estimate[0] == profile.skill_area
