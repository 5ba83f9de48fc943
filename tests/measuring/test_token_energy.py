"""Energy has closed forms: 1 for rows that point everywhere alike, a cosine for a single row."""

import numpy as np
import pytest
import torch

from lens.checkpoint.readout import DirectReadout
from lens.errors import UnsupportedArchitectureError
from lens.measuring.frozen_norm import FrozenNorm
from lens.measuring.neighbourhood_copy import masses, neighbourhood_copy
from lens.measuring.sampled_states import sampled_states
from lens.measuring.token_energy import energy, mean_outer, token_energy
from tests.measuring.small import checkpoint, id_corpus

D = 8
OPTIONS = {"positions": 60, "window_tokens": 10}


def plain(share: float = 0.0, gain: torch.Tensor | None = None) -> FrozenNorm:
    one = torch.ones(D, dtype=torch.float64)
    return FrozenNorm(one if gain is None else gain.double(), 0 * one, share)


def states(count: int = 5) -> torch.Tensor:
    return torch.randn(count, D, generator=torch.Generator().manual_seed(0))


def test_rows_that_point_everywhere_alike_give_one_to_every_state() -> None:
    rows = torch.linalg.qr(states(D))[0] * torch.arange(1.0, D + 1)[:, None]  # lengths differ
    gram = mean_outer(rows, plain())
    np.testing.assert_allclose(energy(states(), gram, plain()).numpy(), 1.0, rtol=1e-6)


def test_a_single_row_gives_the_cosine_with_it() -> None:
    row = states(1)
    gram = mean_outer(row.expand(4, -1), plain())
    cosine = torch.nn.functional.cosine_similarity(states().double(), row.double())
    torch.testing.assert_close(energy(states(), gram, plain()), cosine.abs())
    assert float(energy(row, gram, plain())) == pytest.approx(1.0)


def test_the_strongest_direction_gives_its_share() -> None:
    rows = states(50) * torch.linspace(0.1, 3, D)
    gram = mean_outer(rows, plain())
    values, vectors = torch.linalg.eigh(gram)
    expected = values[-1].sqrt() / values.square().sum().sqrt()
    found = energy(vectors[:, -1][None].float(), gram, plain())
    assert float(found) == pytest.approx(float(expected), rel=1e-5)


def test_gain_and_centring_are_the_norms() -> None:
    gain = torch.linspace(0.2, 2.0, D)
    rows = states(20)
    whole = mean_outer(rows, plain(1.0, gain))
    seen = rows.double() * gain.double()
    seen = seen - seen.mean(-1, keepdim=True)
    seen = seen / seen.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(whole, seen.T @ seen / 20)
    # A state of one number has no direction behind a norm that centres.
    assert float(energy(torch.ones(1, D), whole, plain(1.0, gain))) == 0.0
    assert float((whole - mean_outer(rows, plain())).norm()) > 0.01


def test_energy_by_layer_is_the_mean_over_positions() -> None:
    model = checkpoint("llama")
    found = token_energy(model, id_corpus(6), **OPTIONS)
    assert isinstance(model.readout, DirectReadout)
    sample = sampled_states(
        model,
        id_corpus(6),
        layers=[0, 2],
        positions=60,
        max_documents=64,
        window_tokens=10,
        seed=0,
    )
    gain = model.model.model.norm.weight.detach().double()
    for matrix, interval in ((model.W_U, found.of_unembedding), (model.W_E, found.of_embedding)):
        assert interval is not None
        u = torch.nn.functional.normalize(matrix.detach().double() * gain, dim=-1)
        size = torch.linalg.matrix_norm(u.T @ u) / len(u)
        for layer in (0, 2):
            h = torch.nn.functional.normalize(sample.states[layer].double(), dim=-1)
            expected = (h @ u.T).square().mean(-1).sqrt() / size
            assert interval.estimate[layer] == pytest.approx(float(expected.mean()), rel=1e-3)
    assert not np.allclose(found.of_unembedding.estimate, found.of_embedding.estimate)  # type: ignore[union-attr]
    assert len(found.to_frame()) == 4


def test_a_tail_that_is_more_than_a_norm_is_refused() -> None:
    with pytest.raises(UnsupportedArchitectureError, match="more than a norm"):
        token_energy(checkpoint("bert"), id_corpus(6), **OPTIONS)


def test_the_mass_of_a_set_is_the_sum_of_its_probabilities() -> None:
    model = checkpoint()
    assert isinstance(model.readout, DirectReadout)
    h = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[1, 2], [3, -1], [5, 5], [7, 8]])
    q = torch.softmax(model.readout.logits(h).double(), -1)
    (found,) = masses(model.readout, h, [ids])
    expected = [q[0, 1] + q[0, 2], q[1, 3], 2 * q[2, 5], q[3, 7] + q[3, 8]]
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-5, atol=1e-7)


def test_neighbours_are_the_nearest_rows_and_not_the_token_itself() -> None:
    model = checkpoint(tied=True)
    found = neighbourhood_copy(model, id_corpus(6), n_neighbours=3, **OPTIONS)
    sample = sampled_states(
        model, id_corpus(6), layers=[1], positions=60, max_documents=64, window_tokens=10, seed=0
    )
    rows = torch.nn.functional.normalize(model.W_E.detach().float(), dim=-1)
    cosines = (rows @ rows.T).fill_diagonal_(-2)
    near = cosines.topk(3, dim=-1).indices[sample.input_ids]
    q = torch.softmax(model.readout.logits(sample.states[1]).double(), -1)
    assert found.neighbours.estimate[1] == pytest.approx(float(q.gather(1, near).sum(1).mean()))
    own = q.gather(1, sample.input_ids[:, None]).mean()
    assert found.itself.estimate[1] == pytest.approx(float(own))
    assert found.n_neighbours == 3


def test_a_tied_embedding_read_at_layer_0_gives_more_to_neighbours_than_chance() -> None:
    found = neighbourhood_copy(checkpoint("llama", tied=True), id_corpus(8), **OPTIONS)
    assert found.neighbours.low[0] > found.by_chance.high[0]
    assert found.itself.estimate[0] > found.neighbours.estimate[0] / found.n_neighbours
    assert len(found.to_frame()) == 4
