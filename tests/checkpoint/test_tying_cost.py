"""What a tie saves, held against models that are built and counted, and against published sizes."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from lens.checkpoint.tie_cost import plan_tie, worth
from lens.checkpoint.tie_scale import scale_table, table_text
from lens.errors import CheckpointNotFoundError, SelectionError, UnsupportedArchitectureError
from tests.checkpoint.tiny import BY_NAME

PYTHIA_70M = {
    "model_type": "gpt_neox",
    "vocab_size": 50304,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
}
LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


@pytest.mark.parametrize(
    ("config", "saved", "share", "size"),
    [
        # Sizes as published: GPT-2 124,439,808 tied, Pythia 70,426,624 and Llama 8.03 B untied.
        ({"model_type": "gpt2"}, 38_597_376, 0.237, (124_439_808, None)),
        (PYTHIA_70M, 25_755_648, 0.366, (None, 70_426_624)),
        (LLAMA_8B, 525_336_576, 0.065, (None, 8_030_261_248)),
    ],
    ids=["gpt2", "pythia-70m", "llama-3.1-8b"],
)
def test_the_scale_table_gives_published_sizes(
    config: dict[str, Any], saved: int, share: float, size: tuple[int | None, int | None]
) -> None:
    ((_, report),) = scale_table([config])
    cost = report.cost
    assert cost is not None
    assert cost.parameters == saved
    assert round(cost.share_of_untied, 3) == share
    for published, counted in zip(
        size, (cost.n_parameters_tied, cost.n_parameters_untied), strict=True
    ):
        assert published in (None, counted)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("width", [16, 64])
def test_a_plan_counts_what_a_gpt2_holds(layers: int, width: int) -> None:
    sizes = {"vocab_size": 101, "n_embd": width, "n_layer": layers, "n_head": 2, "n_positions": 40}
    for tied in (True, False):
        config = transformers.GPT2Config(**sizes, tie_word_embeddings=tied)
        counted = sum(p.numel() for p in transformers.GPT2LMHeadModel(config).parameters())
        cost = plan_tie(101, width, layers, n_ctx=40)
        assert counted == (cost.n_parameters_tied if tied else cost.n_parameters_untied)
        assert cost.parameters == 101 * width


def test_a_plan_of_another_width_counts_otherwise() -> None:
    assert (
        plan_tie(101, 64, 2).n_parameters_tied != plan_tie(101, 64, 2, d_mlp=128).n_parameters_tied
    )


def test_bytes_follow_the_dtype_and_the_optimizer_does_not() -> None:
    full, half = plan_tie(1000, 10, 1), plan_tie(1000, 10, 1, bytes_per_parameter=2)
    assert (full.weight_bytes, half.weight_bytes) == (40_000, 20_000)
    assert full.optimizer_bytes == half.optimizer_bytes == 80_000
    assert full.training_bytes == 160_000
    assert full.logits_bytes_per_token == 4_000


def test_three_matrices_save_two_thirds_of_the_embedding_parameters() -> None:
    cost = plan_tie(1000, 10, 1, n_matrices=3)
    assert cost.parameters == 20_000
    assert cost.parameters / (cost.n_matrices * 10_000) == pytest.approx(cost.share_of_matrices)


@pytest.mark.parametrize("name", ["llama", "bert", "t5", "opt_project_out"])
def test_a_config_counts_as_the_model_that_is_made_of_it(name: str) -> None:
    model = BY_NAME[name].build(tied=True)
    ((_, report),) = scale_table([model.config])
    assert report.cost is not None
    assert report.cost.n_parameters_tied == sum(p.numel() for p in model.parameters())


def test_the_config_is_left_as_it_was() -> None:
    config = BY_NAME["llama"].build().config
    before = config.to_dict()
    scale_table([config])
    assert config.to_dict() == before


def test_a_file_and_its_folder_give_one_row(tmp_path: Path) -> None:
    folder = tmp_path / "a-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PYTHIA_70M))
    table = scale_table([folder, folder / "config.json"])
    assert [name for name, _ in table] == ["a-model", "a-model"]
    assert "| a-model | 25,755,648 | 36.6% |" in table_text(table)


def test_what_is_no_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no config"):
        scale_table([tmp_path])
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointNotFoundError, match="no JSON"):
        scale_table([tmp_path])
    with pytest.raises(UnsupportedArchitectureError, match="'lama'"):
        scale_table([{"model_type": "lama"}])


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_a_size_of_nothing_is_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(SelectionError, match="sizes are 1 or more"):
        plan_tie(*sizes)


def test_the_words_follow_the_share() -> None:
    words = [worth(plan_tie(50257, 768, layers)).split("; ")[1] for layers in (12, 30, 100)]
    assert len(set(words)) == 3


def test_lens_plan_prints_the_numbers(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from lens.cli import main

    sizes = ["--vocab", "50257", "--d-model", "768", "--layers", "12", "--context", "1024"]
    assert main(["plan", *sizes]) == 0
    assert "38,597,376: 23.7% of the untied model (163,037,184)" in capfd.readouterr().out
    (tmp_path / "config.json").write_text(json.dumps(PYTHIA_70M))
    assert main(["plan", "--config", str(tmp_path)]) == 0
    assert "25,755,648 | 36.6%" in capfd.readouterr().out
    assert main(["plan", "--vocab", "5"]) == 2
    assert main(["plan", "--config", str(tmp_path / "none")]) == 1
