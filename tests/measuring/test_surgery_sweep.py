"""The sweep is `measure` at each cut, and its ends are the model and the tie."""

import numpy as np
import pytest
import torch

from lens.checkpoint.checkpoint import Checkpoint
from lens.checkpoint.surgery import interpolate
from lens.corpus import read_corpus
from lens.errors import SelectionError
from lens.measuring.measure import measure
from lens.measuring.surgery_sweep import surgery_sweep
from tests.checkpoint.test_exactness import checkpoint
from tests.checkpoint.tiny import BY_NAME


def texts() -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(3, 160, size=24).tolist() for _ in range(10)]


@pytest.fixture
def untied() -> Checkpoint:
    return checkpoint(BY_NAME["gpt2"].build(tied=False))


def test_each_alpha_is_the_measurement_of_that_cut(untied: Checkpoint) -> None:
    before = [p.detach().clone() for p in untied.model.parameters()]
    sweep = surgery_sweep(untied, texts(), [0, 0.5, 1])
    fit, held_out = read_corpus(texts()).split()
    for row, alpha in enumerate((0, 0.5, 1)):
        alone = measure(interpolate(untied, alpha), held_out, fit_on=fit)
        np.testing.assert_array_equal(sweep.kl_bits[row], alone.mean("kl_bits"))
        np.testing.assert_array_equal(sweep.skill[row], alone.skill)
    whole = measure(untied, held_out, fit_on=fit)
    np.testing.assert_array_equal(sweep.kl_bits[0], whole.mean("kl_bits"))
    assert not np.allclose(sweep.kl_bits[0], sweep.kl_bits[2])
    assert all(torch.equal(a, b) for a, b in zip(before, untied.model.parameters(), strict=True))


def test_towards_the_lookup_the_embedding_copies_itself(untied: Checkpoint) -> None:
    copying = surgery_sweep(untied, texts(), [0, 0.5, 1]).self_copy[:, 0]
    assert copying[2] > copying[1] > copying[0]


def test_the_cross_entropy_is_the_models_own(untied: Checkpoint) -> None:
    sweep = surgery_sweep(untied, texts(), [0.0])
    total, count = 0.0, 0
    for ids in read_corpus(texts()).split()[1].documents:
        row = torch.tensor([list(ids.ids or ())])
        with torch.no_grad():
            logits = untied.model(row).logits[0].double()
        # Position 0 is kept apart.
        scores = logits.log_softmax(-1)[1:-1].gather(1, row[0, 2:, None])
        total, count = total - float(scores.sum()) / np.log(2), count + len(scores)
    assert sweep.cross_entropy_bits[0] == pytest.approx(total / count, abs=1e-4)
    assert sweep.perplexity[0] == pytest.approx(2 ** (total / count), rel=1e-3)


def test_what_has_no_path_is_refused(untied: Checkpoint) -> None:
    with pytest.raises(SelectionError, match="no path"):
        surgery_sweep(checkpoint(BY_NAME["gpt2"].build(tied=True)), texts())
    with pytest.raises(SelectionError, match="empty"):
        surgery_sweep(untied, texts(), [])
    with pytest.raises(SelectionError, match="0 to 1"):
        surgery_sweep(untied, texts(), [2])


def test_the_text_has_a_row_for_each_alpha(untied: Checkpoint) -> None:
    rows = surgery_sweep(untied, texts(), [0, 1], rotate=True).rows()
    assert [label for label, _ in rows] == ["alpha 0", "alpha 1"]
