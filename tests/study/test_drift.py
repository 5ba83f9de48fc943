from pathlib import Path

import pytest
import torch

from lens.errors import ResultFileError
from lens.study.arms import arm_of
from lens.study.drift import Trained, compare_matrices, likeness, read_matrices, write_matrices
from lens.study.run import train
from tests.study.small import RECIPE, texts


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for arm, seed in (("tied", 0), ("untied-copy", 0), ("tied", 3)):
        train(arm_of(arm), seed, texts(), RECIPE, folder / f"{arm}-seed-{seed}")
    return folder


def test_a_rotated_matrix_is_alike_after_the_best_rotation_alone() -> None:
    rows = torch.randn(200, 8)
    turned = rows @ torch.linalg.qr(torch.randn(8, 8))[0]
    same, found = likeness(rows, rows), likeness(rows, turned)
    assert (same.row_cosine, same.procrustes) == pytest.approx((1.0, 1.0))
    assert found.procrustes == pytest.approx(1.0)
    assert found.row_cosine < 0.5
    assert found.chance_procrustes < 0.5
    assert abs(found.chance_row_cosine) < 0.2


def test_twins_begin_with_one_matrix_and_part(runs: Path) -> None:
    tied, untied = Trained.of(runs / "tied-seed-0"), Trained.of(runs / "untied-copy-seed-0")
    for one, other in zip(tied.first, untied.first, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(*tied.last)
    assert not torch.equal(*untied.last)
    assert not torch.equal(Trained.of(runs / "tied-seed-3").first[0], tied.first[0])
    # A tied matrix gets both gradients: it moves, and so do both of the untied twin.
    assert min(tied.distance(0), untied.distance(0), untied.distance(1)) > 0


def test_a_comparison_names_its_ceiling_and_comes_back(runs: Path, tmp_path: Path) -> None:
    (path,) = write_matrices(runs, tmp_path, 0)
    assert path.name == "matrices-untied-copy-0.json"
    (row,) = read_matrices(tmp_path)
    assert row["ceiling_seed"] == 3
    assert row["likeness"]["tied W, tied W of another seed"]["procrustes"] <= 1.0
    across = row["likeness"]["tied W, untied E"]
    assert across["row_cosine"] > across["chance_row_cosine"]
    path.write_text("{}")
    with pytest.raises(ResultFileError, match="format"):
        read_matrices(tmp_path)


def test_what_is_not_finished_is_not_compared(runs: Path, tmp_path: Path) -> None:
    assert compare_matrices(runs, 3, "untied-copy") is None
    assert write_matrices(runs, tmp_path, 7) == []
    with pytest.raises(ResultFileError, match="finished"):
        Trained.of(tmp_path)
