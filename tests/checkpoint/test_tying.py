"""The verdict on every way in which two matrices can be, or fail to be, one."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from lens.checkpoint.load import load
from lens.checkpoint.tying import (
    EQUAL_TO_A_SCALAR,
    EQUAL_VALUES,
    SHARED_PARAMETER,
    SHARED_STORAGE,
    UNREAD,
    UNTIED,
    TieReport,
    report_tie,
)
from lens.errors import IncompleteCheckpointError
from tests.checkpoint.tiny import BY_NAME

EMBEDDING, HEAD = "transformer.wte.weight", "lm_head.weight"


def report(model: Any) -> TieReport:
    return report_tie(model, None, seq2seq=bool(model.config.is_encoder_decoder))


def gpt2(*, tied: bool) -> Any:
    return BY_NAME["gpt2"].build(tied=tied)


def saved(folder: Path, *, flag: bool, change: Callable[[dict[str, Any]], None]) -> Path:
    """An untied GPT-2 on disk, its tensors changed, with this flag in its config."""
    model = gpt2(tied=False)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    config = transformers.AutoConfig.from_pretrained(folder)
    config.tie_word_embeddings = flag
    config.save_pretrained(folder)
    return folder


def as_it_is(tensors: dict[str, Any]) -> None:
    assert not torch.equal(tensors[EMBEDDING], tensors[HEAD])


def equal(tensors: dict[str, Any]) -> None:
    tensors[HEAD] = tensors[EMBEDDING].clone()


def without(*names: str) -> Callable[[dict[str, Any]], None]:
    def drop(tensors: dict[str, Any]) -> None:
        for name in names:
            del tensors[name]

    return drop


def test_a_tied_save_comes_back_as_one_parameter(tmp_path: Path) -> None:
    gpt2(tied=True).save_pretrained(tmp_path)
    tie = load(tmp_path).tie
    assert tie.verdict == SHARED_PARAMETER
    assert tie.contradictions == ()
    assert tie.files_held == {EMBEDDING: True, HEAD: False}


def test_both_matrices_present_and_different_stay_untied_whatever_the_flag(tmp_path: Path) -> None:
    point = load(saved(tmp_path, flag=True, change=as_it_is))
    tie = point.tie
    assert tie.verdict == UNTIED
    assert tie.files_held == {EMBEDDING: True, HEAD: True}
    assert "the config says tied, but the matrices are two tensors" in tie.contradictions
    warning = f"a later tie_weights() would overwrite {HEAD} with {EMBEDDING}"
    assert warning in tie.contradictions
    # And so it would.
    other = copy.deepcopy(point.model)
    other.tie_weights()
    assert torch.equal(other.lm_head.weight, point.model.transformer.wte.weight)
    assert report(other).verdict == SHARED_PARAMETER


def test_a_flag_that_agrees_is_no_contradiction(tmp_path: Path) -> None:
    tie = load(saved(tmp_path, flag=False, change=as_it_is)).tie
    assert (tie.verdict, tie.contradictions) == (UNTIED, ())


def test_equal_matrices_with_the_flag_off_stay_two(tmp_path: Path) -> None:
    tie = load(saved(tmp_path, flag=False, change=equal)).tie
    assert tie.verdict == EQUAL_VALUES
    assert not tie.is_tied
    assert tie.parameters_spent == 160 * 64


def test_equal_matrices_with_the_flag_on_become_one(tmp_path: Path) -> None:
    tie = load(saved(tmp_path, flag=True, change=equal)).tie
    assert tie.verdict == SHARED_PARAMETER
    assert any("in memory they are one" in sentence for sentence in tie.contradictions)


@pytest.mark.parametrize(
    ("flag", "gone"),
    [(False, (HEAD,)), (False, (EMBEDDING,)), (True, (EMBEDDING, HEAD))],
    ids=["head", "embedding", "both"],
)
def test_a_matrix_that_would_be_random_is_an_error(
    tmp_path: Path, flag: bool, gone: tuple[str, ...]
) -> None:
    with pytest.raises(IncompleteCheckpointError, match="would be random"):
        load(saved(tmp_path, flag=flag, change=without(*gone)))


@pytest.mark.parametrize("gone", [EMBEDDING, HEAD])
def test_with_the_flag_on_either_matrix_is_enough(tmp_path: Path, gone: str) -> None:
    tie = load(saved(tmp_path, flag=True, change=without(gone))).tie
    assert tie.verdict == SHARED_PARAMETER
    assert tie.contradictions == ()


def test_assigning_a_state_dict_breaks_the_tie_and_is_told() -> None:
    model = gpt2(tied=True)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    tie = report(model)
    assert tie.verdict == EQUAL_VALUES
    assert tie.contradictions == (
        "the config says tied, but the matrices are two tensors of equal values",
        f"a later tie_weights() would make {HEAD} and {EMBEDDING} one tensor",
    )


def test_copying_a_state_dict_keeps_the_tie() -> None:
    model = gpt2(tied=True)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    assert report(model).verdict == SHARED_PARAMETER


def test_two_parameters_on_one_storage_are_told_from_one_parameter() -> None:
    model = gpt2(tied=False)
    model.lm_head.weight = nn.Parameter(model.transformer.wte.weight.data)
    assert model.lm_head.weight is not model.transformer.wte.weight
    assert report(model).verdict == SHARED_STORAGE


@pytest.mark.parametrize(("tied", "verdict"), [(True, SHARED_PARAMETER), (False, UNREAD)])
def test_on_the_meta_device_identity_is_known_and_values_are_not(tied: bool, verdict: str) -> None:
    config = gpt2(tied=tied).config
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    assert (report(model).verdict, report(model).is_tied) == (verdict, tied)


def test_a_move_to_the_meta_device_breaks_the_tie_and_no_verdict_is_made_up() -> None:
    tie = report(gpt2(tied=True).to("meta"))
    assert (tie.verdict, tie.max_abs_difference) == (UNREAD, None)
    assert "the config says tied, but the matrices are two tensors" in tie.contradictions


@pytest.mark.parametrize("factor", [-0.25, 1.7, 25.298])
def test_a_pair_that_differs_by_a_factor_is_told_with_the_factor(factor: float) -> None:
    model = gpt2(tied=False)
    model.lm_head.weight.data = model.transformer.wte.weight.data * factor
    tie = report(model)
    assert tie.verdict == EQUAL_TO_A_SCALAR
    assert tie.pairs[-1].scalar == pytest.approx(factor, rel=1e-6)


def test_one_entry_off_is_no_factor() -> None:
    model = gpt2(tied=False)
    model.lm_head.weight.data = model.transformer.wte.weight.data * 1.7
    model.lm_head.weight.data[3, 5] += 1e-4
    assert report(model).verdict == UNTIED


def test_one_entry_off_is_not_equal() -> None:
    model = gpt2(tied=False)
    model.lm_head.weight.data = model.transformer.wte.weight.data.clone()
    model.lm_head.weight.data[3, 5] += 1e-4
    tie = report(model)
    assert tie.verdict == UNTIED
    assert tie.max_abs_difference == pytest.approx(1e-4, rel=1e-2)


def test_peft_that_saves_the_head_anew_breaks_the_tie() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["c_attn"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(gpt2(tied=True), config).get_base_model()
    with torch.no_grad():
        model.get_output_embeddings().modules_to_save["default"].weight.add_(0.01)
    tie = report(model)
    assert tie.verdict == UNTIED
    assert tie.max_abs_difference == pytest.approx(0.01, rel=1e-3)
    assert "the config says tied, but the matrices are two tensors" in tie.contradictions
    assert any("PEFT" in sentence for sentence in tie.contradictions)


@pytest.mark.parametrize("tied", [True, False])
def test_accelerates_offload_is_read_through_its_hooks(tied: bool) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(gpt2(tied=tied), execution_device=torch.device("cpu"))
    assert model.lm_head.weight.is_meta
    tie = report(model)
    assert tie.verdict == (SHARED_STORAGE if tied else UNTIED)
    assert (tie.max_abs_difference == 0) is tied


def test_an_encoder_decoder_has_three_pairs_and_saves_two_of_three_matrices() -> None:
    tie = report(BY_NAME["t5"].build())
    assert [pair.verdict for pair in tie.pairs] == [SHARED_PARAMETER] * 3
    assert tie.cost is not None
    assert tie.parameters_saved == 2 * 160 * 64
    assert tie.cost.share_of_matrices == pytest.approx(2 / 3)
    assert tie.flags["scale_decoder_outputs"]


def test_t5_scales_its_decoders_output_by_a_flag_of_its_own() -> None:
    """The tie stays what it is, and each logit is d^-1/2 of what it would be."""
    model = BY_NAME["t5"].build()
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        scaled = model(input_ids=ids, decoder_input_ids=ids).logits
        model.config.scale_decoder_outputs = False
        plain = model(input_ids=ids, decoder_input_ids=ids).logits
    assert torch.equal(scaled, plain / 8)
    tie = report(model)
    assert (tie.verdict, tie.flags["scale_decoder_outputs"]) == (SHARED_PARAMETER, False)


def test_an_encoder_lookup_of_its_own_is_seen_beside_a_tied_decoder() -> None:
    model = BY_NAME["bart"].build()
    model.model.encoder.embed_tokens = copy.deepcopy(model.model.encoder.embed_tokens)
    with torch.no_grad():
        model.model.encoder.embed_tokens.weight.add_(0.5)
    tie = report(model)
    assert [pair.is_tied for pair in tie.pairs] == [False, False, True]
    assert (tie.parameters_saved, tie.parameters_spent) == (160 * 64, 160 * 64)


def t5gemma() -> Any:
    part = {
        "vocab_size": 160,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    config = transformers.T5GemmaConfig(
        encoder=part, decoder={**part, "cross_attention_hidden_size": 64}
    )
    return transformers.T5GemmaForConditionalGeneration(config).eval()


def test_t5gemma_ties_its_head_to_the_decoder() -> None:
    tie = report(t5gemma())
    verdicts = {(pair.first_role, pair.second_role): pair.is_tied for pair in tie.pairs}
    assert verdicts == {
        ("encoder embedding", "decoder embedding"): False,
        ("encoder embedding", "unembedding"): False,
        ("decoder embedding", "unembedding"): True,
    }


def test_the_flag_of_switch_transformers_changes_more_than_the_tie() -> None:
    config = {"vocab_size": 160, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2}
    more = {"num_decoder_layers": 2, "num_heads": 4, "num_experts": 2, "decoder_start_token_id": 0}
    options = transformers.SwitchTransformersConfig(**config, **more)
    model = transformers.SwitchTransformersForConditionalGeneration(options).eval()
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        tied = model(input_ids=ids, decoder_input_ids=ids).logits
        model.config.tie_word_embeddings = False
        plain = model(input_ids=ids, decoder_input_ids=ids).logits
    assert torch.equal(tied, plain / 8)
    assert "the config says untied, but the matrices are one tensor" in report(model).contradictions


def test_rows_of_padding_are_left_out_of_the_comparison() -> None:
    options = {**BY_NAME["llama"].config, "tie_word_embeddings": False}
    model = transformers.ApertusForCausalLM(transformers.ApertusConfig(**options)).eval()
    padded = torch.cat([model.lm_head.weight.data, torch.zeros(8, 64)])
    model.model.embed_tokens = nn.Embedding.from_pretrained(padded)
    tie = report(model)
    assert (tie.verdict, tie.pairs[-1].rows_compared) == (EQUAL_VALUES, 160)
    assert (tie.input_shape, tie.output_shape) == ((168, 64), (160, 64))


def test_a_factorised_model_is_compared_in_the_narrow_space() -> None:
    tie = report(BY_NAME["opt_project_out"].build())
    assert (tie.verdict, tie.output_shape) == (SHARED_PARAMETER, (160, 32))
    assert tie.parameters_saved == 160 * 32


def test_a_gguf_without_an_output_matrix_is_tied(smollm2: Any) -> None:
    assert smollm2.tie.verdict == SHARED_PARAMETER
    assert smollm2.tie.contradictions == ()
    assert smollm2.tie.parameters_saved == 49_152 * 576


@pytest.mark.parametrize("name", ["gpt2", "gemma", "bert", "opt_project_out"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_cost_is_the_difference_of_the_two_models(name: str, tied: bool) -> None:
    count = {
        flag: sum(p.numel() for p in BY_NAME[name].build(tied=flag).parameters())
        for flag in (True, False)
    }
    # BERT unties a bias together with the matrix, and leaves one of the two unused.
    orphans = 160 if name == "bert" else 0
    tie = report(BY_NAME[name].build(tied=tied))
    assert tie.cost is not None
    assert tie.is_tied is tied
    assert tie.cost.n_parameters_tied == count[True] + (0 if tied else orphans)
    assert tie.cost.n_parameters_untied == count[False] - (orphans if tied else 0)
    saved, spent = tie.parameters_saved, tie.parameters_spent
    assert saved + spent == count[False] - count[True] - orphans
    assert (saved == 0, spent == 0) == (not tied, tied)


def test_the_text_names_both_matrices_their_flag_and_the_files(tmp_path: Path) -> None:
    tie = load(saved(tmp_path, flag=True, change=as_it_is)).tie
    text = dict(tie.rows())
    assert EMBEDDING in text["tie"]
    assert HEAD in text["tie"]
    assert text["config says"] == "tie_word_embeddings true"
    assert text["class ties"] == f"{HEAD} := {EMBEDDING}"
    assert text["files hold"] == f"{EMBEDDING} yes, {HEAD} yes"
    assert "10,240 spent" in text["parameters"]


def test_a_key_that_transformers_renames_is_no_contradiction(tmp_path: Path) -> None:
    BY_NAME["gpt_neox"].build(tied=False).save_pretrained(tmp_path)
    tie = load(tmp_path).tie
    assert (tie.verdict, tie.contradictions) == (UNTIED, ())
    assert tie.files_held == {"gpt_neox.embed_in.weight": True, "lm_head.weight": None}


def test_a_matrix_that_no_file_held_is_a_contradiction() -> None:
    model = gpt2(tied=False)
    names = {name for name, _ in model.named_parameters()} - {HEAD}
    tie = report_tie(model, None, seq2seq=False, checkpoint_keys=frozenset(names))
    assert tie.contradictions == (f"the files hold no {HEAD}, yet it is in memory",)
    assert tie.files_held == {EMBEDDING: True, HEAD: False}
