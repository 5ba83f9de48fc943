"""Where the model is its lens, influences agree; elsewhere they are told apart."""

import numpy as np
import pytest
import torch

from lens.checkpoint.checkpoint import Checkpoint
from lens.checkpoint.readout import DirectReadout
from lens.errors import SelectionError, UnsupportedArchitectureError
from lens.lenses.differentiable import in_float32
from lens.measuring.causal_basis import LensInfluence, ablated
from lens.measuring.causal_fidelity import causal_fidelity, weighted_cosine
from tests.measuring.small import checkpoint, id_corpus
from tests.measuring.test_jacobian import linear

OPTIONS = {"window_tokens": 12, "n_directions": 5, "max_windows": 3, "max_steps": 5}


def idle() -> Checkpoint:
    """Blocks that add nothing: the model is what the lens reads at any layer."""
    model = linear()
    with torch.no_grad():
        for block in model.model.transformer.h:
            block.matrix.zero_()
    return model


def test_where_blocks_do_nothing_lens_and_model_depend_on_the_same() -> None:
    found = causal_fidelity(idle(), id_corpus(4), layers=[0, 2], **OPTIONS)
    np.testing.assert_allclose(found.lens_bits, found.model_bits, rtol=1e-3, atol=1e-5)
    assert found.rank_correlation.tolist() == [1.0, 1.0]
    np.testing.assert_allclose(found.alignment, 1.0, atol=1e-3)


def test_where_blocks_do_something_they_differ() -> None:
    found = causal_fidelity(checkpoint(), id_corpus(4), layers=[0], **OPTIONS)
    assert not np.allclose(found.lens_bits, found.model_bits, rtol=0.05)
    assert np.all(found.alignment_of_each <= 1 + 1e-5)
    assert found.alignment[0] < 0.99
    frame = found.to_frame()
    assert len(frame) == 5
    assert frame.lens_influence_bits.tolist() == found.lens_bits[0].tolist()


def test_the_basis_is_orthonormal_and_no_direction_is_stronger_than_its_first() -> None:
    model = checkpoint()
    assert isinstance(model.readout, DirectReadout)
    states = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    influence = LensInfluence(model, in_float32(model.readout.unembedding), states)
    basis = influence.basis(4, max_steps=20)
    torch.testing.assert_close(basis @ basis.T, torch.eye(4), atol=1e-4, rtol=0)
    first = influence.bits(basis[0])
    assert first > influence.bits(basis[3])
    others = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    assert all(influence.bits(v / v.norm()) < first for v in others)


def test_a_direction_that_no_token_reads_has_no_influence() -> None:
    model = checkpoint()
    assert isinstance(model.readout, DirectReadout)
    unembedding = in_float32(model.readout.unembedding)
    states = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    influence = LensInfluence(model, unembedding, states)
    ones = torch.ones(64) / 8  # a LayerNorm takes off what all dimensions share
    assert influence.bits(ones) < 1e-4
    assert influence.bits(torch.eye(64)[0]) > 1e-4


def test_what_is_ablated_is_the_mean_along_the_direction() -> None:
    generator = torch.Generator().manual_seed(0)
    states, v = torch.randn(9, 6, generator=generator), torch.randn(6, generator=generator)
    v = v / v.norm()
    moved = ablated(states, v, states.mean(0))
    torch.testing.assert_close(moved @ v, (states.mean(0) @ v).expand(9))
    across = torch.eye(6) - torch.outer(v, v)
    torch.testing.assert_close(moved @ across, states @ across)


def test_the_cosine_of_changes_is_one_minus_one_or_nought() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(1, 8, generator=generator).softmax(-1)
    a = torch.randn(1, 8, generator=generator)
    assert float(weighted_cosine(a, 3 * a + 2, p)) == pytest.approx(1.0)
    assert float(weighted_cosine(a, -a, p)) == pytest.approx(-1.0)
    assert float(weighted_cosine(a, torch.ones_like(a), p)) == 0.0


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(SelectionError, match="expected 3 to 64"):
        causal_fidelity(checkpoint(), id_corpus(2), n_directions=2)
    model = checkpoint()
    model.readout = model.replay
    with pytest.raises(UnsupportedArchitectureError, match="direct readout"):
        causal_fidelity(model, id_corpus(2))
