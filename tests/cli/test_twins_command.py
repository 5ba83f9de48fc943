"""`lens twins continue`, on a checkpoint in a folder."""

import json
from pathlib import Path

import pytest

from lens.cli import main

TEXT = "the tower is in Paris the Rome in tower is Paris the"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join([json.dumps({"text": TEXT})] * 8), encoding="utf-8")
    return path


def options(corpus: Path, out: Path, *more: str) -> list[str]:
    how = ["--steps", "2", "--measure-at", "2", "--batch", "2", "--window-tokens", "6", *more]
    return ["--corpus", str(corpus), "--out", str(out), *how]


def test_a_tied_model_goes_on_beside_its_untied_copy(
    tiny: Path, corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["twins", "continue", str(tiny), *options(corpus, out)]) == 0
    printed = capfd.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    assert [line[:2] for line in lines if line and line[0] in ("tied", "untied")] == [
        [arm, at] for arm in ("tied", "untied") for at in ("0", "2")
    ]
    assert str(out / "continued.json") in printed
    assert (out / "untied" / "model" / "config.json").is_file()
    # The same command again reads what is there; another rate is another run.
    assert main(["twins", "continue", str(tiny), *options(corpus, out)]) == 0
    assert capfd.readouterr().out == printed
    assert main(["twins", "continue", str(tiny), *options(corpus, out, "--rate", "1e-3")]) == 1
    assert capfd.readouterr().err.startswith(f"lens: {out} holds another run: its settings")


def test_wrong_options_of_continue_end_in_one_line(
    tiny: Path, corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["twins", "continue", str(tiny), *options(corpus, out, "--arm", "mean")]) == 1
    assert "no arm 'mean'" in capfd.readouterr().err
    assert main(["twins", "continue", str(tiny), *options(corpus, out, "--measure-at", "9")]) == 1
    assert "measure_at names the steps [9]" in capfd.readouterr().err
    assert main(["twins", "continue", str(tiny), *options(corpus, out, "--measure-at", "x")]) == 2
    assert not out.exists()


def test_a_sweep_that_is_there_is_told_and_not_run_again(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    results = Path(__file__).parents[2] / "docs" / "study" / "sweep"
    where = ["--corpus", str(corpus), "--out", str(tmp_path / "runs"), "--results", str(results)]
    assert main(["twins", "sweep", *where, "--seeds", "1"]) == 0
    printed = capfd.readouterr().out
    assert "v2048-d96-l6" in printed
    assert "for each doubling" in printed
    assert not (tmp_path / "runs").exists()
    assert main(["twins", "sweep", *where, "--cell", "v1-d1-l1"]) == 1
    assert "no cell" in capfd.readouterr().err


def test_a_run_that_is_not_there_is_not_read_on_another_text(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folders = ["--out", str(tmp_path / "runs"), "--results", str(tmp_path / "rows")]
    where = ["--corpus", "sample", "--other", "sample", *folders]
    assert main(["twins", "domain", *where, "--name", "Not This"]) == 1
    assert "small letters" in capfd.readouterr().err
    assert main(["twins", "domain", *where, "--name", "sample"]) == 1
    assert "holds no finished run" in capfd.readouterr().err
    assert not (tmp_path / "rows").exists()
