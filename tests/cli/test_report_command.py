from pathlib import Path

import pytest

from lens.cli import main

TEXTS = [
    *("the tower is in Paris", "Rome is in the tower", "Paris is Rome", "the the in Rome is"),
    *("in Rome the tower is", "Paris is in the tower", "is Rome in Paris", "the tower the tower"),
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    import json

    path = tmp_path / "texts.jsonl"
    rows = [json.dumps({"text": text}) for text in TEXTS]
    path.write_text("\n".join(rows), encoding="utf-8")
    return path


def test_the_page_is_written_and_its_verdict_printed(
    tiny: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "r.html"
    command = ["report", str(tiny), "--corpus", str(corpus), "-o", str(page)]
    assert main([*command, "--second-pass", "9", "--prompt", "the tower"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("tiny: trust the lens")
    assert f"Wrote {page}" in printed
    html = page.read_text(encoding="utf-8")
    assert html.count('class="heat"') == 1
    assert f"lens report {tiny} --corpus {corpus} --translator ridge --second-pass 9" in html


@pytest.mark.parametrize(
    ("kind", "repeat"),
    [("tuned", "--translator tuned --tune-steps 2 --sec"), ("ridge", "--translator ridge --sec")],
)
def test_the_translator_that_was_asked_for_is_fitted_and_named(
    kind: str, repeat: str, tiny: Path, corpus: Path, tmp_path: Path
) -> None:
    page = tmp_path / "r.html"
    command = ["report", str(tiny), "--corpus", str(corpus), "-o", str(page), "--prompt", "Rome"]
    options = ["--translator", kind, "--tune-steps", "2", "--second-pass", "0"]
    assert main([*command, *options]) == 0
    html = page.read_text(encoding="utf-8")
    assert [name for name in ("tuned", "ridge") if f"<dd>{name}, affine, " in html] == [kind]
    assert repeat in html


def test_two_checkpoints_are_compared(
    tiny: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "r.html"
    command = ["report", str(tiny), str(tiny), "--corpus", str(corpus), "-o", str(page)]
    assert main([*command, "--translator", "none"]) == 0
    printed = capsys.readouterr().out
    assert "The lenses of tiny (1) and tiny (2) read alike" in printed
    assert "What else differs" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["-o", "r.docx"], "one .html page"),
        (["-o", "no/such/r.html"], "no folder"),
        (["--folder", __file__], "is a file; give the name of a folder"),
        (["--corpus", "missing.txt"], "There is no corpus at"),
    ],
)
def test_a_wrong_call_is_one_line_before_any_model_is_loaded(
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", "no-such-model", *arguments]) == 1
    told = capsys.readouterr().err.strip()
    assert told.startswith("lens: ")
    assert complaint in told
    assert list(tmp_path.iterdir()) == []
