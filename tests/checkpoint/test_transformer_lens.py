"""TransformerLens both ways: same numbers where it reads, and nothing of the user's changes."""

import logging
import subprocess
import sys
from typing import Any

import pytest
import torch

import lens
from lens.checkpoint.transformer_lens import hook_name, layer_of_hook
from lens.errors import SelectionError, UnsupportedArchitectureError
from tests.checkpoint.tiny import BY_NAME

IDS = [5, 6, 7, 8, 9]


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "cohere", "opt", "gpt_neox", "mamba"])
def test_every_layer_is_what_transformer_lens_reads_there(name: str) -> None:
    from transformer_lens.tools.analysis.logit_lens import logit_lens

    point = lens.load(BY_NAME[name].build())
    bridge = point.to_transformer_lens()
    theirs = logit_lens(bridge, torch.tensor([IDS]), positions=None).readout.values[:, 0]
    ours = point.readout.logits(point.residual_states(IDS).states)
    assert theirs.shape == ours.shape
    # The bridge runs eager attention, which adds in another order: rounding alone may differ.
    torch.testing.assert_close(ours, theirs, atol=5e-6, rtol=0)
    assert not torch.allclose(ours[:-1], theirs[1:], atol=1e-2)


@pytest.mark.parametrize("tied", [True, False])
def test_there_and_back_is_the_same_model(tied: bool) -> None:
    model = BY_NAME["gpt2"].build(tied=tied)
    with torch.no_grad():
        before = model(torch.tensor([IDS])).logits
    names = {name: type(module) for name, module in model.named_modules()}
    point = lens.load(model)
    back = lens.load(point.to_transformer_lens())
    assert back.origin.format == "transformer_lens"
    assert back.tie.is_tied is tied
    torch.testing.assert_close(back.W_U, point.W_U, atol=0, rtol=0)
    a, b = point.logit_lens(IDS), back.logit_lens(IDS)
    assert abs(a.entropy_bits - b.entropy_bits).max() < 2e-5
    with torch.no_grad():
        assert torch.equal(model(torch.tensor([IDS])).logits, before)
    assert {name: type(module) for name, module in model.named_modules()} == names


def test_a_class_without_an_adapter_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedArchitectureError, match="no adapter for CTRLLMHeadModel"):
        lens.load(BY_NAME["ctrl"].build()).to_transformer_lens()


def test_a_layer_goes_by_the_name_of_its_hook() -> None:
    point = lens.load(BY_NAME["gpt2"].build())
    names = ["blocks.0.hook_resid_pre", "blocks.1.hook_resid_post", "blocks.2.hook_resid_pre"]
    assert [layer_of_hook(name) for name in names] == [0, 2, 2]
    assert [layer_of_hook(hook_name(layer)) for layer in range(4)] == [0, 1, 2, 3]
    by_name, by_number = (
        point.logit_lens(IDS, layers=names[:2]),
        point.logit_lens(IDS, layers=[0, 2]),
    )
    assert (by_name.top_ids == by_number.top_ids).all()
    assert by_name.layers.tolist() == [0, 2]
    with pytest.raises(SelectionError, match="names no layer"):
        point.logit_lens(IDS, layers=["blocks.1.hook_mlp_out"])
    with pytest.raises(SelectionError, match="no layer"):
        point.logit_lens(IDS, layers=["blocks.7.hook_resid_post"])


def test_the_state_at_a_hook_is_the_state_of_its_layer() -> None:
    point = lens.load(BY_NAME["llama"].build())
    bridge = point.to_transformer_lens()
    _, cache = bridge.run_with_cache(torch.tensor([IDS]))
    for layer in range(point.n_layers + 1):
        ours = point.residual_states(IDS, layers=[hook_name(layer)]).at(layer)
        torch.testing.assert_close(ours, cache[hook_name(layer)][0], atol=5e-6, rtol=0)


def test_loading_and_reading_do_not_import_transformer_lens() -> None:
    code = (
        "import sys, lens; from tests.checkpoint.tiny import BY_NAME; "
        "p = lens.load(BY_NAME['gpt2'].build()); "
        "p.logit_lens([5, 6], layers=['blocks.0.hook_resid_pre']); "
        "assert 'transformer_lens' not in sys.modules; p.to_transformer_lens(); "
        "assert 'transformer_lens' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-600:]


def test_a_bridge_is_made_without_installing_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"a process was started: {args}")

    monkeypatch.setattr(subprocess, "check_call", refuse)
    monkeypatch.setattr(subprocess, "run", refuse)
    level = logging.getLogger("transformers").level
    lens.load(BY_NAME["llama"].build()).to_transformer_lens()
    assert logging.getLogger("transformers").level == level
