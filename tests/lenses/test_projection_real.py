"""Both paths on real weights, against float64 from the same states, within what is promised."""

from typing import Any

import numpy as np
import pytest
import torch

from lens.lenses.projection import project
from lens.measuring import metrics
from tests.lenses.reading import exact_logits

PROMPT = "The Eiffel Tower is located in the city of"


@pytest.fixture(params=["smollm2", "gemma3"])
def checkpoint(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("path", ["fused", "torch"])
def test_every_number_of_a_real_model_is_within_its_bound(checkpoint, path, monkeypatch):
    if path == "torch":
        monkeypatch.setattr("lens.lenses.reduction.has_numba", lambda: False)
    ids = checkpoint.ids_of(PROMPT)
    layers = [0, 1, checkpoint.n_layers // 2, checkpoint.n_layers - 1, checkpoint.n_layers]
    captured = checkpoint.capture(checkpoint.inputs_of([ids]), layers=layers)
    states = torch.stack([captured[layer][0] for layer in layers])
    tokens = torch.tensor(ids)
    targets = torch.cat([tokens[1:], tokens.new_tensor([-1])])
    result = project(
        checkpoint.readout,
        states,
        final_states=states[-1],
        input_ids=tokens,
        target_ids=targets,
    )
    exact = exact_logits(checkpoint.readout, states)
    final = exact[-1]
    for row, lens in enumerate(exact):
        entropy = np.abs(result.entropy_bits[row] - metrics.entropy_bits(lens))
        assert entropy.max() <= 5e-5
        kl = metrics.kl_bits(final, lens)
        assert (np.abs(result.kl_bits[row] - kl) <= np.maximum(5e-4, 5e-5 * kl)).all()
        assert np.array_equal(result.top_ids[row], metrics.top_ids(lens, 5))
        _ranks_agree(result.target_rank[row, :-1], lens[:-1], targets[:-1].numpy())
        _ranks_agree(result.final_top_rank[row], lens, final.argmax(-1))
    assert (result.kl_bits[-1] == 0).all()
    assert (result.kl_bits[0] > 1).all()


def _ranks_agree(ranks: np.ndarray, logits: np.ndarray, ids: np.ndarray) -> None:
    """Equal but for tokens whose logit is the target's within float32 rounding of the product."""
    target = np.take_along_axis(logits, ids[:, None], -1)
    near = np.abs(logits - target) <= 2.0**-20 * np.abs(logits).max(-1, keepdims=True)
    assert (np.abs(ranks - metrics.rank(logits, ids)) <= near.sum(-1) - 1).all()
