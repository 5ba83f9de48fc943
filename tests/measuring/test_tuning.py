import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lens.checkpoint.readout import DirectReadout
from lens.errors import (
    ProvenanceError,
    ResultFileError,
    SelectionError,
    UnsupportedArchitectureError,
)
from lens.lenses.affine import AffineLens, AffineSource, load_affine, unembedding_hashes
from lens.measuring.measure import measure
from lens.measuring.tuning import Step, fit_ridge, fit_translators, tune
from tests.measuring.small import checkpoint, id_corpus

OPTIONS = {"window_tokens": 10}


@pytest.fixture(scope="module")
def tuned() -> AffineLens:
    fit, _ = id_corpus(40).split(fit_share=0.75)
    return tune(checkpoint(), fit, steps=40, positions=64, check_every=20, **OPTIONS)


def test_held_out_KL_is_below_the_logit_lens_at_every_layer(tuned: AffineLens) -> None:
    _, held_out = id_corpus(40).split(fit_share=0.75)
    model = checkpoint()
    plain = measure(model, held_out, **OPTIONS).mean("kl_bits")
    better = measure(model, held_out, lens=tuned, **OPTIONS).mean("kl_bits")
    assert np.all(better[:-1] < plain[:-1])
    assert better[-1] == 0.0


def rotated_states(readout: DirectReadout, rotation: torch.Tensor, seed: int) -> torch.Tensor:
    """Layer 0 holds the last states in a rotated basis: the true translator is known."""
    final = torch.randn(512, readout.d_model, generator=torch.Generator().manual_seed(seed))
    return torch.stack([final @ rotation, final])


@pytest.fixture(scope="module")
def rotation() -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    random = torch.randn(64, 64, generator=generator)
    # Half-way to a random rotation: near enough for 300 steps, far enough to ruin the reading.
    skew = 0.06 * (random - random.T)
    return torch.linalg.matrix_exp(skew)


def test_a_known_rotation_is_undone(rotation: torch.Tensor) -> None:
    model = checkpoint()
    readout = model.readout
    assert isinstance(readout, DirectReadout)
    batches = (rotated_states(readout, rotation, seed) for seed in range(100, 10_000))
    seen: list[Step] = []
    weight, bias = fit_translators(
        readout,
        batches,
        rotated_states(readout, rotation, 1),
        steps=300,
        learning_rate=5e-3,
        check_every=100,
        progress=seen.append,
    )
    none = torch.zeros_like(weight)
    lens = fitted(weight, bias)
    test = rotated_states(readout, rotation, 2)
    before, after = kl(readout, test[0], test[1]), kl(readout, lens.translate(0, test[0]), test[1])
    assert before > 0.03
    assert after < 0.02 * before
    assert kl(readout, fitted(none, bias * 0).translate(0, test[0]), test[1]) == before
    assert [s.step for s in seen] == [100, 200, 300]


def kl(readout: DirectReadout, states: torch.Tensor, final: torch.Tensor) -> float:
    p, q = (torch.log_softmax(readout.logits(s).double(), -1) for s in (final, states))
    return float((p.exp() * (p - q)).sum(-1).mean())


def fitted(weight: torch.Tensor, bias: torch.Tensor) -> AffineLens:
    source = AffineSource(model_id="m", unembedding_hash="", fitted_on="", options={})
    return AffineLens(name="tuned", weight=weight, bias=bias, source=source)


def test_a_layer_that_does_not_get_better_keeps_the_identity() -> None:
    model = checkpoint()
    assert isinstance(model.readout, DirectReadout)
    same = torch.randn(2, 50, 64, generator=torch.Generator().manual_seed(0))
    same[0] = same[1]
    noise = iter(lambda: torch.randn(2, 50, 64), None)
    weight, bias = fit_translators(
        model.readout, noise, same, steps=5, learning_rate=0.1, check_every=1
    )
    assert torch.count_nonzero(weight) == torch.count_nonzero(bias) == 0


def test_ridge_finds_the_linear_map_of_its_own_states() -> None:
    model = checkpoint()
    fit, held_out = id_corpus(60).split(fit_share=0.9)
    ridge = fit_ridge(model, fit, **OPTIONS)
    ids = [list(d.ids or ())[:10] for d in held_out.documents]
    states = model.capture(model.inputs_of(ids), layers=range(model.n_layers + 1))
    final = states[model.n_layers][:, 1:]
    for layer in range(model.n_layers):
        own = states[layer][:, 1:]
        moved = ridge.translate(layer, own)
        assert float((moved - final).square().sum()) < float((own - final).square().sum())
    assert torch.equal(ridge.translate(model.n_layers, final), final)


def test_fitting_leaves_no_gradient_in_the_model() -> None:
    model = checkpoint()
    tune(model, id_corpus(6), steps=2, positions=16, **OPTIONS)
    assert all(p.grad is None for p in model.model.parameters())
    assert all(p.requires_grad for p in model.model.parameters())


def test_the_same_seed_fits_the_same_lens() -> None:
    one, other, third = (
        tune(checkpoint(), id_corpus(6), steps=3, positions=16, seed=seed, check_every=1, **OPTIONS)
        for seed in (0, 0, 1)
    )
    assert one.hash == other.hash != third.hash


def test_a_lens_reads_back_equal_and_is_refused_by_another_model(
    tuned: AffineLens, tmp_path: Path
) -> None:
    back = load_affine(tuned.save(tmp_path / "lens"))
    assert back.hash == tuned.hash
    assert back.source == tuned.source
    back.check(checkpoint())
    with pytest.raises(ProvenanceError, match="unembedding is another"):
        measure(checkpoint("gpt_neox"), id_corpus(3), lens=back, **OPTIONS)
    with pytest.raises(ProvenanceError, match="3 translators"):
        back.check(checkpoint(n_layers=5))
    with pytest.raises(SelectionError, match="0 to 3"):
        back.translate(4, torch.zeros(1, 64))
    with pytest.raises(ResultFileError, match="neither"):
        load_affine(tmp_path)
    (tmp_path / "lens" / "translators.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ResultFileError, match="cannot be read"):
        load_affine(tmp_path / "lens")


def test_the_published_format_loads_with_translator_i_after_i_blocks(tmp_path: Path) -> None:
    model = checkpoint()
    state = {f"{i}.weight": torch.full((64, 64), float(i)) for i in range(3)}
    state |= {f"{i}.bias": torch.full((64,), 10.0 * i) for i in range(3)}
    torch.save(state, tmp_path / "params.pt")
    config = {
        "base_model_name_or_path": "tiny",
        "d_model": 64,
        "num_hidden_layers": 3,
        "bias": True,
        "lens_type": "linear_tuned_lens",
        "unembed_hash": unembedding_hashes(model)[1],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    lens = load_affine(tmp_path)
    lens.check(model)
    ones = torch.ones(1, 64)
    for layer in range(3):
        assert torch.equal(lens.translate(layer, ones), ones + 64.0 * layer + 10.0 * layer)
    (tmp_path / "config.json").write_text(json.dumps({**config, "unembed_hash": "0" * 64}))
    with pytest.raises(ProvenanceError, match="unembedding is another"):
        load_affine(tmp_path).check(model)


def test_without_a_direct_readout_only_ridge_is_fitted() -> None:
    model = checkpoint()
    model.readout = model.replay
    with pytest.raises(UnsupportedArchitectureError, match="fit_ridge needs none"):
        tune(model, id_corpus(6), **OPTIONS)
    assert fit_ridge(model, id_corpus(6), **OPTIONS).name == "ridge"
