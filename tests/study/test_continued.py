import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lens.checkpoint.checkpoint import Checkpoint
from lens.checkpoint.load import load
from lens.corpus import Corpus, Document
from lens.errors import (
    CorpusError,
    CorruptCheckpointError,
    ProvenanceError,
    ResultFileError,
    SelectionError,
    TrainingDivergedError,
    UnsupportedArchitectureError,
    UnsupportedModelStateError,
)
from lens.measuring.passes import place_in_pass
from lens.study.continuation import Continuation, arms_of
from lens.study.continued import continue_twins, paired, read_continued, summary
from lens.study.continuing import MODEL, ArmRun, ContinuedTexts, arm_is_finished, point_file
from lens.study.run import STATE
from tests.checkpoint.tiny import BY_NAME, D_VOCAB

SETTINGS = Continuation(
    steps=4,
    measure_at=(2,),
    trunk_rate=3e-3,
    embedding_rate=3e-3,
    warmup_steps=1,
    window_tokens=12,
    batch_windows=3,
    documents=3,
    fit_documents=5,
)
ENDS = replace(SETTINGS, measure_at=(4,))


def corpus(seed: int = 0) -> Corpus:
    """Token ids in which each one is often followed by its own successor."""
    generator = np.random.default_rng(seed)
    documents = []
    for number in range(16):
        jumps = generator.integers(0, D_VOCAB, 40)
        ids = [int(jumps[0])]
        for jump in jumps[1:]:
            ids.append((ids[-1] + 1) % D_VOCAB if generator.random() < 0.7 else int(jump))
        documents.append(Document(id=str(number), source="ids", ids=tuple(ids)))
    return Corpus(name="ids", documents=tuple(documents))


def tiny(*, tied: bool) -> Checkpoint:
    return load(BY_NAME["gpt2"].build(tied=tied))


@pytest.fixture(scope="module")
def of_tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model continued by the plain arms."""
    place = tmp_path_factory.mktemp("continued")
    continue_twins(tiny(tied=True), corpus(), place, settings=SETTINGS)
    return place


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The controls: two matrices, whose gradients are mixed."""
    place, names = tmp_path_factory.mktemp("mixed"), ("mixed-1-1", "mixed-1-0", "mixed-0-1")
    continue_twins(tiny(tied=True), corpus(), place, settings=ENDS, arms=names)
    return place


@pytest.fixture(scope="module")
def of_untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("continued")
    continue_twins(tiny(tied=False), corpus(), place, settings=ENDS)
    return place


def row(place: Path) -> dict[str, Any]:
    return read_continued(place / "continued.json")


def weights(place: Path, arm: str) -> dict[str, Tensor]:
    return load_file(place / arm / MODEL / "model.safetensors")


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[key], b[key]) for key in a.keys() & b.keys())


def test_before_the_first_step_both_arms_are_one_function(of_tied: Path) -> None:
    tied, untied = (row(of_tied)["arms"][arm]["points"][0] for arm in ("tied", "untied"))
    of_matrices = {"likeness", "moved"}
    assert {k: v for k, v in tied.items() if k not in of_matrices} == {
        k: v for k, v in untied.items() if k not in of_matrices
    }
    assert untied["moved"] == {"E": 0.0, "U": 0.0}
    assert untied["likeness"]["E, U"]["row_cosine"] == 1.0
    losses = [row(of_tied)["arms"][arm]["training_bits"][0] for arm in ("tied", "untied")]
    assert losses[0] == losses[1]


def test_after_steps_the_untied_matrices_part_and_the_tied_one_is_one(of_tied: Path) -> None:
    points = row(of_tied)["arms"]["untied"]["points"]
    assert [p["at"] for p in points] == [0, 2, 4]
    cosines = [p["likeness"]["E, U"]["row_cosine"] for p in points]
    assert cosines[0] > cosines[1] > cosines[2]
    assert 0 < points[1]["moved"]["E"] < points[2]["moved"]["E"]
    tied = row(of_tied)["arms"]["tied"]["points"]
    assert [p["likeness"] for p in tied] == [{}, {}, {}]
    assert [list(p["moved"]) for p in tied] == [["W"]] * 3
    assert load(of_tied / "tied" / MODEL).tie.is_tied
    two = load(of_tied / "untied" / MODEL)
    assert not two.tie.is_tied
    assert not torch.equal(two.W_E, two.W_U)
    begun = tiny(tied=True).W_E.detach()
    moved = float((two.W_E.detach() - begun).norm() / begun.norm())
    assert points[2]["moved"]["E"] == pytest.approx(moved, rel=1e-5)


def test_two_matrices_with_both_gradients_each_are_the_tied_run(of_tied: Path, mixed: Path) -> None:
    assert same(weights(of_tied, "tied"), weights(mixed, "mixed-1-1"))
    two = load(mixed / "mixed-1-1" / MODEL)
    assert torch.equal(two.W_E, two.W_U)


@pytest.mark.parametrize("arm", ["untied", "mixed-1-0", "mixed-0-1"])
def test_a_gradient_that_is_held_back_is_seen(of_tied: Path, mixed: Path, arm: str) -> None:
    place = of_tied if arm == "untied" else mixed
    assert not same(weights(of_tied, "tied"), weights(place, arm))


def test_the_parts_of_a_point_add_up_and_are_those_of_its_documents(of_tied: Path) -> None:
    for point in row(of_tied)["arms"]["untied"]["points"]:
        assert point["kl"][-1] == point["reading_loss"][-1] == point["not_there_yet"][-1] == 0.0
        parts = np.add(point["reading_loss"], point["not_there_yet"])
        assert parts == pytest.approx(np.array(point["kl"]), rel=1e-4)
        held = point["by_document"]
        assert len(held["loss"]) == SETTINGS.documents
        mean = np.sum(held["loss"]) / np.sum(held["targets"])
        assert mean == pytest.approx(point["held_out_bits"], rel=1e-4)
        inner = np.sum(held["reading_loss"]) / np.sum(held["positions"])
        assert inner == pytest.approx(np.mean(point["reading_loss"][1:-1]), rel=1e-3)


def test_a_difference_is_signed_and_none_at_the_start(of_tied: Path) -> None:
    found = row(of_tied)
    points = [found["arms"][arm]["points"][-1] for arm in ("untied", "tied")]
    loss = paired(found, "untied", "tied", "held-out loss", at=4)
    apart = points[0]["held_out_bits"] - points[1]["held_out_bits"]
    assert loss.estimate[0] == pytest.approx(apart, abs=2e-4)
    assert loss.low[0] <= loss.estimate[0] <= loss.high[0]
    turned = paired(found, "tied", "untied", "held-out loss", at=4)
    assert turned.estimate[0] == pytest.approx(-loss.estimate[0])
    assert paired(found, "untied", "tied", "reading loss G", at=0).estimate[0] == 0.0
    with pytest.raises(SelectionError, match="3 steps"):
        paired(found, "untied", "tied", "held-out loss", at=3)
    with pytest.raises(SelectionError, match="no 'KL'"):
        paired(found, "untied", "tied", "KL", at=4)
    with pytest.raises(SelectionError, match="tied-mean"):
        paired(found, "tied-mean", "tied", "held-out loss", at=4)


def test_an_untied_model_is_tied_with_the_values_that_each_arm_names(of_untied: Path) -> None:
    source, found = tiny(tied=False), row(of_untied)
    assert list(found["arms"]) == ["untied", "tied-output", "tied-mean", "tied-input"]
    begun = {arm: held["points"][0]["likeness"] for arm, held in found["arms"].items()}
    assert begun["tied-output"]["W, loaded U"]["row_cosine"] == 1.0
    assert begun["tied-input"]["W, loaded E"]["row_cosine"] == 1.0
    mean = (source.W_E + source.W_U) / 2
    expected = torch.nn.functional.cosine_similarity(mean.double(), source.W_E.double()).mean()
    assert begun["tied-mean"]["W, loaded E"]["row_cosine"] == pytest.approx(expected.item())
    assert begun["untied"]["E, U"]["row_cosine"] < 0.9
    assert load(of_untied / "tied-mean" / MODEL).tie.is_tied
    losses = {arm: held["points"][0]["held_out_bits"] for arm, held in found["arms"].items()}
    assert len(set(losses.values())) == 4


def run_of(source: Checkpoint, place: Path) -> ArmRun:
    _, arm = arms_of(tied=True)
    return ArmRun(arm, source, ContinuedTexts.of(source, corpus(), SETTINGS), SETTINGS, place)


def test_a_run_that_was_stopped_ends_with_the_same_bits(of_tied: Path, tmp_path: Path) -> None:
    source, place = tiny(tied=True), tmp_path / "untied"
    for _ in range(2):
        run_of(source, place).run(stop_after=1)
    assert not arm_is_finished(place, SETTINGS)
    point_file(place, 2).unlink()
    run_of(source, place).run()
    assert arm_is_finished(place, SETTINGS)
    assert same(weights(tmp_path, "untied"), weights(of_tied, "untied"))
    for at in SETTINGS.points:
        assert point_file(place, at).read_text() == point_file(of_tied / "untied", at).read_text()
    log = [json.loads((p / "log.json").read_text()) for p in (place, of_tied / "untied")]
    assert log[0] == log[1]


def test_a_finished_run_is_not_run_again(of_tied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("run again")

    monkeypatch.setattr("lens.study.continued.ArmRun", refuse)
    before = row(of_tied)
    continue_twins(tiny(tied=True), corpus(), of_tied, settings=SETTINGS)
    assert row(of_tied) == before
    other = replace(SETTINGS, seed=1)
    with pytest.raises(AssertionError, match="again"):
        continue_twins(tiny(tied=True), corpus(), of_tied / "other", settings=other)


def test_a_folder_with_another_run_is_refused(of_tied: Path) -> None:
    def again(model: Checkpoint, texts: Corpus, settings: Continuation) -> None:
        continue_twins(model, texts, of_tied, settings=settings)

    with pytest.raises(ProvenanceError, match="settings"):
        again(tiny(tied=True), corpus(), replace(SETTINGS, trunk_rate=1e-3))
    with pytest.raises(ProvenanceError, match="texts"):
        again(tiny(tied=True), corpus(seed=1), SETTINGS)
    other = tiny(tied=True)
    with torch.no_grad():
        other.model.transformer.h[1].mlp.c_fc.weight[0, 0] += 1
    with pytest.raises(ProvenanceError, match="weights"):
        again(other, corpus(), SETTINGS)


def test_a_broken_state_is_told(tmp_path: Path) -> None:
    source = tiny(tied=True)
    run_of(source, tmp_path / "untied").run(stop_after=1)
    (tmp_path / "untied" / STATE).write_bytes(b"half")
    with pytest.raises(CorruptCheckpointError, match=r"state\.pt"):
        run_of(source, tmp_path / "untied").run()


def test_the_model_that_was_loaded_stays_as_it_was(tmp_path: Path) -> None:
    source = tiny(tied=True)
    source.model.requires_grad_(False)
    source.model.train()
    before = {name: p.clone() for name, p in source.model.state_dict().items()}
    run_of(source, tmp_path / "untied").run(stop_after=2)
    assert same(before, source.model.state_dict())
    assert source.model.training
    assert not any(p.requires_grad for p in source.model.parameters())
    assert source.tie.is_tied
    assert not any(m._forward_hooks for m in source.model.modules())


def test_every_arm_sees_the_same_windows_each_once_in_a_pass() -> None:
    texts = ContinuedTexts.of(tiny(tied=True), corpus(), SETTINGS)
    count = len(texts.windows)
    for first in (0, count, 5 * count):
        places = [place_in_pass(n, count, 0) for n in range(first, first + count)]
        assert sorted(places) == list(range(count))
    orders = [[place_in_pass(n, count, seed) for n in range(count)] for seed in (0, 1)]
    assert orders[0] != orders[1]
    assert texts.batch(0, SETTINGS) != texts.batch(1, SETTINGS)


def test_a_matrix_whose_rate_is_0_stays(tmp_path: Path) -> None:
    still = replace(ENDS, embedding_rate=0.0)
    path = continue_twins(tiny(tied=True), corpus(), tmp_path, settings=still, arms=("untied",))
    first, last = read_continued(path)["arms"]["untied"]["points"]
    assert last["moved"] == {"E": 0.0, "U": 0.0}
    assert last["held_out_bits"] != first["held_out_bits"]


def test_the_points_are_spread_by_their_logarithm() -> None:
    assert Continuation(steps=300).points == (0, 1, 3, 10, 30, 100, 300)
    assert Continuation(steps=7).points == (0, 1, 3, 7)
    assert Continuation(steps=7, measure_at=(5,)).points == (0, 5, 7)
    assert [Continuation(warmup_steps=2).rate_factor(s) for s in range(3)] == [0.5, 1.0, 1.0]


def bad_settings() -> Iterator[tuple[dict[str, Any], str]]:
    yield {"measure_at": (301,)}, r"\[301\]"
    yield {"steps": 0}, "at least 1"
    yield {"documents": 0}, "at least 1"
    yield {"trunk_rate": -1.0}, "rates"
    yield {"embedding_rate": float("nan")}, "rates"


@pytest.mark.parametrize(("options", "said"), bad_settings())
def test_settings_that_cannot_be_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SelectionError, match=said):
        Continuation(**options)


def test_an_arm_that_is_not_there_is_refused() -> None:
    with pytest.raises(SelectionError, match="tied-mean"):
        arms_of(tied=False, names=("mean",))
    with pytest.raises(SelectionError, match="mixed-1-1"):
        arms_of(tied=True, names=("tied-mean",))


def test_what_cannot_be_continued_is_told(tmp_path: Path) -> None:
    few = Corpus(name="few", documents=corpus().documents[:3])
    with pytest.raises(CorpusError, match="least"):
        continue_twins(tiny(tied=True), few, tmp_path)
    many = replace(SETTINGS, batch_windows=1000)
    with pytest.raises(CorpusError, match="windows"):
        continue_twins(tiny(tied=True), corpus(), tmp_path, settings=many)
    half = load(BY_NAME["gpt2"].build(tied=True).bfloat16())
    with pytest.raises(UnsupportedModelStateError, match="float32"):
        continue_twins(half, corpus(), tmp_path)
    with pytest.raises(UnsupportedArchitectureError, match="next token"):
        continue_twins(load(BY_NAME["bert"].build()), corpus(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_model_without_a_direct_readout_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny(tied=True)
    monkeypatch.setattr(source, "readout", source.replay)
    with pytest.raises(UnsupportedArchitectureError, match="direct readout"):
        continue_twins(source, corpus(), tmp_path)


def test_a_loss_that_diverges_ends_the_run(tmp_path: Path) -> None:
    fast = replace(SETTINGS, trunk_rate=1e30, embedding_rate=1e30)
    with pytest.raises(TrainingDivergedError, match="lower rates"):
        continue_twins(tiny(tied=True), corpus(), tmp_path, settings=fast)


def test_another_file_is_no_result(of_tied: Path, tmp_path: Path) -> None:
    path = tmp_path / "continued.json"
    with pytest.raises(ResultFileError, match="JSON"):
        read_continued(path)
    path.write_text(json.dumps(row(of_tied) | {"format": "other"}))
    with pytest.raises(ResultFileError, match="other"):
        read_continued(path)


def test_the_table_has_a_line_for_each_point(of_tied: Path) -> None:
    heading, *lines = summary(row(of_tied))
    assert len(lines) == 2 * 3
    assert {len(line) for line in lines} == {len(heading)}
    assert lines[0][:2] == ("tied", "0")
    assert lines[0][5] == "one matrix"
