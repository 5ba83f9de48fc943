"""The command from end to end on a small checkpoint: what it prints, writes and returns."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import lens
from lens.cli import main
from lens.show.labels import label

PROMPT = "the tower is in"


def lens_run(tiny: Path, *arguments: str) -> int:
    return main(["run", str(tiny), *arguments])


def test_run_prints_a_row_for_each_layer_of_the_last_position(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lens_run(tiny, PROMPT) == 0
    printed = capsys.readouterr()
    lines = [line.split() for line in printed.out.strip().split("\n")]
    assert lines[0][:4] == ["layer", "after", "3", "␣in"]
    assert [line[0] for line in lines[2:]] == ["0", "1", "2"]
    expected = lens.load(tiny).logit_lens(PROMPT, positions=[-1])
    top = [label(expected.vocabulary[int(i)]) for i in expected.top_ids[:, 0, 0]]
    assert [line[1] for line in lines[2:]] == top
    probabilities = np.exp2(expected.top_logprob_bits[:, 0, 0])
    assert [line[2] for line in lines[2:]] == [f"{p:.3f}" for p in probabilities]
    assert printed.err == ""


@pytest.mark.parametrize("extension", ["json", "csv", "parquet"])
def test_a_data_file_reads_back_equal_to_the_reading(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], extension: str
) -> None:
    path = tmp_path / f"out.{extension}"
    options = ["--top-k", "3", "--layers", "0,-1", "--positions", "-1,1", "--readout", "input"]
    sets = ["--target", "right=Paris", "--target", "wrong=Rome", "--target", "right=東京"]
    assert lens_run(tiny, PROMPT, "-o", str(path), *options, *sets) == 0
    assert lens.read_predictions(path) == lens.load(tiny).logit_lens(
        PROMPT,
        top_k=3,
        layers=[0, -1],
        positions=[-1, 1],
        lens="input",
        targets={"right": ["Paris", "東京"], "wrong": ["Rome"]},
    )
    assert capsys.readouterr().out == f"Wrote {path}\n"


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        (["--points", "mid"], ["0.5", "1.5"]),
        (["--points", "all"], ["0", "0.5", "1", "1.5", "2"]),
        (["--layers", "1.5,-1"], ["1.5", "2"]),
    ],
)
def test_rows_within_blocks_have_half_numbers(
    tiny: Path, capsys: pytest.CaptureFixture[str], options: list[str], layers: list[str]
) -> None:
    assert lens_run(tiny, PROMPT, *options) == 0
    lines = capsys.readouterr().out.strip().split("\n")[2:]
    assert [line.split()[0] for line in lines] == layers


def test_the_mass_on_rows_of_no_token_has_a_column_where_there_are_some(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lens_run(tiny, PROMPT) == 0
    assert "no token" not in capsys.readouterr().out
    model = lens.load(tiny)
    model.model.resize_token_embeddings(model.d_vocab + 5, mean_resizing=False)
    model.model.save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    assert lens_run(tmp_path, PROMPT) == 0
    assert "p(no token)" in capsys.readouterr().out.strip().split("\n")[0]


def test_with_two_target_sets_the_table_shows_their_difference(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lens_run(tiny, PROMPT, "--target", "right=Paris", "--target", "wrong=Rome") == 0
    head, _, *rows = capsys.readouterr().out.strip().split("\n")
    assert head.split()[-6:] == ["p(right)", "p(wrong)", "right", "-", "wrong,", "bits"]
    predictions = lens.load(tiny).logit_lens(
        PROMPT, positions=[-1], targets={"right": ["Paris"], "wrong": ["Rome"]}
    )
    difference = predictions.logit_difference("right", "wrong")[:, 0]
    assert [row.split()[-1] for row in rows] == [f"{d:+.2f}" for d in difference]


@pytest.mark.parametrize("colour", ["probability", "entropy", "kl", "rank"])
def test_a_page_is_written_in_the_colour_asked_for(tiny: Path, tmp_path: Path, colour: str) -> None:
    path = tmp_path / "out.html"
    assert lens_run(tiny, PROMPT, "-o", str(path), "--colour", colour) == 0
    others = {"probability", "entropy", "kl", "rank"} - {colour}
    page = path.read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>") or page.startswith("<!doctype html>")
    for other in others:
        twin = tmp_path / f"{other}.html"
        assert lens_run(tiny, PROMPT, "-o", str(twin), "--colour", other) == 0
        assert twin.read_text(encoding="utf-8") != page
        break


def test_ids_a_file_standard_input_and_text_are_one_prompt(
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text(PROMPT + "\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
    printed = []
    for call in ([PROMPT], [f"@{path}"], ["-"], ["--ids", "1,2,3,4"], ["--", PROMPT]):
        assert lens_run(tiny, *call) == 0
        printed.append(capsys.readouterr().out)
    assert printed == [printed[0]] * 5
    assert lens_run(tiny, "--ids", "1,2,3,5") == 0
    assert capsys.readouterr().out != printed[0]


@pytest.mark.parametrize(
    ("call", "token"),
    [(["@@home"], "␣@home"), (["--", "--x"], "␣--x"), (["[b]"], "␣[b]"), (["東京"], "␣東京")],
)
def test_awkward_text_reaches_the_model_and_the_table_as_it_stands(
    tiny: Path, capsys: pytest.CaptureFixture[str], call: list[str], token: str
) -> None:
    assert lens_run(tiny, *call) == 0
    assert f"after 0 {token}" in capsys.readouterr().out


def test_messages_go_through_the_chat_template(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "chat.json"
    path.write_text(json.dumps([{"role": "user", "content": "tower"}]))
    assert lens_run(tiny, "--messages", str(path)) == 0
    assert "after 1 ␣is" in capsys.readouterr().out


def test_inspect_tells_the_tie_and_the_proof(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(tiny)]) == 0
    out = capsys.readouterr().out
    for name, text in lens.load(tiny).summary().rows():
        assert any(line.startswith(name) and text in line for line in out.split("\n"))
    assert "shared parameter" in out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["run", "nowhere/model", "text"], "nowhere/model"),
        (["inspect", "./nowhere"], "nowhere"),
        (["run", "TINY", "in", "--layers", "99"], "no layer 99"),
        (["run", "TINY", "in", "--positions", "7"], "no position 7"),
        (["run", "TINY", "--ids", "11"], "out of range"),
        (["run", "TINY", ""], "empty"),
        (["run", "TINY", "in " * 9], "9 tokens, 1 more than the context of 8"),
        (["run", "TINY", "in", "--top-k", "12"], "top_k is 12"),
        (["run", "TINY", "in", "--source", "in"], "no encoder"),
        (["run", "TINY", "--source", "in"], "no encoder"),
        (["run", "TINY", "in", "--target", "a=in Paris"], "2 tokens"),
        (["run", "TINY", "in", "-o", "out.docx"], "extension '.docx'"),
        (["run", "TINY", "in", "-o", "out"], "no extension"),
        (["run", "TINY", "in", "-o", "nowhere/out.html"], "no folder nowhere"),
        (["run", "TINY", "in", "-o", "folder.html"], "is a folder"),
        (["demo", "-o", "file.txt"], "is a file"),
        (["demo", "-o", "file.txt/below"], "is a file"),
    ],
)
def test_an_error_is_one_message_without_a_traceback_and_exit_code_1(
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.html").mkdir()
    Path("file.txt").touch()
    before = sorted(tmp_path.rglob("*"))
    assert main([str(tiny) if a == "TINY" else a for a in arguments]) == 1
    printed = capsys.readouterr()
    assert complaint in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["look"],
        ["inspect"],
        ["run", "model"],
        ["run", "model", "text", "--ids", "1"],
        ["run", "model", "text", "--nothing"],
        ["run", "model", "text", "--top-k", "0"],
        ["run", "model", "text", "--layers", "one"],
        ["run", "model", "text", "--readout", "both"],
        ["run", "model", "text", "--dtype", "float8"],
        ["run", "model", "text", "--colour", "blue"],
        ["run", "model", "text", "--target", "Paris"],
        ["run", "model", "@nowhere.txt"],
        ["run", "model", "--messages", "nowhere.json"],
        ["run", "model", "text", "more"],
    ],
)
def test_a_wrong_call_is_exit_code_2_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    monkeypatch.setattr("lens.cli._load", lambda *a, **k: pytest.fail("a model was loaded"))
    assert main(arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["out.docx", "nowhere/out.html", "out"])
def test_an_output_that_cannot_be_is_refused_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setattr("lens.cli._load", lambda *a, **k: pytest.fail("a model was loaded"))
    assert main(["run", "model", "text", "-o", str(tmp_path / name)]) == 1


def test_truncate_cuts_what_is_too_long(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lens_run(tiny, "in " * 9, "--truncate") == 0
    assert "after 7 ␣in" in capsys.readouterr().out


def test_debug_shows_the_traceback(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lens_run(tiny, "in", "--layers", "99", "--debug") == 1
    error = capsys.readouterr().err
    assert error.startswith("Traceback")
    assert error.rstrip().split("\n")[-1].startswith("lens: There is no layer 99")


def test_an_error_that_nobody_foresaw_names_itself_and_the_way_to_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr("lens.cli._load", fail)
    assert main(["inspect", "model"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("lens: ZeroDivisionError: by nothing\n")
    assert "--debug" in error
    assert "Traceback" not in error


def test_an_interrupt_ends_in_silence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lens.cli._load", interrupt)
    assert main(["inspect", "model"]) == 130
    assert capsys.readouterr().err == ""


def test_a_reader_that_goes_away_ends_the_process_in_silence() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    run = subprocess.run(
        [sys.executable, "-m", "lens", "--help"], stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert run.returncode == 141
    assert run.stderr == ""


def test_a_reader_that_goes_away_ends_a_table_in_silence(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", encoding="utf-8") as closed:  # noqa: PTH123 - it is a descriptor
        monkeypatch.setattr(sys, "stdout", closed)
        assert lens_run(tiny, PROMPT) == 141
    assert "lens:" not in capsys.readouterr().err


def test_a_terminal_that_cannot_show_a_token_still_gets_the_table(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    assert lens_run(tiny, "東京") == 0
    assert b"after 0 \\u2423\\u6771\\u4eac" in narrow.buffer.getvalue()  # type: ignore[attr-defined]


def test_a_good_run_says_nothing_on_standard_error(tiny: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "lens", "run", str(tiny), PROMPT], capture_output=True, text=True
    )
    assert (run.returncode, run.stderr) == (0, "")


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lens {lens.__version__}\n"
