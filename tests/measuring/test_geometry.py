"""The comparison of two matrices, held to closed forms, to brute force and to chance."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lens import linear
from lens.errors import SelectionError, ShapeError
from lens.measuring.geometry import ISOTROPY, MEASURES, Geometry, geometry
from lens.measuring.meaning import similarity_of_meaning
from lens.measuring.moments import moments_of
from lens.measuring.neighbours import nearest_rows
from lens.measuring.ranks import rank_correlation, ranks
from tests.checkpoint.test_exactness import checkpoint
from tests.checkpoint.tiny import BY_NAME

ROWS, WIDTH = 400, 16


def noise(seed: int, rows: int = ROWS, d: int = WIDTH) -> torch.Tensor:
    return torch.randn((rows, d), generator=torch.Generator().manual_seed(seed))


def turn() -> torch.Tensor:
    return torch.linalg.qr(noise(9, WIDTH)).Q


class Pair:
    """What `geometry` reads of a checkpoint."""

    d_model = WIDTH
    lookup_scale = 1.0
    readout = None

    def __init__(self, w_e: torch.Tensor, w_u: torch.Tensor) -> None:
        self.W_E, self.W_U = w_e, w_u
        self.origin = type("Origin", (), {"model_id": "pair"})
        self.tie = type("Tie", (), {"verdict": "untied"})


def of(w_e: torch.Tensor, w_u: torch.Tensor, **options: Any) -> Geometry:
    return geometry(Pair(w_e, w_u), sample=200, pairs=4000, **options)  # type: ignore[arg-type]


def test_a_matrix_against_itself_is_one_everywhere_and_chance_is_not() -> None:
    same = of(noise(1), noise(1))
    np.testing.assert_allclose(same.values, 1, atol=1e-3)
    assert (same.chance < 0.5).all()


def test_a_rotation_and_a_scale_leave_all_but_the_rows_themselves() -> None:
    turned = of(noise(1), 3 * noise(1) @ turn())
    for name in MEASURES:
        for centred in (False, True):
            value = turned.value(name, centred=centred)
            if name == "row cosine":
                assert abs(value) < 0.3
            else:
                assert value == pytest.approx(1, abs=1e-3), name


def test_a_linear_map_that_is_no_rotation_is_found_by_the_ridge_alone() -> None:
    mapped = of(noise(1), noise(1) @ noise(5, WIDTH))
    assert mapped.value("ridge R2") > 0.99 > 0.95 > mapped.value("Procrustes cosine")
    assert mapped.value("kNN overlap") < 0.9


def test_independent_matrices_are_at_chance() -> None:
    far = of(noise(1, 4000), noise(2, 4000))
    np.testing.assert_allclose(far.values, far.chance, atol=0.06)


def test_a_common_offset_makes_rows_alike_until_they_are_centred() -> None:
    shifted = of(noise(1) + 5, noise(2) + 5)
    assert shifted.value("row cosine") > 0.9
    assert shifted.chance[0, 0] > 0.9
    assert abs(shifted.value("row cosine", centred=True)) < 0.1
    assert shifted.isotropy[0, ISOTROPY.index("mean row share")] > 0.9


def brute_force(e: torch.Tensor, u: torch.Tensor) -> dict[str, float]:
    """The same numbers with every pair of rows held at once."""
    e, u = e.double(), u.double()
    ne, nu = (torch.nn.functional.normalize(x, dim=1) for x in (e, u))
    cosines = [n @ n.T for n in (ne, nu)]
    for c in cosines:
        c.fill_diagonal_(-torch.inf)
    near = [c.topk(10, dim=1).indices for c in cosines]
    common = [len(set(a.tolist()) & set(b.tolist())) for a, b in zip(*near, strict=True)]
    gram_e, gram_u = e @ e.T, u @ u.T
    return {
        "row cosine": float((ne * nu).sum(1).mean()),
        "Procrustes cosine": float(torch.linalg.matrix_norm(e.T @ u, "nuc") / e.norm() / u.norm()),
        "linear CKA": float((gram_e * gram_u).sum() / gram_e.norm() / gram_u.norm()),
        "norm correlation": rank_correlation(e.norm(dim=1).numpy(), u.norm(dim=1).numpy()),
        "kNN overlap": float(np.mean(common)) / 10,
    }


@pytest.mark.parametrize("block", [7, 10_000])
def test_the_streamed_numbers_are_those_of_brute_force(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "ROWS_AT_ONCE", block)
    e = noise(1) + 0.5
    u = e @ turn() + 0.7 * noise(2)
    found = geometry(Pair(e, u), sample=ROWS, pairs=2000)  # type: ignore[arg-type]
    for centred in (False, True):
        shift = (e.mean(0), u.mean(0)) if centred else (0.0, 0.0)
        truth = brute_force(e - shift[0], u - shift[1])
        for name, value in truth.items():
            assert found.value(name, centred=centred) == pytest.approx(value, abs=1e-5), name
    cosine = torch.nn.functional.normalize(e, dim=1)
    off = (cosine @ cosine.T).sum() - ROWS
    numbers = dict(zip(ISOTROPY, found.isotropy[0], strict=True))
    assert numbers["mean cosine"] == pytest.approx(float(off) / (ROWS * (ROWS - 1)), abs=1e-5)
    singular = torch.linalg.svdvals(e.double()).numpy()
    np.testing.assert_allclose(found.spectra[0], singular, rtol=1e-6)
    assert numbers["participation ratio"] == pytest.approx(
        (singular**2).sum() ** 2 / (singular**4).sum()
    )


def test_the_ridge_is_judged_on_rows_that_it_never_saw() -> None:
    # As many columns as rows to fit on: any target is fitted, and nothing is learned.
    e, u = noise(1, 60, 48), noise(2, 60, 48)
    found = geometry(Pair(e, u), sample=20, pairs=100)  # type: ignore[arg-type]
    assert found.value("ridge R2") < 0


def test_shifted_moments_are_those_of_shifted_matrices() -> None:
    a, b = noise(1) + 2, noise(2) - 1
    held = torch.arange(ROWS) % 5 == 0
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(3))
    shift_a, shift_b = a.double().mean(0), b.double().mean(0)
    direct = moments_of(a.double() - shift_a, b[order].double() - shift_b, held)
    whole = moments_of(a, b, held)
    derived = moments_of(a, b, held, order=order, known=whole).shifted(shift_a, shift_b)
    for name in ("n", "sum_a", "sum_b", "aa", "cross", "bb", "bb_trace"):
        torch.testing.assert_close(
            getattr(derived, name), getattr(direct, name), rtol=1e-9, atol=1e-8
        )


def test_neighbours_leave_the_row_itself_and_rows_of_no_length_out() -> None:
    matrix = noise(1)
    matrix[7] = 0
    queries = torch.arange(20)
    near = nearest_rows(matrix[queries], matrix, k=5, own=queries)
    assert not (near.by_cosine == queries[:, None]).any()
    assert not (near.by_cosine == 7).any()
    own = nearest_rows(matrix[queries], matrix, k=1).by_cosine[:, 0]
    assert (own[queries != 7] == queries[queries != 7]).all()


def test_ranks_share_ties() -> None:
    assert ranks(np.array([10.0, 30.0, 20.0, 30.0])).tolist() == [0, 2.5, 1, 2.5]
    x = np.array([1.0, 2.0, 3.0, 4.0])
    assert rank_correlation(x, np.exp(x)) == pytest.approx(1)
    assert rank_correlation(x, -(x**3)) == pytest.approx(-1)
    assert np.isnan(rank_correlation(x, np.ones(4)))


def test_rows_of_padding_are_left_out() -> None:
    e, u = noise(1), noise(1)
    e[300:] = 0
    found = of(e, u[:350])
    assert found.n_rows == 300
    assert found.value("row cosine") == pytest.approx(1)


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_is_compared_and_copies_are_counted(tied: bool) -> None:
    point = checkpoint(BY_NAME["gemma"].build(tied=tied))
    found = geometry(point, sample=160, pairs=500)
    assert (found.value("row cosine") == pytest.approx(1)) is tied
    states = point.readout.prepare(point.W_E.detach() * point.lookup_scale)  # type: ignore[attr-defined]
    answers = (states @ point.W_U.T).argmax(1)
    assert found.copy_score == pytest.approx(float((answers == torch.arange(160)).float().mean()))
    assert found.copy_chance is not None
    if tied:
        assert found.copy_score is not None
        assert found.copy_score > 0.5 > 0.1 > found.copy_chance


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ShapeError, match="two spaces"):
        of(noise(1), noise(1, d=8))
    with pytest.raises(SelectionError, match="fewer neighbours"):
        of(noise(1, 5), noise(1, 5))


def test_the_seed_decides() -> None:
    one, same, other = (of(noise(1), noise(2), seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one.chance, same.chance)
    assert not np.array_equal(one.chance, other.chance)
    assert replace(one, seed=1).seed == 1


def test_rows_that_answer_alike_are_alike_in_a_bigram_table() -> None:
    """Where logits are h . U_y, tokens with equal rows have equal probabilities everywhere."""
    model = BY_NAME["gpt2"].build(tied=False)
    with torch.no_grad():
        model.lm_head.weight[1::2] = model.lm_head.weight[::2] + 0.02 * noise(4, 80, 64)
        model.transformer.wte.weight.copy_(0.5 * noise(6, 160, 64))
    generator = np.random.default_rng(0)
    texts = [generator.integers(3, 160, size=30).tolist() for _ in range(20)]
    found = similarity_of_meaning(checkpoint(model), texts, contexts=200, tokens=100, pairs=3000)
    assert found.unembedding > 0.5
    assert abs(found.embedding) < 0.2
    assert abs(found.chance_unembedding) < 0.1
    assert -1 <= found.target_cosine <= 1
