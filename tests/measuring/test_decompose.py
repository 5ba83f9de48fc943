"""A gap that is known is told apart, and freeing a term never costs on its own rows."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lens.checkpoint.checkpoint import Checkpoint
from lens.checkpoint.readout import DirectReadout, Step, Unembedding
from lens.corpus import read_corpus
from lens.errors import (
    ExportError,
    ResultFileError,
    SelectionError,
    UnsupportedArchitectureError,
)
from lens.lenses.differentiable import in_float32
from lens.measuring import metrics
from lens.measuring.correction import ORDERS, Correction, steps_of
from lens.measuring.decompose import decompose
from lens.measuring.decomposition import Decomposition, read_decomposition
from lens.measuring.gap_fit import GapProblem, LastStates
from lens.measuring.reduced_vocabulary import HEAD, REST, ReducedVocabulary
from lens.measuring.sampled_states import sampled_states
from tests.checkpoint.tiny import D_MODEL, D_VOCAB
from tests.measuring.small import checkpoint, id_corpus

SMALL = {"fit_positions": 120, "positions": 100, "window_tokens": 10, "max_steps": 10}


@pytest.fixture(scope="module")
def model() -> Checkpoint:
    return checkpoint()


def unembedding_of(model: Checkpoint, *steps: Step) -> Unembedding:
    assert isinstance(model.readout, DirectReadout)
    plain = in_float32(model.readout.unembedding)
    return replace(plain, steps=(*plain.steps, *steps))


def problem(
    model: Checkpoint,
    *,
    moved: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    steps: tuple[Step, ...] = (),
    bias_sd: float = 3.0,
) -> GapProblem:
    """States h with A h + c = the last state, A the inverse of `moved`; p after `steps`."""
    generator = torch.Generator().manual_seed(3)
    # Uneven directions, as in a residual stream.
    width = torch.linspace(0.3, 3.0, D_MODEL)
    final = torch.randn(400, D_MODEL, generator=generator) * width + 0.5
    states = final if moved is None else final @ moved.T
    states = states if shift is None else states - shift
    unembedding = unembedding_of(model, *steps)
    fit, check = (
        (states[rows], LastStates(model, unembedding, final[rows]))
        for rows in (slice(0, 300), slice(300, 400))
    )
    return GapProblem(model, unembedding_of(model), *fit, *check, bias_sd=bias_sd)


def ladder(task: GapProblem, order: str) -> tuple[dict[str, float], dict[str, float]]:
    """Drop by term, and what remains after it, on the rows kept back, as shares of the gap."""
    found = task.none()
    before = first = task.check_kl_bits(found)
    drops, left = {}, {}
    for term, free in steps_of(ORDERS[order]):
        found = task.fitted(found, free, freed=term, max_steps=60)
        now = task.check_kl_bits(found)
        drops[term], left[term], before = (before - now) / first, now / first, now
    return drops, left


def rotation(strength: float = 0.05) -> torch.Tensor:
    random = torch.randn(D_MODEL, D_MODEL, generator=torch.Generator().manual_seed(7))
    return torch.linalg.matrix_exp(strength * (random - random.T))


def test_a_known_temperature_is_found(model: Checkpoint) -> None:
    task = problem(model, steps=(Step("mul", 2.0),))
    found = task.fitted(task.none(), frozenset({"temperature"}), freed="temperature", max_steps=40)
    assert found.temperature == pytest.approx(0.5, rel=1e-2)
    drops, left = ladder(task, "readout first")
    assert drops["temperature"] > 0.99
    assert left["temperature"] < 0.01


def test_a_known_bias_is_found(model: Checkpoint) -> None:
    bias = torch.randn(D_VOCAB, generator=torch.Generator().manual_seed(4))
    task = problem(model, steps=(Step("add", bias),), bias_sd=float("inf"))
    drops, left = ladder(task, "readout first")
    assert drops["frequency"] > 0.8
    assert left["frequency"] < 0.03
    alone = task.fitted(task.none(), frozenset({"frequency"}), freed="frequency", max_steps=80)
    found = alone.bias - alone.bias.mean()
    assert float((found - (bias - bias.mean())).abs().mean()) < 0.15


def test_a_known_shift_is_found(model: Checkpoint) -> None:
    shift = 3 * torch.randn(D_MODEL, generator=torch.Generator().manual_seed(5))
    _, left = ladder(problem(model, shift=shift), "readout first")
    assert left["shift"] < 0.02
    # A shift moves every token's logit alike in each state, up to the norm: a bias does most of
    # it, and the rest is the shift's own.
    assert left["shift"] < 0.3 * left["frequency"]


@pytest.mark.slow
def test_a_known_scale_is_found(model: Checkpoint) -> None:
    scale = torch.rand(D_MODEL, generator=torch.Generator().manual_seed(6)) * 3 + 0.3
    drops, left = ladder(problem(model, moved=scale.diag()), "map first")
    assert drops["scale"] > 0.97
    assert left["scale"] < 0.03
    _, other = ladder(problem(model, moved=scale.diag()), "readout first")
    assert other["shift"] > 0.3  # no temperature, bias or shift stands for a scale


def test_a_known_rotation_is_found(model: Checkpoint) -> None:
    task = problem(model, moved=rotation())
    drops, left = ladder(task, "map first")
    assert max(drops, key=lambda term: drops[term]) == "rotation"
    assert left["rotation"] < 0.02
    assert left["scale"] > 0.3  # a diagonal map is no rotation
    _, other = ladder(task, "readout first")
    assert other["scale"] > 0.2
    assert other["rotation"] < 0.05


@pytest.mark.slow
def test_a_known_linear_map_is_found(model: Checkpoint) -> None:
    random = torch.randn(D_MODEL, D_MODEL, generator=torch.Generator().manual_seed(8))
    map_ = torch.eye(D_MODEL) + 0.1 * random
    _, left = ladder(problem(model, moved=map_), "map first")
    assert left["rotation"] > 0.03
    assert left["other linear"] < 0.3 * left["rotation"]


def test_a_fitted_bias_gains_at_least_the_marginal_bias(model: Checkpoint) -> None:
    bias = torch.randn(D_VOCAB, generator=torch.Generator().manual_seed(4))
    for bias_sd, holds in ((float("inf"), True), (0.01, False)):
        task = problem(model, moved=rotation(), steps=(Step("add", bias),), bias_sd=bias_sd)
        task.check_states, task._near_check = task.states, task._near_final  # no early stop
        plain = task.none()
        found = task.fitted(plain, frozenset({"frequency"}), freed="frequency", max_steps=20)
        gain = task.fit_kl_bits(plain) - task.fit_kl_bits(found)
        p, q = (
            torch.log_softmax(u.logits(model.readout.prepare(s)).double(), -1).exp().mean(0).log()  # type: ignore[attr-defined]
            for u, s in (
                (task.last.final.unembedding, task.last.states),
                (task.unembedding, task.states),
            )
        )
        least = float(metrics.kl_bits(p.detach().numpy(), q.detach().numpy()))
        assert least > 0.05
        assert (gain >= least) == holds


@pytest.fixture(scope="module")
def found(model: Checkpoint) -> Decomposition:
    return decompose(model, id_corpus(20), layers=[0, 2], **SMALL)


def test_on_its_own_rows_freeing_a_term_never_costs(found: Decomposition) -> None:
    steps = np.diff(found.fit_loss_bits, axis=-1)
    assert np.all(steps <= 1e-5)
    assert np.any(steps < -1e-2)
    # Both orders begin at the same lens.
    assert np.array_equal(found.fit_loss_bits[0, :, 0], found.fit_loss_bits[1, :, 0])


def test_the_first_rung_is_the_logit_lens(found: Decomposition, model: Checkpoint) -> None:
    _, held = id_corpus(20).split(fit_share=0.5)
    sample = sampled_states(
        model, held, layers=[0, 2], positions=100, max_documents=64, window_tokens=10, seed=0
    )
    p = model.readout.logits(sample.final).double().numpy()
    # Summed in float32 there; 5e-5 is what every path is held to.
    for row, layer in enumerate((0, 2)):
        q = model.readout.logits(sample.states[layer]).double().numpy()
        kl = metrics.kl_bits(p, q)
        assert found.kl_bits()[row, 0] == pytest.approx(kl.mean(), rel=5e-5)
        for place, document in enumerate(found.documents):
            mine = kl[sample.documents == document]
            assert found.sums[0, row, 0, place] == pytest.approx(mine.sum(), rel=5e-5)
            assert found.counts[place] == len(mine)


def test_drops_add_up_and_have_intervals(found: Decomposition) -> None:
    for order in ORDERS:
        drops, kl = found.drops(2, order), found.kl_interval(2, order)
        assert drops.estimate.sum() == pytest.approx(kl.estimate[0] - kl.estimate[-1])
        assert np.all(drops.low <= drops.estimate)
        assert np.all(drops.estimate <= drops.high)
    first = found.kl_bits()
    np.testing.assert_allclose(found.logit_lens.estimate, first[:, 0])
    np.testing.assert_allclose(found.not_linearly_there.estimate, first[:, 6])
    np.testing.assert_allclose(found.basis_mismatch.estimate, first[:, 3] - first[:, 6])


def test_a_table_has_a_row_for_each_order_layer_and_rung(found: Decomposition) -> None:
    frame = found.to_frame()
    assert len(frame) == 2 * 2 * 7
    some = frame[(frame["order"] == "map first") & (frame.layer == 2) & (frame.freed == "rotation")]
    assert some.drop_bits.item() == pytest.approx(found.drops(2, "map first").estimate[1])
    assert some.kl_bits.item() == found.kl_bits("map first")[1, 2]


def test_a_decomposition_reads_back_equal(found: Decomposition, tmp_path: Path) -> None:
    back = read_decomposition(found.save(tmp_path / "gap.json"))
    assert back == found
    assert replace(back, sums=back.sums + 1) != found
    assert found.save(tmp_path / "gap.csv").read_text().startswith("order,layer,rung,freed")
    with pytest.raises(ExportError, match="neither"):
        found.save(tmp_path / "gap.txt")
    (tmp_path / "gap.json").write_text('{"format": "x"}')
    with pytest.raises(ResultFileError, match="expected 'lens-decomposition-1'"):
        read_decomposition(tmp_path / "gap.json")


@pytest.mark.slow
def test_the_same_seed_gives_the_same_numbers(found: Decomposition, model: Checkpoint) -> None:
    assert decompose(model, id_corpus(20), layers=[2, 0], **SMALL) == found
    assert decompose(model, id_corpus(20), layers=[0, 2], seed=1, **SMALL) != found


def test_nothing_of_the_model_changes(found: Decomposition, model: Checkpoint) -> None:
    assert all(p.grad is None for p in model.model.parameters())
    assert all(p.requires_grad for p in model.model.parameters())


def test_what_cannot_be_decomposed_is_refused(model: Checkpoint) -> None:
    with pytest.raises(SelectionError, match="no gap"):
        decompose(model, id_corpus(4), layers=[-1])
    with pytest.raises(SelectionError, match="at least 1"):
        decompose(model, id_corpus(4), positions=0)
    with pytest.raises(SelectionError, match="too few"):
        decompose(model, id_corpus(4), fit_on=read_corpus([[5, 6]]), fit_positions=1)
    with pytest.raises(SelectionError, match="4 of the 4 documents"):
        decompose(model, id_corpus(4), fit_on=id_corpus(4))
    replayed = checkpoint()
    replayed.readout = replayed.replay
    with pytest.raises(UnsupportedArchitectureError, match="direct readout"):
        decompose(replayed, id_corpus(4))


def test_a_correction_composes_as_it_says() -> None:
    plain = Correction.none(d_model=3, d_vocab=5, device=torch.device("cpu"))
    states = torch.tensor([[1.0, 2.0, 3.0]])
    assert torch.equal(plain.moved(states), states)
    scale, turn = torch.tensor([1.0, 2.0, 3.0]), torch.eye(3).flip(0)
    moved = replace(plain, scale=scale, rotation=turn, shift=torch.ones(3)).moved(states)
    assert torch.equal(moved, torch.tensor([[10.0, 5.0, 2.0]]))  # first scaled, then turned


@pytest.mark.slow
def test_a_reduced_vocabulary_stands_for_the_whole(
    model: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fitted on a third of the tokens, judged on all: nearly as good, and never worse inside."""
    task = problem(model, moved=rotation(), steps=(Step("mul", 1.5),))
    free = frozenset({"temperature", "shift", "scale", "rotation"})
    whole = task.fitted(task.none(), free, freed="rotation", max_steps=30)
    for name, size in (("WHOLE_UP_TO", 0), ("HEAD", 40), ("REST", 20)):
        monkeypatch.setattr(f"lens.measuring.reduced_vocabulary.{name}", size)
    reduced = problem(model, moved=rotation(), steps=(Step("mul", 1.5),))
    assert len(reduced.vocabulary.ids) == 60
    assert not reduced.vocabulary.is_whole
    found = reduced.fitted(reduced.none(), free, freed="rotation", max_steps=30)
    first = task.check_kl_bits(task.none())
    assert task.check_kl_bits(whole) < 0.01 * first
    assert task.check_kl_bits(found) < 0.05 * first
    before = reduced.none()
    for term, allowed in steps_of(ORDERS["readout first"]):
        after = reduced.fitted(before, allowed, freed=term, max_steps=10)
        assert reduced.loss_bits(after) <= reduced.loss_bits(before)
        before = after
    # The bias is free for the likely tokens alone.
    rest = reduced.vocabulary.ids[40:]
    assert not after.bias[rest].any()
    assert after.bias.any()


def test_the_sums_of_a_reduced_vocabulary_are_right_on_average() -> None:
    likely = torch.randn(30_000, generator=torch.Generator().manual_seed(0)).exp()
    sums = []
    for seed in range(20):
        kept = ReducedVocabulary.of(likely, seed=seed)
        assert len(set(kept.ids.tolist())) == len(kept.ids) == HEAD + REST
        sums.append(float((likely[kept.ids].double() * kept.log_weight.double().exp()).sum()))
    exact = float(likely.double().sum())
    spread = np.std(sums) / np.sqrt(len(sums))
    assert abs(np.mean(sums) - exact) < 4 * spread
    assert np.std(sums) < 0.01 * exact
    assert float(likely[kept.ids[:HEAD]].min()) >= float(likely[kept.ids[HEAD:]].max())
    small = ReducedVocabulary.of(likely[:100], seed=0)
    assert small.is_whole
    assert small.ids.tolist() == list(range(100))


def test_positions_are_drawn_evenly_and_never_position_0(model: Checkpoint) -> None:
    sample = sampled_states(
        model,
        id_corpus(9),
        layers=[0],
        positions=60,
        max_documents=6,
        window_tokens=10,
        seed=0,
    )
    _, counts = np.unique(sample.documents, return_counts=True)
    assert counts.tolist() == [10] * 6
    first = model.capture(
        model.inputs_of(
            [list(d.ids or ())[i : i + 10] for d in id_corpus(9).documents for i in (0, 10)]
        ),
        layers=[0],
    )[0][:, 0]
    for state in sample.states[0]:
        assert not bool((state == first).all(-1).any())
