"""Maps between two matrices, held to closed forms."""

import pytest
import torch

from lens import linear
from lens.errors import ShapeError


def noise(rows: int, d: int, seed: int) -> torch.Tensor:
    return torch.randn((rows, d), generator=torch.Generator().manual_seed(seed))


def turn(d: int, seed: int = 7) -> torch.Tensor:
    return torch.linalg.qr(noise(d, d, seed).double()).Q


def grams(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return linear.cross_product(a, b), linear.cross_product(a, a), linear.cross_product(b, b)


@pytest.mark.parametrize("rows", [5, linear.ROWS_AT_ONCE + 3])
def test_the_streamed_product_is_the_product(rows: int) -> None:
    a, b = noise(rows, 4, 1).double(), noise(rows, 6, 2).double()
    mean = linear.mean_row(a)
    torch.testing.assert_close(mean, a.mean(0))
    torch.testing.assert_close(linear.cross_product(a, b), a.T @ b)
    centred = linear.cross_product(a, b, shift_a=mean, shift_b=linear.mean_row(b))
    torch.testing.assert_close(centred, (a - a.mean(0)).T @ (b - b.mean(0)))


def test_a_rotation_is_found_and_a_shear_is_not_one() -> None:
    a = noise(200, 8, 1).double()
    found = linear.rotation(a, a @ turn(8))
    torch.testing.assert_close(found, turn(8))
    sheared = linear.rotation(a, a @ noise(8, 8, 3).double())
    torch.testing.assert_close(sheared @ sheared.T, torch.eye(8, dtype=torch.float64))
    # No other orthogonal matrix comes nearer.
    b = noise(200, 8, 4).double()
    best = (a @ linear.rotation(a, b) - b).norm()
    assert all((a @ turn(8, seed) - b).norm() > best for seed in range(20))


def test_procrustes_and_cka_are_one_under_rotation_and_scale_and_small_for_noise() -> None:
    a = noise(2000, 8, 1).double()
    same = grams(a, 3 * a @ turn(8))
    assert linear.procrustes_cosine(*same) == pytest.approx(1)
    assert linear.linear_cka(*same) == pytest.approx(1)
    other = grams(a, noise(2000, 8, 2).double())
    assert linear.procrustes_cosine(*other) < 0.1
    assert linear.linear_cka(*other) < 0.02
    stretched = grams(a, a @ torch.diag(torch.tensor([9.0] + [1.0] * 7).double()))
    assert linear.procrustes_cosine(*stretched) < 0.9


def test_the_ridge_map_is_least_squares_without_penalty_and_nothing_under_a_huge_one() -> None:
    a, m = noise(300, 6, 1).double(), noise(6, 5, 2).double()
    b = a @ m + 0.1 * noise(300, 5, 3).double()
    gram, cross = linear.cross_product(a, a), linear.cross_product(a, b)
    torch.testing.assert_close(
        linear.ridge_map(gram, cross, penalty=0.0), torch.linalg.lstsq(a, b).solution
    )
    assert float(linear.ridge_map(gram, cross, penalty=1e9).abs().max()) < 1e-6


def test_rows_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ShapeError, match="5 and 6 rows"):
        linear.cross_product(noise(5, 2, 1), noise(6, 2, 1))
