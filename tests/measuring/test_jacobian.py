"""The Jacobian lens is autograd's Jacobian, and exact where the trunk is linear."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lens.checkpoint.checkpoint import Checkpoint
from lens.checkpoint.inputs import forward_arguments
from lens.checkpoint.origin import Origin
from lens.errors import PromptError, ProvenanceError, ResultFileError, SelectionError
from lens.lenses.affine import load_affine
from lens.measuring.jacobian import fit_jacobian, jacobians, load_jacobian
from lens.measuring.measure import measure
from lens.measuring.windows import windows_of
from tests.checkpoint.tiny import BY_NAME, D_MODEL, N_LAYERS
from tests.measuring.small import checkpoint, id_corpus

OPTIONS: dict[str, Any] = {"window_tokens": 10, "first_position": 1}


class LinearBlock(torch.nn.Module):
    """h + M h, each position by itself."""

    def __init__(self, seed: int, constant: float):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.matrix = torch.nn.Parameter(0.1 * torch.randn(D_MODEL, D_MODEL, generator=generator))
        self.constant = torch.nn.Parameter(constant * torch.randn(D_MODEL, generator=generator))

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states + hidden_states @ self.matrix.T + self.constant


def linear(constant: float = 0.0) -> Checkpoint:
    model = BY_NAME["gpt2"].build(tied=False)
    model.transformer.h = torch.nn.ModuleList(
        LinearBlock(seed, constant) for seed in range(N_LAYERS)
    )
    return Checkpoint.from_model(model, tokenizer=None, origin=Origin(model_id="l", format="m"))


def test_on_a_linear_trunk_it_is_exact() -> None:
    model = linear()
    lens = fit_jacobian(model, id_corpus(3), **OPTIONS)
    plain = measure(model, id_corpus(3), window_tokens=10).mean("kl_bits")
    exact = measure(model, id_corpus(3), lens=lens, window_tokens=10).mean("kl_bits")
    assert np.all(plain[:-1] > 1e-3)
    assert np.all(exact < 1e-5)
    product = torch.eye(D_MODEL)
    for block in reversed(model.model.transformer.h):
        product = product @ (torch.eye(D_MODEL) + block.matrix.detach())
    torch.testing.assert_close(lens.weight[0] + torch.eye(D_MODEL), product, rtol=1e-4, atol=1e-5)


def test_a_constant_that_the_trunk_adds_is_missed() -> None:
    model = linear(constant=1.0)
    lens = fit_jacobian(model, id_corpus(3), **OPTIONS)
    found = measure(model, id_corpus(3), lens=lens, window_tokens=10).mean("kl_bits")
    assert found[0] > 1e-2


@pytest.mark.parametrize("rows_at_once", [1, 7, 100])
def test_it_is_autograds_jacobian_summed_over_later_positions(rows_at_once: int) -> None:
    model = checkpoint()
    window = windows_of(model, id_corpus(1), window_tokens=6).by_document[0][0]
    found = jacobians(model, window, first_position=1, rows_at_once=rows_at_once)
    arguments = forward_arguments(
        model.model, model.inputs_of([window.ids.tolist()]), seq2seq=False
    )
    for layer in (0, 2):
        last: list[torch.Tensor] = []

        def final(states: torch.Tensor, layer: int = layer, last: Any = last) -> torch.Tensor:
            last.clear()
            with (
                model.edit(layer, None, lambda _: states),
                model.edit(model.n_layers, None, lambda s: (last.append(s), s)[1]),
            ):
                model.model(**arguments)
            return last[0][0]

        states = model.capture(model.inputs_of([window.ids.tolist()]), layers=[layer])[layer]
        whole = torch.autograd.functional.jacobian(final, states)[:, :, 0]  # type: ignore[index]
        # [pos out, d out, pos in, d in]; position 0 and the last do not count.
        expected = whole[1:-1, :, 1:-1].sum(0).mean(1)
        torch.testing.assert_close(found[layer].float(), expected, rtol=1e-3, atol=1e-5)
        own = torch.stack([whole[p, :, p] for p in range(1, 5)]).mean(0)
        assert float((own - expected).norm()) > 1e-3  # attention does carry it on


def test_the_model_and_its_hooks_stay_as_they_were() -> None:
    model = checkpoint()
    before = [p.detach().clone() for p in model.model.parameters()]
    hooks = [len(m._forward_hooks) for m in model.model.modules()]
    fit_jacobian(model, id_corpus(1), **OPTIONS)
    assert all(torch.equal(a, b) for a, b in zip(before, model.model.parameters(), strict=True))
    assert all(p.grad is None for p in model.model.parameters())
    assert hooks == [len(m._forward_hooks) for m in model.model.modules()]


def published(tmp_path: Path, **changed: Any) -> Path:
    layers = list(range(N_LAYERS - 1))
    held = {
        "J": {i: torch.full((D_MODEL, D_MODEL), float(i + 1)).half() for i in layers},
        "n_prompts": 7,
        "source_layers": layers,
        "d_model": D_MODEL,
    }
    held |= changed
    torch.save({k: v for k, v in held.items() if v is not None}, tmp_path / "lens.pt")
    return tmp_path / "lens.pt"


def test_a_published_lens_acts_on_the_output_of_its_block(tmp_path: Path) -> None:
    model = checkpoint()
    lens = load_jacobian(published(tmp_path), model)
    ones = torch.ones(1, D_MODEL)
    assert torch.equal(lens.translate(0, ones), ones)  # the embedding has none
    for layer in range(1, N_LAYERS):
        torch.testing.assert_close(lens.translate(layer, ones), ones * D_MODEL * layer)
    assert lens.source.options == {"n_prompts": 7, "layers_without": [0]}
    assert measure(model, id_corpus(2), lens=lens, window_tokens=10).mean("kl_bits")[-1] == 0
    back = load_affine(lens.save(tmp_path / "ours"))
    assert (back.hash, back.name) == (lens.hash, "jacobian")


def test_what_is_no_lens_of_this_model_is_refused(tmp_path: Path) -> None:
    model = checkpoint()
    with pytest.raises(ResultFileError, match="no n_prompts"):
        load_jacobian(published(tmp_path, n_prompts=None), model)
    with pytest.raises(ResultFileError, match="other layers"):
        load_jacobian(published(tmp_path, source_layers=[0]), model)
    with pytest.raises(ProvenanceError, match="blocks 0 to 2"):
        load_jacobian(published(tmp_path, J={2: torch.eye(64)}, source_layers=[2]), model)
    narrow = published(tmp_path, J={0: torch.eye(32)}, source_layers=[0], d_model=32)
    with pytest.raises(ProvenanceError, match="width 32"):
        load_jacobian(narrow, model)
    (tmp_path / "x.pt").write_bytes(b"nonsense")
    with pytest.raises(ResultFileError, match="cannot be read"):
        load_jacobian(tmp_path / "x.pt", model)
    with pytest.raises(PromptError, match="longer than 17"):
        fit_jacobian(model, id_corpus(2), window_tokens=10)
    with pytest.raises(SelectionError, match="max_windows 0"):
        fit_jacobian(model, id_corpus(2), max_windows=0)
