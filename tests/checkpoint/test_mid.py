"""resid_mid, attn_out and mlp_out are the model's own and add up, or are refused with why."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lens.checkpoint import mid as module
from lens.checkpoint.additions import passages
from lens.checkpoint.block_states import BlockStates
from lens.checkpoint.checkpoint import Checkpoint
from lens.checkpoint.inputs import forward_arguments
from lens.checkpoint.layer_numbers import resolve_layers
from lens.checkpoint.mid import MidPoint, parts_of
from lens.errors import CaptureError, SelectionError, UnsupportedArchitectureError
from tests.checkpoint.test_exactness import checkpoint
from tests.checkpoint.tiny import BY_NAME, N_LAYERS

IDS = [5, 6, 7, 8, 9]
SEQUENTIAL = (
    "gpt2", "gpt_neo", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text",
    "granite", "olmo", "olmo2", "stablelm", "minicpm3", "nanochat", "opt", "bloom", "mpt", "xglm",
    "ctrl", "t5",
)  # fmt: skip
REFUSED = {
    "gptj": "in parallel and adds their sum in one step",
    "codegen": "in parallel and adds their sum in one step",
    "gpt_neox": "in parallel and adds their sum in one step",
    "phi": "in parallel and adds their sum in one step",
    "falcon": "in parallel",
    "cohere": "in parallel: the MLP does not read what attention wrote",
    "mamba": "adds to the stream once",
    "rwkv": "does not add to its input",
    "bert": "layer_norm",
    "roberta": "layer_norm",
    "albert": "layer_norm",
    "opt_project_out": "layer_norm",
    "bart": "layer_norm",
    "marian": "layer_norm",
}
# Of sixty-four additions in float32, each rounded to half a unit in the last place.
ROUNDING = 4 * torch.finfo(torch.float32).eps


def states_of(point: Checkpoint, **options: Any) -> BlockStates:
    return point.block_states(IDS, source=[5, 6, 7] if point.seq2seq else None, **options)


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_the_parts_add_up_to_the_states_that_pass_by(name: str) -> None:
    point = checkpoint(BY_NAME[name].build())
    found = states_of(point)
    layers = point.residual_states(IDS, source=[5, 6, 7] if point.seq2seq else None).states
    assert found.blocks == tuple(range(N_LAYERS))
    assert torch.equal(found.resid_pre, layers[:-1])
    assert torch.equal(found.resid_post, layers[1:])
    size = found.resid_post.abs().max()
    for before, added, after in (
        (found.resid_pre, found.attn_out, found.resid_mid),
        (found.resid_mid, found.mlp_out, found.resid_post),
    ):
        torch.testing.assert_close(before + added, after, rtol=0, atol=float(ROUNDING * size))
        assert (added.abs().amax(-1) > 1e-3 * size).all()


@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_a_model_without_a_mid_is_refused_with_the_reason(name: str, reason: str) -> None:
    point = checkpoint(BY_NAME[name].build())
    source = [5, 6, 7] if point.seq2seq else None
    with pytest.raises(UnsupportedArchitectureError, match=f"has no resid_mid: .*{reason}"):
        point.logit_lens(IDS, points="mid", source=source)
    # What lies between blocks is read all the same.
    assert point.logit_lens(IDS, source=source).layers.tolist() == [0, 1, 2, 3]


MODULES = {
    "llama": ("post_attention_layernorm", "self_attn", "mlp", 1.0),
    "gpt2": ("ln_2", "attn", "mlp", 1.0),
    "gemma2": ("pre_feedforward_layernorm", "post_attention_layernorm", None, 1.0),
    "olmo2": ("mlp", "post_attention_layernorm", "post_feedforward_layernorm", 1.0),
    "granite": ("post_attention_layernorm", "self_attn", "mlp", 0.5),
}


@pytest.mark.parametrize("name", MODULES)
def test_mid_is_what_the_next_module_reads_and_parts_are_what_is_added(name: str) -> None:
    """After a norm that follows the module (Gemma 2, OLMo 2) and after a factor (Granite)."""
    tiny = BY_NAME[name]
    if name == "granite":
        tiny = dataclasses.replace(tiny, config={**tiny.config, "residual_multiplier": 0.5})
    point = checkpoint(tiny.build())
    reader, attention, mlp, factor = MODULES[name]
    mlp = mlp or "post_feedforward_layernorm"
    seen: dict[str, Tensor] = {}

    def keep(what: str, *, given: bool) -> Any:
        def hook(_: Any, args: Any, output: Any) -> None:
            made = output[0] if isinstance(output, tuple) else output
            seen[what] = (args[0] if given else made)[0].detach().clone()

        return hook

    block: Any = point.trunk.blocks[1]
    handles = [
        block.get_submodule(reader).register_forward_hook(keep("mid", given=True)),
        block.get_submodule(attention).register_forward_hook(keep("attention", given=False)),
        block.get_submodule(mlp).register_forward_hook(keep("mlp", given=False)),
    ]
    found = states_of(point, blocks=[1])
    for handle in handles:
        handle.remove()
    assert torch.equal(found.resid_mid[0], seen["mid"])
    assert torch.equal(found.attn_out[0], seen["attention"] * factor)
    assert torch.equal(found.mlp_out[0], seen["mlp"] * factor)


@pytest.mark.parametrize("silent", ["self_attn.o_proj", "mlp.down_proj"])
def test_a_silenced_part_leaves_the_state_as_it_was(silent: str) -> None:
    point = checkpoint(BY_NAME["llama"].build())
    block: Any = point.trunk.blocks[1]
    with torch.no_grad():
        block.get_submodule(silent).weight.zero_()
    found = states_of(point)
    attention = silent.startswith("self_attn")
    part = found.attn_out if attention else found.mlp_out
    assert not part[1].any()
    assert part[0].any()
    before, after = (
        (found.resid_pre, found.resid_mid) if attention else (found.resid_mid, found.resid_post)
    )
    assert torch.equal(before[1], after[1])
    assert not torch.equal(before[0], after[0])


def test_in_a_decoder_attn_out_holds_both_attentions() -> None:
    point = checkpoint(BY_NAME["t5"].build())
    assert (point.mid.before, point.mid.total) == ((2,) * N_LAYERS, (3,) * N_LAYERS)
    one, other = states_of(point), point.block_states(IDS, source=[9, 10])
    assert torch.equal(one.resid_pre[0], other.resid_pre[0])
    assert not torch.allclose(one.attn_out[0], other.attn_out[0], atol=1e-2)


def test_a_block_that_makes_other_additions_than_when_found_is_an_error() -> None:
    point = checkpoint(BY_NAME["llama"].build())
    point.__dict__["mid"] = MidPoint((1, 1, 1), (2, 3, 2))
    with pytest.raises(CaptureError, match="Block 1 made 2 additions"):
        states_of(point)
    assert states_of(point, blocks=[0, 2]).blocks == (0, 2)


def test_states_that_do_not_add_up_are_an_error() -> None:
    point = checkpoint(BY_NAME["llama"].build())
    inputs = point.inputs_of([IDS])
    with torch.no_grad():
        arguments = forward_arguments(point.model, inputs, seq2seq=False)
        found = passages(point.trunk, lambda: point.model(**arguments), length=5)[1]
    assert torch.equal(parts_of(found, point.mid, 1).resid_mid, found.states[1])
    first, second = found.added
    for wrong in ((first * 1.0001, second), (first, second * 1.0001), (second, first)):
        with pytest.raises(CaptureError, match="is off by"):
            parts_of(dataclasses.replace(found, added=wrong), point.mid, 1)


def test_without_the_disturbance_no_part_is_taken_for_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What tells attention from MLP is the reaction: with none, the order is not believed."""
    monkeypatch.setattr(module, "_differences", lambda rows: (False, False))
    with pytest.raises(UnsupportedArchitectureError, match="in the order MLP, MLP"):
        _ = checkpoint(BY_NAME["llama"].build()).mid


def test_mids_are_read_as_rows_between_the_layers() -> None:
    point = checkpoint(BY_NAME["llama"].build())
    post = point.logit_lens(IDS)
    mids = point.logit_lens(IDS, points="mid")
    both = point.logit_lens(IDS, points="all")
    assert mids.layers.tolist() == [0.5, 1.5, 2.5]
    assert both.layers.tolist() == [0, 0.5, 1, 1.5, 2, 2.5, 3]
    assert both.layer_names == ("0", "0.5", "1", "1.5", "2", "2.5", "3")
    for name in ("top_ids", "kl_bits", "entropy_bits"):
        np.testing.assert_allclose(getattr(both, name)[::2], getattr(post, name), atol=5e-5)
        np.testing.assert_allclose(getattr(both, name)[1::2], getattr(mids, name), atol=5e-5)
    assert (both.kl_bits[-1] == 0).all()
    assert (mids.kl_bits > 0).all()
    read = point.read(point.residual_states(IDS, points="mid"), layer=1.5, top_k=5)
    assert (read.top_ids == mids.top_ids[1]).all()
    assert any("resid_mid" in note for note in mids.provenance.notes)
    assert not any("resid_mid" in note for note in post.provenance.notes)
    picked = both.select(layers=[1.5, 3])
    assert picked.layers.tolist() == [1.5, 3]


def test_a_mid_goes_by_its_number_or_by_its_hook() -> None:
    point = checkpoint(BY_NAME["gpt2"].build())
    names = ["blocks.1.hook_resid_mid", "blocks.1.hook_resid_post"]
    by_name = point.logit_lens(IDS, layers=names)
    assert by_name.layers.tolist() == [1.5, 2]
    assert (by_name.top_ids == point.logit_lens(IDS, layers=[1.5, 2]).top_ids).all()
    found = states_of(point)
    states = point.residual_states(IDS, layers=[1.5, 1], positions=[-1])
    assert torch.equal(states.at(1.5)[0], found.at("blocks.1.hook_resid_mid")[-1])
    for part in ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post"):
        assert torch.equal(found.at(f"blocks.2.hook_{part}"), getattr(found, part)[2])
    with pytest.raises(SelectionError, match="is none of"):
        found.at("blocks.2.hook_q")
    with pytest.raises(SelectionError, match="Block 3 was not captured"):
        found.at("blocks.3.hook_mlp_out")


@pytest.mark.parametrize(
    ("layers", "points", "expected"),
    [
        (None, "mid", [0.5, 1.5]),
        ([-1], "post", [2]),
        ([-1], "mid", [1.5]),
        ([-2], "all", [1.5]),
        ([1.5, 0], "post", [1.5, 0]),
    ],
)
def test_layers_are_counted_among_the_points(layers: Any, points: str, expected: Any) -> None:
    found = resolve_layers(layers, 2, points=points)
    assert found == expected
    assert [type(one) for one in found] == [type(one) for one in expected]


@pytest.mark.parametrize(
    ("layers", "points"),
    [([1], "mid"), ([2.5], "post"), ([0.25], "post"), ([-3], "mid"), ([], "all"), ([1, 1], "all")],
)
def test_layers_that_are_none_are_refused(layers: Any, points: str) -> None:
    with pytest.raises(SelectionError):
        resolve_layers(layers, 2, points=points)
    with pytest.raises(SelectionError, match="points is"):
        resolve_layers(None, 2, points="attn")


def test_an_edit_within_a_block_is_refused_and_mids_of_an_edited_run_are_read() -> None:
    point = checkpoint(BY_NAME["llama"].build())
    with pytest.raises(SelectionError, match="lies within a block"):
        point.edit(1.5, None, lambda states: states)
    plain = states_of(point)
    with point.edit(1, [2], lambda states: states + 1):
        edited = states_of(point)
    # What the block itself returned, before the edit; what follows sees the edit.
    assert torch.equal(edited.resid_post[0], plain.resid_post[0])
    changed = plain.resid_pre[1].clone()
    changed[2] += 1
    assert torch.equal(edited.resid_pre[1], changed)
    assert torch.equal(edited.resid_mid[1, :2], plain.resid_mid[1, :2])
    assert not torch.equal(edited.resid_mid[1, 2:], plain.resid_mid[1, 2:])


def test_transformer_lens_sees_the_same_at_its_hooks() -> None:
    point = checkpoint(BY_NAME["llama"].build())
    _, cache = point.to_transformer_lens().run_with_cache(torch.tensor([IDS]))
    found = states_of(point)
    for block in range(N_LAYERS):
        for part in ("attn_out", "resid_mid", "mlp_out"):
            name = f"blocks.{block}.hook_{part}"
            torch.testing.assert_close(found.at(name), cache[name][0], atol=5e-6, rtol=0)


def test_nothing_stays_on_the_model_and_training_flags_return() -> None:
    point = checkpoint(BY_NAME["gpt2"].build())
    point.model.train()
    states_of(point)
    with pytest.raises(UnsupportedArchitectureError):
        _ = checkpoint(BY_NAME["cohere"].build()).mid
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in point.model.modules())
    assert all(m.training for m in point.model.modules())


def test_a_batch_of_prompts_reads_its_mids_each() -> None:
    point = checkpoint(BY_NAME["llama"].build())
    short, long = point.logit_lens([IDS[:3], IDS], points="mid")
    np.testing.assert_allclose(long.kl_bits, point.logit_lens(IDS, points="mid").kl_bits, atol=1e-4)
    assert short.layers.tolist() == [0.5, 1.5, 2.5]
