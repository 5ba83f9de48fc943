import re
from pathlib import Path

import pytest
import torch

import lens
from lens.checkpoint import packages
from lens.cli import main
from lens.cli_demo import PROMPTS
from lens.errors import CorruptCheckpointError, SelectionError
from lens.measuring.confounds import caution, confounds


def test_demo_reads_both_twins_and_reports_what_the_tie_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lens.cli_demo.DOCUMENTS", 2)
    folder = tmp_path / "new" / "lens-demo"
    assert main(["demo", "-o", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "shared parameter" in out
    assert "tie: untied" in out
    assert out.count(PROMPTS[0]) == 2
    rows = [line.split() for line in out.split("\n") if re.match(r" *\d+ ", line)]
    assert [int(row[0]) for row in rows] == [*range(7), *range(7)]
    # The tied lens repeats the token that stands there; the untied one does not.
    assert rows[0][1] == "␣first"
    assert rows[7][1] != "␣first"
    assert rows[6][-1] == rows[13][-1] == "0.00"
    assert "differ in the tie and in nothing else" in out
    written = sorted(path.name for path in folder.iterdir())
    assert written == ["report.html", "tied.html", "untied.html"]
    assert out.rstrip().endswith(str((folder / "report.html").resolve()))
    assert "What else differs" not in (folder / "report.html").read_text(encoding="utf-8")


def test_demo_leaves_no_folder_behind_when_it_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("no model")

    monkeypatch.setattr("lens.load", fail)
    assert main(["demo", "-o", str(tmp_path / "new" / "lens-demo")]) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", packages.TWINS)
def test_the_twins_come_with_lens(name: str) -> None:
    model = lens.load(name)
    assert model.origin.model_id == name
    assert model.tie.is_tied == name.startswith("tied")
    assert model.dtype == torch.float32
    assert model.tokenizer is not None
    assert model.logit_lens("Emma was").kl_bits[-1].max() == 0.0


def test_twins_differ_in_nothing_but_the_tie_and_other_pairs_do() -> None:
    tied, untied = lens.load("tied-twin"), lens.load("untied-twin")
    assert confounds(tied, untied) == ()
    assert confounds(untied, tied) == ()
    assert "nothing else" in caution([])
    assert packages.are_twins("tied-twin-1", "untied-twin-1")
    for first, second in (
        ("tied-twin", "untied-twin-1"),
        ("tied-twin", "tied-twin"),
        ("tied-twin", "gpt2"),
    ):
        assert not packages.are_twins(first, second)
    assert "two checkpoints" in caution(["training data"])


def test_a_twin_has_no_revision_and_a_missing_one_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(SelectionError, match="revision"):
        lens.load("tied-twin", revision="main")
    monkeypatch.setattr(packages, "files", lambda _: tmp_path)
    with pytest.raises(CorruptCheckpointError, match="Install lens again"):
        lens.load("tied-twin")
