import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lens.checkpoint.load import load
from lens.errors import (
    CorruptCheckpointError,
    ExportError,
    LensError,
    ProvenanceError,
    SelectionError,
    TrainingDivergedError,
)
from lens.study.arms import Arm, arm_of
from lens.study.recipe import Recipe
from lens.study.run import LOG, RUN, STATE, branch_folder, is_finished, train
from tests.study.small import RECIPE, texts


def trained(arm: str | Arm, folder: Path, *, seed: int = 0, recipe: Recipe = RECIPE) -> Path:
    return train(arm_of(arm) if isinstance(arm, str) else arm, seed, texts(), recipe, folder)


def weights(folder: Path, at: int = 8) -> dict[str, Tensor]:
    return load_file(branch_folder(folder, at) / "model.safetensors")


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[key], b[key]) for key in a.keys() & b.keys())


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained("tied", tmp_path_factory.mktemp("runs") / "tied")


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained("untied-copy", tmp_path_factory.mktemp("runs") / "copy")


E_NAME, U_NAME = "transformer.wte.weight", "lm_head.weight"


@pytest.mark.parametrize("at", [4, 8])
def test_two_matrices_with_both_gradients_each_are_the_tied_run(
    tied: Path, tmp_path: Path, at: int
) -> None:
    mixed = weights(trained("mixed-1-1", tmp_path / "mixed"), at)
    one = weights(tied, at)
    assert same(one, mixed)
    assert torch.equal(mixed[E_NAME], mixed[U_NAME])
    assert torch.equal(one[E_NAME], mixed[U_NAME])


@pytest.mark.parametrize("name", ["mixed-0.75-0.75", "mixed-1-0", "mixed-0-1"])
def test_a_gradient_that_is_held_back_is_seen(tied: Path, tmp_path: Path, name: str) -> None:
    assert not same(weights(tied), weights(trained(name, tmp_path / "mixed")))


def test_no_mixing_is_plain_untied_training(copied: Path, tmp_path: Path) -> None:
    assert same(weights(copied), weights(trained("mixed-0-0", tmp_path / "mixed")))


@pytest.mark.parametrize("after", [1, 5, 9])
def test_a_run_that_was_stopped_ends_with_the_same_bits(
    copied: Path, tmp_path: Path, after: int
) -> None:
    place = tmp_path / "stopped"
    arm = arm_of("untied-copy")
    train(arm, 0, texts(), RECIPE, place, stop_after=after)
    assert not is_finished(place)
    while not is_finished(place):
        train(arm, 0, texts(), RECIPE, place, stop_after=after)
    for at in RECIPE.branch_at:
        assert same(weights(copied, at), weights(place, at))
    assert json.loads((place / LOG).read_text()) == json.loads((copied / LOG).read_text())


def test_a_finished_run_is_not_run_again(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = weights(copied)

    def refuse(*_: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr("lens.study.run.cross_entropy", refuse)
    assert same(weights(trained("untied-copy", copied)), before)
    with pytest.raises(ProvenanceError, match="recipe"):
        trained("untied-copy", copied, recipe=replace(RECIPE, warmup_steps=1))


def test_seeds_differ(copied: Path, tmp_path: Path) -> None:
    other = weights(trained("untied-copy", tmp_path / "other", seed=1))
    assert not torch.equal(other[E_NAME], weights(copied)[E_NAME])


def test_a_branch_leaves_the_trunk_as_it_was(copied: Path, tmp_path: Path) -> None:
    without = replace(RECIPE, branch_at=(8,))
    assert same(weights(copied), weights(trained("untied-copy", tmp_path / "r", recipe=without)))


def test_rows_that_never_occur_stay_in_an_untied_embedding_and_shrink_where_it_decays(
    copied: Path, tmp_path: Path
) -> None:
    never = torch.ones(RECIPE.d_vocab, dtype=torch.bool)
    never[torch.from_numpy(texts().stream)] = False
    assert never.any()
    begun = weights(trained("untied-copy", tmp_path / "b", recipe=replace(RECIPE, trunk_rate=0.0,
        embedding_rate=0.0)))  # fmt: skip
    assert torch.equal(weights(copied)[E_NAME][never], begun[E_NAME][never])
    assert not torch.equal(weights(copied)[E_NAME][~never], begun[E_NAME][~never])
    decayed = weights(trained("decayed-untied-copy", tmp_path / "d"))
    assert decayed[E_NAME][never].norm() < begun[E_NAME][never].norm()


def test_an_interrupted_tied_run_is_the_control_of_a_change(tied: Path, tmp_path: Path) -> None:
    assert same(weights(tied), weights(trained("tied-resumed", tmp_path / "r")))


def test_untied_at_half_is_tied_until_then_and_two_matrices_after(
    tied: Path, tmp_path: Path
) -> None:
    place = trained("tied-then-untied", tmp_path / "r")
    # The change comes at step 4, after the first branching point.
    assert same(weights(tied, 4), weights(place, 4))
    assert load(branch_folder(place, 4)).tie.is_tied
    late = weights(place)
    assert not torch.equal(late[E_NAME], late[U_NAME])
    assert not load(branch_folder(place, 8)).tie.is_tied


def test_tied_at_half_begins_from_the_mean_of_both(copied: Path, tmp_path: Path) -> None:
    still = replace(RECIPE, branch_at=(4, 8), trunk_rate=0.0, embedding_rate=0.0)
    own = replace(arm_of("untied-own"), name="own-then-tied", change="tie")
    place = trained(own, tmp_path / "r", recipe=still)
    early, late = weights(place, 4), weights(place, 8)
    assert torch.equal(late[E_NAME], (early[E_NAME] + early[U_NAME]) / 2)
    assert load(branch_folder(place, 8)).tie.is_tied
    moving = trained("untied-then-tied", tmp_path / "m")
    assert same(weights(copied, 4), weights(moving, 4))
    assert load(branch_folder(moving, 8)).tie.is_tied


def test_the_rates_warm_up_stay_and_fall_to_nearly_nothing() -> None:
    trunk, branch = RECIPE.segments[2], RECIPE.segments[3]
    assert [RECIPE.rate_factor(RECIPE.segments[0], s) for s in range(4)] == [0.5, 1.0, 1.0, 1.0]
    assert {RECIPE.rate_factor(trunk, s) for s in range(4, 8)} == {1.0}
    assert [RECIPE.rate_factor(branch, s) for s in range(8, 11)] == [0.75, 0.5, 0.25]


def test_the_log_holds_every_step_and_the_updates_by_frequency(copied: Path) -> None:
    log = json.loads((copied / LOG).read_text())
    assert [(name, step) for name, step, _ in log["loss_nats"]] == [
        (s.name, step) for s in RECIPE.segments for step in range(s.first, s.last)
    ]
    name, step, of_E, of_U = log["updates"][0]
    assert (name, step, len(of_E), len(of_U)) == ("trunk-00004", 0, 10, 10)
    assert all(u > 0 for u in of_U)


def test_a_folder_with_another_run_is_refused(copied: Path) -> None:
    with pytest.raises(ProvenanceError, match="seed"):
        trained("untied-copy", copied, seed=3)
    with pytest.raises(ProvenanceError, match="arm"):
        trained("tied", copied)


def test_a_broken_state_is_told(tmp_path: Path) -> None:
    train(arm_of("tied"), 0, texts(), RECIPE, tmp_path / "r", stop_after=2)
    (tmp_path / "r" / STATE).write_bytes(b"half")
    with pytest.raises(CorruptCheckpointError, match=r"state\.pt"):
        trained("tied", tmp_path / "r")
    # Removed, as the error says, the run begins again and is not taken for a finished one.
    (tmp_path / "r" / STATE).unlink()
    assert not is_finished(tmp_path / "r")
    trained("tied", tmp_path / "r")
    assert is_finished(tmp_path / "r")
    assert branch_folder(tmp_path / "r", RECIPE.branch_at[-1]).is_dir()


def test_a_runs_file_that_is_none_is_told(tmp_path: Path) -> None:
    for raw in ("null", "[]", "half"):
        (tmp_path / RUN).write_text(raw, encoding="utf-8")
        with pytest.raises(CorruptCheckpointError, match=r"run\.json"):
            trained("tied", tmp_path)


def test_a_file_is_no_folder_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ExportError, match="cannot be made"):
            trained("tied", place)


def test_wrong_recipes_are_refused() -> None:
    with pytest.raises(SelectionError, match="branch_at"):
        replace(RECIPE, branch_at=(8, 4))
    with pytest.raises(SelectionError, match="heads"):
        replace(RECIPE, n_heads=5)


def test_a_run_that_diverges_says_at_which_step_and_what_to_do(tmp_path: Path) -> None:
    wild = replace(RECIPE, trunk_rate=1e30, embedding_rate=1e30)
    with pytest.raises(TrainingDivergedError) as found:
        trained("tied", tmp_path / "wild", recipe=wild)
    assert isinstance(found.value, LensError)
    assert isinstance(found.value, ArithmeticError)
    told = str(found.value)
    assert told.startswith("tied, seed 0: the loss is nan at step ")
    step = int(told.split("at step ")[1].split()[0])
    assert 0 < step < 4
    assert "(trunk-00004), and was " in told
    assert "bits a token the step before" in told
    assert "The rates are 1e+30 for the trunk and 1e+30 for the embedding matrices" in told
    assert "lower ones" in told
    # The twin: at rates of the recipe the run ends.
    assert is_finished(trained("tied", tmp_path / "calm"))
    assert not is_finished(tmp_path / "wild")
