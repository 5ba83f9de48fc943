"""The paths' parts of Adam's step add up to the step that torch's own Adam takes."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lens.measuring.adam_paths import AdamPaths, AdamSettings
from lens.measuring.gradients import batch_gradients, gradients
from lens.measuring.training_batches import training_batches
from tests.checkpoint.test_exactness import checkpoint
from tests.checkpoint.tiny import BY_NAME
from tests.measuring.test_gradients import distance, documents, over_corpus

IN, OUT = "embedding", "unembedding"
ONE, TWO = ((IN, OUT),), ((IN,), (OUT,))
SETTINGS = (AdamSettings(), AdamSettings(beta_1=0.5, beta_2=0.95, eps=1e-4))


def torchs_step(gradients: list[Tensor], settings: AdamSettings) -> Tensor:
    """What torch.optim.Adam adds in its last step, for rate -1; weights do not feed back."""
    parameter = nn.Parameter(torch.zeros_like(gradients[0], dtype=torch.float64))
    betas = (settings.beta_1, settings.beta_2)
    optimiser = torch.optim.Adam([parameter], lr=1.0, betas=betas, eps=settings.eps)
    before = parameter.detach().clone()
    for gradient in gradients:
        before = parameter.detach().clone()
        parameter.grad = gradient.double()
        optimiser.step()
    return before - parameter.detach()


def batches(name: str, *, tied: bool) -> list[dict[str, Tensor]]:
    """The paths' gradients of several batches of a tiny model."""
    point = checkpoint(BY_NAME[name].build(tied=tied))
    options: dict[str, Any] = {"batch_size": 4, "window_tokens": 20, "max_targets": 300}
    corpus: Any = documents()
    if point.seq2seq:
        corpus = [(ids[:9], ids[9:20]) for ids in corpus]
    drawn = training_batches(
        point, corpus, masked_share=0.15, mask_id=4, seed=0, **options
    )  # fmt: skip
    found = [batch_gradients(point, one.inputs, one.targets) for one in drawn]
    assert len(found) > 2
    return [{path: g / one.n_targets for path, g in one.by_path.items()} for one in found]


@pytest.mark.parametrize("settings", SETTINGS, ids=["torchs", "others"])
@pytest.mark.parametrize("name", ["gpt2", "gemma2", "bert", "bart"])
def test_parts_of_one_matrix_add_up_to_adams_step(name: str, settings: AdamSettings) -> None:
    made = batches(name, tied=True)
    one = (tuple(made[0]),)
    own = tuple((path,) for path in made[0])
    paths = AdamPaths(settings, [one, own])
    for gradient in made:
        paths.add(gradient)
    truth = torchs_step([torch.stack(list(g.values())).sum(0) for g in made], settings)
    steps = list(paths.steps(one).values())
    assert distance(torch.stack(steps).sum(0), truth) < 1e-5
    # Neither without one of them, nor with a size for each, is it the step.
    for some in combinations(steps, len(steps) - 1):
        assert distance(torch.stack(some).sum(0), truth) > 0.01
    assert distance(torch.stack(list(paths.steps(own).values())).sum(0), truth) > 0.01


def test_two_matrices_take_each_its_own_step() -> None:
    made = batches("gpt2", tied=False)
    paths = AdamPaths(SETTINGS[0], [TWO, ONE])
    for gradient in made:
        paths.add(gradient)
    own, shared = paths.steps(TWO), paths.steps(ONE)
    for path in (IN, OUT):
        truth = torchs_step([gradient[path] for gradient in made], SETTINGS[0])
        assert distance(own[path], truth) < 1e-5
        assert distance(shared[path], truth) > 0.01


def test_each_part_is_its_formula() -> None:
    """u_in = m_in / (sqrt(v) + eps) with v of the sum, both unbiased."""
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn((2, 2, 5, 3), generator=generator).double()
    settings = AdamSettings(beta_1=0.8, beta_2=0.9, eps=1e-3)
    paths = AdamPaths(settings, [ONE])
    paths.add({IN: first[0], OUT: first[1]})
    paths.add({IN: second[0], OUT: second[1]})
    v = (0.9 * 0.1 * first.sum(0) ** 2 + 0.1 * second.sum(0) ** 2) / (1 - 0.81)
    m = (0.8 * 0.2 * first[0] + 0.2 * second[0]) / (1 - 0.64)
    torch.testing.assert_close(
        paths.steps(ONE)[IN].double(), m / (v.sqrt() + 1e-3), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("tied", [True, False])
def test_over_a_corpus_adams_shares_stand_beside_the_gradients(tied: bool) -> None:
    paths = over_corpus("gpt2", tied=tied)
    assert paths.adam_otherwise is not None
    assert paths.adam.output_share == pytest.approx(paths.adam.norms[1] / paths.adam.norms.sum())
    np.testing.assert_allclose((paths.adam.group_norms**2).sum(0), paths.adam.norms**2, rtol=1e-5)
    # Adam evens out sizes: its share is another than the gradient's.
    assert abs(paths.adam.output_share - paths.output_share) > 0.01
    assert abs(paths.adam.output_share - paths.adam_otherwise.output_share) > 1e-3
    words = dict(paths.rows())
    assert f"{paths.adam.output_share:.3f}" in words["Adam's output share"]
    assert ("Adam, a size for each path" in words) is tied
    assert ("Adam, one size for both" in words) is not tied


def test_a_decoder_tied_to_its_head_shares_a_size_with_it_alone() -> None:
    """An encoder with a lookup of its own has a size of its own."""
    point = checkpoint(BY_NAME["bart"].build(tied=True))
    encoder = point.model.model.encoder
    encoder.embed_tokens = torch.nn.Embedding.from_pretrained(
        encoder.embed_tokens.weight.detach().clone(), freeze=False
    )
    point = checkpoint(point.model)
    assert [pair.is_tied for pair in point.tie.pairs] == [False, False, True]
    pairs = [(ids[:9], ids[9:20]) for ids in documents()]
    paths = gradients(point, pairs, max_targets=100)
    assert paths.paths == ("encoder embedding", "decoder embedding", "unembedding")
    assert paths.adam_otherwise is not None
    assert not np.allclose(paths.adam.norms, paths.adam_otherwise.norms)
