"""The paths into a matrix add up to autograd's gradient, and each is what its formula says."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import lens.measuring.gradients as module
from lens.checkpoint.checkpoint import Checkpoint
from lens.checkpoint.inputs import Inputs, forward_arguments
from lens.errors import PromptError, SelectionError, UnsupportedArchitectureError
from lens.measuring.gradients import GradientPaths, batch_gradients, gradients
from tests.checkpoint.test_exactness import checkpoint, some_inputs
from tests.checkpoint.tiny import BY_NAME, TINY, Tiny

ALL = pytest.mark.parametrize("tiny", TINY, ids=lambda tiny: tiny.name)


def some_targets(inputs: Inputs) -> Tensor:
    """Next tokens, some of them not scored."""
    targets = torch.roll(inputs.ids, -1, dims=1)
    targets[:, -1] = -1
    targets[0, 2] = -1
    return targets


def true_gradients(point: Checkpoint, inputs: Inputs, targets: Tensor) -> dict[str, Tensor]:
    """By a plain backward pass on a copy: name of each parameter to its gradient."""
    model = copy.deepcopy(point.model)
    arguments = forward_arguments(model, inputs, seq2seq=point.seq2seq)
    logits = model(**arguments).logits
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum"
    )
    loss.backward()
    named = model.named_parameters(remove_duplicate=False)
    return {name: p.grad for name, p in named if p.grad is not None}


def distance(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth.double()).norm() / truth.double().norm())


@ALL
def test_the_paths_add_up_to_autograds_gradient(tiny: Tiny) -> None:
    point = checkpoint(tiny.build(tied=True))
    inputs = some_inputs(point)
    targets = some_targets(inputs)
    parts = batch_gradients(point, inputs, targets, whole=True)
    truth = true_gradients(point, inputs, targets)[str(point.tie.output_name)]
    found = list(parts.by_path.values())
    assert len(found) == (3 if point.seq2seq else 2)
    assert parts.whole is not None
    assert distance(parts.whole, truth) < 1e-6
    assert distance(torch.stack(found).double().sum(0), truth) < 1e-6
    # Without any one of them the sum is not the gradient.
    for missing in range(len(found)):
        rest = torch.stack([g for i, g in enumerate(found) if i != missing]).sum(0)
        assert distance(rest, truth) > 1e-3


@pytest.mark.parametrize("name", ["gpt2", "gemma", "cohere", "bert", "opt_project_out", "bart"])
def test_on_an_untied_model_they_are_the_gradients_of_its_matrices(name: str) -> None:
    point = checkpoint(BY_NAME[name].build(tied=False))
    inputs = some_inputs(point)
    targets = some_targets(inputs)
    parts = batch_gradients(point, inputs, targets, whole=True)
    truth = true_gradients(point, inputs, targets)
    assert parts.whole is None
    matrices = module.named_matrices(point.model, point.readout, seq2seq=point.seq2seq)
    for matrix in matrices:
        assert distance(parts.by_path[matrix.role], truth[str(matrix.name)]) < 1e-6


SCALED = {
    "gpt2": 1.0,
    "gemma": 8.0,
    "granite": 12.0,
    "gemma2": 8.0,
    "cohere": 1.0,
    "gemma3_text": 8.0,
}


@pytest.mark.parametrize("name", SCALED)
def test_each_path_is_its_formula(name: str) -> None:
    """g_in = a sum_t 1[x_t = v] dL/de_t and g_out = sum_t s cap'(z_t) (p_t - y_t) n_t^T."""
    point = checkpoint(BY_NAME[name].build(tied=True))
    inputs = some_inputs(point)
    targets = some_targets(inputs)
    parts = batch_gradients(point, inputs, targets)
    lookup: list[Tensor] = []
    real: list[Tensor] = []

    def keep(module: Any, args: Any, output: Tensor) -> Tensor:
        output.retain_grad()
        lookup.append(output)
        return output

    model = copy.deepcopy(point.model)
    handles = [
        model.get_input_embeddings().register_forward_hook(keep),
        model.get_output_embeddings().register_forward_pre_hook(lambda m, a: real.append(a[0])),
    ]
    logits = model(**forward_arguments(model, inputs, seq2seq=False)).logits
    scored = targets != -1
    torch.nn.functional.cross_entropy(logits[scored], targets[scored], reduction="sum").backward()
    for handle in handles:
        handle.remove()

    # The scale inside the lookup; what stands outside it is in the gradient already.
    inside = lookup[0].detach() / point.W_E.detach()[inputs.ids]
    g_in = torch.zeros_like(point.W_E)
    assert lookup[0].grad is not None
    g_in.index_add_(0, inputs.ids.flatten(), (inside * lookup[0].grad).flatten(0, 1))
    assert distance(parts.by_path["embedding"], g_in) < 1e-5

    d_logits = logits.detach().double().softmax(-1)
    d_logits -= torch.nn.functional.one_hot(targets.clamp_min(0), 160)
    d_logits[~scored] = 0
    plain = real[0].detach().double() @ point.W_U.detach().double().T
    step = 1e-4
    steps = point.readout.unembedding.steps  # type: ignore[attr-defined]

    def after(z: Tensor) -> Tensor:
        for one in steps:
            z = one.apply(z)
        return z

    slope = (after(plain + step) - after(plain - step)) / (2 * step)
    g_out = torch.einsum("btv,btd->vd", d_logits * slope, real[0].detach().double())
    assert distance(parts.by_path["unembedding"], g_out) < 1e-5
    if steps:
        without = torch.einsum("btv,btd->vd", d_logits, real[0].detach().double())
        assert distance(parts.by_path["unembedding"], without) > 0.1
    assert point.lookup_scale == pytest.approx(SCALED[name], rel=1e-5)


def test_a_padding_row_of_the_lookup_gets_no_gradient() -> None:
    point = checkpoint(BY_NAME["llama"].build(tied=True))
    inputs = some_inputs(point)
    inputs.ids[0, 3] = 0
    parts = batch_gradients(point, inputs, some_targets(inputs))
    assert point.model.get_input_embeddings().padding_idx == 0
    assert not parts.by_path["embedding"][0].any()
    assert parts.by_path["embedding"][int(inputs.ids[0, 4])].any()


def test_a_third_use_of_the_matrix_is_seen() -> None:
    point = checkpoint(BY_NAME["gpt2"].build(tied=True))
    inputs = some_inputs(point)
    parts = batch_gradients(point, inputs, some_targets(inputs), whole=True)
    assert parts.whole is not None
    assert module._law_errors(point, parts)[0] < 1e-6
    parts.by_path["embedding"] *= 1.001
    with pytest.raises(UnsupportedArchitectureError, match="do not add up"):
        module._law_errors(point, parts)


def test_nothing_of_the_model_changes() -> None:
    point = checkpoint(BY_NAME["gpt2"].build(tied=True))
    model = point.model
    model.train()
    before = [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)]
    values = [p.detach().clone() for p in model.parameters()]
    inputs = some_inputs(point)
    batch_gradients(point, inputs, some_targets(inputs), whole=True)
    with pytest.raises(SelectionError, match="No position"):
        batch_gradients(point, inputs, torch.full_like(inputs.ids, -1))
    assert before == [(n, id(p)) for n, p in model.named_parameters(remove_duplicate=False)]
    assert all(torch.equal(a, b) for a, b in zip(values, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert all(m.training for m in model.modules())
    assert not any(m._forward_hooks for m in model.modules())


def documents(seed: int = 0) -> list[list[int]]:
    """Token ids with very unequal frequencies."""
    generator = np.random.default_rng(seed)
    return [(3 + generator.geometric(0.05, size=40) % 150).tolist() for _ in range(20)]


def over_corpus(name: str, *, tied: bool, **options: Any) -> GradientPaths:
    point = checkpoint(BY_NAME[name].build(tied=tied))
    return gradients(point, documents(), window_tokens=20, max_targets=300, **options)


@pytest.mark.parametrize(("name", "options"), [("gpt2", {}), ("bert", {"mask_id": 4})])
def test_over_a_corpus_the_numbers_hang_together(name: str, options: dict[str, Any]) -> None:
    paths = over_corpus(name, tied=True, **options)
    assert paths.paths == ("embedding", "unembedding")
    assert paths.law_error < 1e-6
    assert paths.output_share == pytest.approx(paths.norms[1] / paths.norms.sum())
    np.testing.assert_allclose((paths.group_norms**2).sum(0), paths.norms**2, rtol=1e-6)
    assert paths.group_rows.sum() == 160
    # A row that does not occur gets no gradient through the lookup, and some through the output.
    assert paths.group_norms[-1, 1] > 0 == (0 if name == "bert" else paths.group_norms[-1, 0])
    a, b, c = *paths.norms, paths.cosine
    assert paths.additive_share == pytest.approx(
        (b * b + a * b * c) / (a * a + b * b + 2 * a * b * c)
    )
    assert len(paths.batch_output_share) == len(paths.batch_cosine) > 1


def test_an_encoder_decoder_has_three_paths() -> None:
    point = checkpoint(BY_NAME["bart"].build(tied=True))
    pairs = [(ids[:9], ids[9:20]) for ids in documents()]
    paths = gradients(point, pairs, max_targets=100)
    assert paths.paths == ("encoder embedding", "decoder embedding", "unembedding")
    assert paths.law_error < 1e-6
    assert (paths.norms > 0).all()
    with pytest.raises(PromptError, match="pairs"):
        gradients(point, "sample")


def test_an_untied_model_has_no_law_and_the_same_numbers() -> None:
    paths = over_corpus("gpt2", tied=False)
    assert np.isnan(paths.law_error)
    assert 0 < paths.output_share < 1
    assert np.isfinite(paths.cosine)


def test_the_seed_decides_the_batches() -> None:
    one, same, other = (over_corpus("gpt2", tied=True, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.norms, same.norms)
    assert not np.array_equal(one.norms, other.norms)


@pytest.mark.parametrize("options", [{"max_targets": 0}, {"batch_size": 0}, {"masked_share": 0.0}])
def test_options_that_leave_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SelectionError, match="expected"):
        gradients(checkpoint(BY_NAME["gpt2"].build()), documents(), **options)


def test_a_masked_model_without_a_mask_is_refused() -> None:
    with pytest.raises(SelectionError, match="mask_id is None"):
        gradients(checkpoint(BY_NAME["bert"].build()), documents())
