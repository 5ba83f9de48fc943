"""The commands on ties, on a checkpoint in a folder."""

from pathlib import Path

import pytest

from lens.checkpoint.load import load
from lens.checkpoint.tying import EQUAL_VALUES, SHARED_PARAMETER
from lens.cli import main
from tests.checkpoint.tiny import BY_NAME


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    BY_NAME["gpt2"].build(tied=True).save_pretrained(tmp_path / "tied")
    return tmp_path / "tied"


def test_untie_and_tie_write_folders_that_load(
    tied: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["untie", str(tied), "-o", str(tmp_path / "two")]) == 0
    assert "equal values, separate" in capfd.readouterr().out
    assert load(tmp_path / "two").tie.verdict == EQUAL_VALUES
    one = tmp_path / "one"
    assert main(["tie", str(tmp_path / "two"), "--keep", "mean", "-o", str(one)]) == 0
    assert load(one).tie.verdict == SHARED_PARAMETER


def test_what_cannot_be_done_ends_with_one_line_and_code_1(
    tied: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["tie", str(tied), "-o", str(tmp_path / "new")]) == 1
    assert capfd.readouterr().err.startswith("lens: The matrices are one already")
    assert not (tmp_path / "new").exists()
    assert main(["untie", str(tied), "-o", str(tied)]) == 1
    assert "not empty" in capfd.readouterr().err
    assert main(["tie", str(tied), "--keep", "both", "-o", str(tmp_path / "new")]) == 2


def test_gradients_tells_the_paths_on_a_corpus_of_ids(
    tied: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["gradients", str(tied), "--corpus", "sample"]) == 1
    assert "tokenizer" in capfd.readouterr().err


def test_gradients_prints_shares_and_groups(
    models_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = models_folder / "core-charlm"
    options = ["--max-targets", "300", "--window-tokens", "32"]
    text = str(model / "training-text.txt")
    assert main(["gradients", str(model), "--corpus", text, *options]) == 0
    out = capfd.readouterr().out
    assert "output share" in out
    assert "rows by use 1/10" in out


def test_frequency_tells_the_carriers(
    models_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = models_folder / "core-charlm"
    options = ["--max-positions", "64", "--layers", "2"]
    text = str(model / "training-text.txt")
    assert main(["frequency", str(model), "--corpus", text, *options]) == 0
    out = capfd.readouterr().out
    assert "output bias" in out
    assert "KL(mean q || unigram), as it is" in out
    assert "at layers 0, 4" in out
    assert main(["frequency", str(model), "--layers", "1"]) == 2


def test_attribution_tells_the_parts_of_a_logit(
    models_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = str(models_folder / "core-charlm")
    options = ["--token", "A", "--against", "B", "--neurons", "2"]
    assert main(["attribution", model, "Q: Calculate 5*5\n", *options]) == 0
    out = capfd.readouterr().out
    assert "'A' against 'B'" in out
    assert "all of attention" in out
    assert out.count("neuron ") == 2
    assert main(["attribution", model, "Q", "--position", "7"]) == 1
    assert "no position 7" in capfd.readouterr().err
    assert main(["attribution", model]) == 2
