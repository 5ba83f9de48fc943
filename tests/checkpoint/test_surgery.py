"""Surgery keeps what it says it keeps, survives saving, and never reaches the user's model."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lens.checkpoint.checkpoint import Checkpoint
from lens.checkpoint.load import load
from lens.checkpoint.surgery import interpolate, reset_bias, save_checkpoint, tie, untie
from lens.checkpoint.tying import EQUAL_VALUES, SHARED_PARAMETER, UNTIED
from lens.errors import ExportError, SelectionError, ShapeError, UnsupportedArchitectureError
from tests.checkpoint.test_exactness import checkpoint, own_logits, some_inputs
from tests.checkpoint.tiny import BY_NAME

FAMILIES = (
    "gpt2",
    "gpt_neox",
    "gptj",
    "llama",
    "gemma",
    "gemma2",
    "cohere",
    "granite",
    "opt_project_out",
    "bloom",
    "mamba",
    "bert",
    "roberta",
    "albert",
    "bart",
    "marian",
)
CUTS: dict[str, Callable[[Checkpoint], Checkpoint]] = {
    "tie-input": lambda point: tie(point, keep="input"),
    "tie-output": lambda point: tie(point, keep="output"),
    "tie-mean": lambda point: tie(point, keep="mean"),
    "interpolate": lambda point: interpolate(point, 0.3),
    "rotate": lambda point: interpolate(point, 0.3, rotate=True),
}


def logits(point: Checkpoint) -> torch.Tensor:
    return own_logits(point, some_inputs(point))


def kept(point: Checkpoint) -> dict[str, Any]:
    """What of a model must not change, with the identity of each parameter."""
    named = list(point.model.named_parameters(remove_duplicate=False))
    return {
        "objects": [(name, id(p)) for name, p in named],
        "values": [p.detach().clone() for _, p in named],
        "config": point.model.config.to_dict(),
        "logits": logits(point),
        "flags": [m.training for m in point.model.modules()],
    }


def same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    values = zip(before.pop("values"), after.pop("values"), strict=True)
    equal = all(torch.equal(a, b) for a, b in values)
    equal &= torch.equal(before.pop("logits"), after.pop("logits"))
    return equal and before == after


@pytest.mark.parametrize("name", FAMILIES)
def test_an_untied_copy_gives_the_same_logits_and_survives_saving(
    name: str, tmp_path: Path
) -> None:
    point = checkpoint(BY_NAME[name].build(tied=True))
    before = kept(point)
    copy = untie(point)
    assert torch.equal(logits(copy), logits(point))
    assert copy.tie.verdict == EQUAL_VALUES
    assert copy.W_U is not copy.W_E
    for size, parts in (("5GB", 1), ("30KB", 2)):
        folder = save_checkpoint(copy, tmp_path / size, max_shard_size=size)
        assert (len(list(folder.glob("*.safetensors"))) >= 2) is (parts == 2)
        again = load(folder)
        assert torch.equal(logits(again), logits(point))
        assert again.tie.verdict == copy.tie.verdict
        assert again.tie.contradictions == ()
    assert same(before, kept(point))


@pytest.mark.parametrize(
    ("name", "cut"),
    [(name, cut) for name in FAMILIES for cut in ("tie-mean", "rotate")]
    + [
        (name, cut)
        for name in ("gpt2", "bert")
        for cut in ("tie-input", "tie-output", "interpolate")
    ],
)
def test_a_cut_copy_survives_saving_and_the_model_is_untouched(
    name: str, cut: str, tmp_path: Path
) -> None:
    point = checkpoint(BY_NAME[name].build(tied=False))
    before = kept(point)
    copy = CUTS[cut](point)
    assert copy.tie.verdict == (SHARED_PARAMETER if cut.startswith("tie") else UNTIED)
    assert not torch.equal(logits(copy), logits(point))
    again = load(save_checkpoint(copy, tmp_path / "saved"))
    assert torch.equal(logits(again), logits(copy))
    assert (again.tie.verdict, again.tie.contradictions) == (copy.tie.verdict, ())
    assert same(before, kept(point))


def count(point: Checkpoint) -> int:
    return sum(p.numel() for p in point.model.parameters())


def test_parameters_are_as_expected() -> None:
    tied = checkpoint(BY_NAME["llama"].build(tied=True))
    assert count(untie(tied)) == count(tied) + tied.tie.parameters_saved
    untied = checkpoint(BY_NAME["llama"].build(tied=False))
    assert count(tie(untied, keep="mean")) == count(untied) - untied.tie.parameters_spent
    assert count(interpolate(untied, 0.5)) == count(untied)


def test_what_is_kept_is_what_the_copy_holds() -> None:
    point = checkpoint(BY_NAME["llama"].build(tied=False))
    assert torch.equal(tie(point, keep="input").W_U, point.W_E)
    assert torch.equal(tie(point, keep="output").W_E, point.W_U)
    torch.testing.assert_close(tie(point, keep="mean").W_U, (point.W_E + point.W_U) / 2)


def test_tying_with_the_inputs_values_reads_as_the_input_lens() -> None:
    point = checkpoint(BY_NAME["bert"].build(tied=False))
    copy = tie(point, keep="input")
    state = torch.randn((2, 4, point.d_model), generator=torch.Generator().manual_seed(1))
    through = point.readout.through(point.W_E.detach())  # type: ignore[attr-defined]
    assert torch.equal(copy.readout.logits(state), through.logits(state))
    assert not torch.equal(copy.readout.logits(state), point.readout.logits(state))


def test_untying_undoes_tying_up_to_the_lost_matrix() -> None:
    point = checkpoint(BY_NAME["gpt2"].build(tied=True))
    again = tie(untie(point), keep="mean")
    assert again.tie.verdict == SHARED_PARAMETER
    assert torch.equal(logits(again), logits(point))


def test_the_ends_of_the_path_are_the_model_and_the_values_of_a_tie() -> None:
    point = checkpoint(BY_NAME["gpt2"].build(tied=False))
    assert torch.equal(logits(interpolate(point, 0)), logits(point))
    end = interpolate(point, 1.0)
    assert torch.equal(end.W_U, point.W_E)
    assert end.tie.verdict == EQUAL_VALUES
    assert not torch.equal(interpolate(point, 0.5).W_U, point.W_E)


def test_a_rotation_brings_the_lookup_nearer_and_keeps_its_lengths() -> None:
    point = checkpoint(BY_NAME["gpt2"].build(tied=False))
    plain, turned = (interpolate(point, 1.0, rotate=r).W_U.double() for r in (False, True))
    w_u = point.W_U.double()
    assert (turned - w_u).norm() < (plain - w_u).norm()
    torch.testing.assert_close(turned.norm(dim=1), plain.norm(dim=1), rtol=1e-5, atol=0)


def test_a_lookup_that_is_a_rotation_of_the_unembedding_is_brought_back() -> None:
    model = BY_NAME["gpt2"].build(tied=False)
    noise = torch.randn((64, 64), generator=torch.Generator().manual_seed(2))
    turn = torch.linalg.qr(noise).Q
    model.lm_head.weight.data = model.transformer.wte.weight.data @ turn
    point = checkpoint(model)
    turned = interpolate(point, 1.0, rotate=True).W_U
    torch.testing.assert_close(turned, point.W_U, rtol=0, atol=1e-6)
    assert float((interpolate(point, 1.0).W_U - point.W_U).detach().abs().max()) > 0.1


@pytest.mark.parametrize("name", ["gptj", "bert", "bart", "marian", "ctrl"])
def test_a_reset_bias_is_what_the_logits_lose(name: str, tmp_path: Path) -> None:
    point = checkpoint(BY_NAME[name].build(tied=True))
    copy = reset_bias(point)
    gone = (logits(point) - logits(copy)).double()
    spread = gone.flatten(0, 1).std(0).max()
    # The same for every row, up to the rounding of the logits; and something.
    assert float(spread) < 1e-5
    assert float(gone.abs().max()) > 0.1
    again = load(save_checkpoint(copy, tmp_path / "saved"))
    assert torch.equal(logits(again), logits(copy))
    assert again.tie.verdict == point.tie.verdict


def test_t5_says_that_it_comes_back_tied_and_does(tmp_path: Path) -> None:
    copy = untie(checkpoint(BY_NAME["t5"].build(tied=True)))
    assert copy.tie.verdict == EQUAL_VALUES
    assert any("comes back tied" in note for note in copy.origin.notes)
    again = load(save_checkpoint(copy, tmp_path / "saved"))
    assert again.tie.verdict == SHARED_PARAMETER
    assert torch.equal(logits(again), logits(copy))


def test_a_flag_that_changes_the_logits_is_refused() -> None:
    config = {"vocab_size": 160, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2}
    more = {"num_decoder_layers": 2, "num_heads": 4, "num_experts": 2, "decoder_start_token_id": 0}
    options = transformers.SwitchTransformersConfig(**config, **more)
    model = transformers.SwitchTransformersForConditionalGeneration(options).eval()
    point = checkpoint(model)
    with pytest.raises(UnsupportedArchitectureError, match="the flag does more than tie"):
        untie(point)
    assert model.config.tie_word_embeddings


def test_what_cannot_be_done_says_why() -> None:
    tied = checkpoint(BY_NAME["gpt2"].build(tied=True))
    untied = checkpoint(BY_NAME["gpt2"].build(tied=False))
    with pytest.raises(SelectionError, match="no tie to undo"):
        untie(untied)
    with pytest.raises(SelectionError, match="one already"):
        tie(tied, keep="input")
    with pytest.raises(SelectionError, match="no path"):
        interpolate(tied, 0.5)
    for alpha in (-0.1, 1.1, float("nan")):
        with pytest.raises(SelectionError, match="0 to 1"):
            interpolate(untied, alpha)
    with pytest.raises(SelectionError, match="keep is 'both'"):
        tie(untied, keep="both")
    with pytest.raises(SelectionError, match="no output bias"):
        reset_bias(tied)


def test_matrices_of_other_shapes_are_refused() -> None:
    model = BY_NAME["llama"].build(tied=False)
    padded = torch.cat([model.model.embed_tokens.weight.data, torch.zeros(8, 64)])
    model.model.embed_tokens = torch.nn.Embedding.from_pretrained(padded)
    with pytest.raises(ShapeError, match="168"):
        tie(checkpoint(model), keep="input")


def test_what_a_killed_run_left_is_no_hindrance_and_removed_when_it_is_old(tmp_path: Path) -> None:
    point = checkpoint(BY_NAME["gpt2"].build(tied=True))
    old, young, other = (
        tmp_path / name
        for name in (".cut.0123456789ab.partial", ".cut.ba9876543210.partial", "cut.part")
    )
    for folder in (old, young, other):
        (folder / "below").mkdir(parents=True)
        (folder / "below" / "model.safetensors").write_text("half")
    for one in (old / "below" / "model.safetensors", old / "below", old):
        os.utime(one, (0, 0))
    os.utime(young, (0, 0))
    assert save_checkpoint(point, tmp_path / "cut") == tmp_path / "cut"
    assert sorted(p.name for p in tmp_path.iterdir()) == [young.name, "cut", other.name]
    assert load(tmp_path / "cut").tie.is_tied


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    point = checkpoint(BY_NAME["gpt2"].build(tied=True))
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(ExportError, match="not empty"):
        save_checkpoint(point, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("name", [".", "", "a/.."])
def test_a_target_without_a_name_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ExportError, match="no new folder"):
        save_checkpoint(checkpoint(BY_NAME["gpt2"].build()), name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("training", [False, True])
def test_weights_divided_for_inference_are_saved_as_they_were_trained(
    training: bool, tmp_path: Path
) -> None:
    """RWKV divides by powers of two in place; saved so, it would be divided twice when loaded."""
    config = transformers.RwkvConfig(
        vocab_size=97,
        context_length=32,
        hidden_size=16,
        attention_hidden_size=16,
        num_hidden_layers=4,
        rescale_every=2,
    )
    torch.manual_seed(0)
    model = transformers.RwkvForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    stored = {name: p.detach().clone() for name, p in model.named_parameters()}
    point = checkpoint(model.train(training))
    point.logit_lens([4, 5, 6])
    ids = torch.tensor([[4, 5, 6, 7]])
    with torch.no_grad():
        own = point.model.eval()(ids).logits
    point.model.train(training)
    folder = save_checkpoint(point, tmp_path / "saved")
    again = transformers.RwkvForCausalLM.from_pretrained(folder)
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, stored[name]), name
    with torch.no_grad():
        assert torch.equal(again.eval()(ids).logits, own)
        assert torch.equal(point.model.eval()(ids).logits, own)
