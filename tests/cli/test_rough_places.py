"""Outputs that go away, names that no file can have, and inputs that are none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lens
from lens.cli import main
from lens.cli_measure import names_of
from lens.errors import CheckpointNotFoundError, CorpusError, SelectionError


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    words = ("the tower is", "in Paris is the", "Rome is in the tower", "tower in Rome is")
    rows = [{"text": text, "source": f"s{i % 2}"} for i, text in enumerate(words)]
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def test_a_result_is_written_before_a_reader_can_go_away(
    tiny: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(what: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("lens.cli_tables.emit", gone)
    output = tmp_path / "kept.csv"
    command = [str(tiny), "--corpus", str(texts), "--window-tokens", "4", "-o"]
    assert main(["measure", *command, str(output)]) == 141
    assert output.read_text(encoding="utf-8").startswith("layer,")
    both = tmp_path / "both.csv"
    assert main(["compare", str(tiny), *command, str(both)]) == 141
    assert both.read_text(encoding="utf-8").startswith("depth,")


def test_json_keeps_every_digit_that_pandas_writes(tiny: Path, texts: Path, tmp_path: Path) -> None:
    import pandas as pd

    command = ["measure", str(tiny), "--corpus", str(texts), "--window-tokens", "4", "-o"]
    for kind in ("json", "csv"):
        assert main([*command, str(tmp_path / f"m.{kind}")]) == 0
    one = pd.read_json(tmp_path / "m.json", precise_float=True)
    other = pd.read_csv(tmp_path / "m.csv", float_precision="round_trip")
    pd.testing.assert_series_equal(one["mean_kl_bits"], other["mean_kl_bits"], rtol=1e-13)


@pytest.mark.parametrize("kind", ["csv", "html"])
def test_a_long_name_is_no_reason_to_measure_in_vain(
    kind: str, tiny: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = tmp_path / f"{'x' * 300}.{kind}"
    command = ["measure" if kind == "csv" else "report", str(tiny), "--corpus", str(texts)]
    assert main([*command, "-o", str(name)]) == 1
    told = capsys.readouterr().err
    assert "too long" in told
    assert "foresaw" not in told


def test_a_prompt_that_cannot_be_read_is_refused_before_the_measuring(
    tiny: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lens.trust.studied.measure", lambda *a, **k: pytest.fail("measured"))
    command = ["report", str(tiny), "--corpus", str(texts), "-o", str(tmp_path / "r.html")]
    for prompt in ("", "the tower is in Paris " * 9):
        assert main([*command, "--prompt", prompt]) == 1


def test_a_folder_above_is_called_by_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model" / "runs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "model" / "runs")
    assert names_of("..", "tied-twin") == ("model", "tied-twin")
    assert names_of("owner/model", "x/model") == ("model (1)", "model (2)")


@pytest.mark.parametrize("place", [">&-", "> /dev/full"])
def test_no_standard_output_is_no_traceback(place: str) -> None:
    environment = {**os.environ, "COLUMNS": "80"}
    found = subprocess.run(
        ["bash", "-c", f"exec {sys.executable} -m lens --version {place}"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert "Traceback" not in found.stderr
    assert found.returncode in (0, 1)
    if place != ">&-":
        assert "lens: Cannot write to standard output" in found.stderr


def test_names_that_no_file_can_have_are_not_found() -> None:
    long = "a long text, passed by mistake, " * 20
    with pytest.raises(CorpusError, match="There is no corpus at"):
        lens.read_corpus(long)
    for name in (long, "~nobody-of-that-name/x", "with\0nul"):
        with pytest.raises(CheckpointNotFoundError):
            lens.load(name)


@pytest.mark.parametrize("raw", ["null", "[]", '{"model_type": "gpt2", "vocab_size": -5}',
                                 '{"model_type": "gpt2", "vocab_size": "x"}'])  # fmt: skip
def test_a_config_that_is_none_is_refused(raw: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(raw, encoding="utf-8")
    with pytest.raises((CheckpointNotFoundError, SelectionError)):
        lens.scale_table([str(path)])


def test_no_parameter_takes_infinitely_many_bytes() -> None:
    with pytest.raises(SelectionError, match="bytes_per_parameter"):
        lens.plan_tie(100, 8, 2, bytes_per_parameter=float("inf"))


def test_a_corpus_folder_may_hold_folders_and_dead_links(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Some text.", encoding="utf-8")
    (tmp_path / "b.md").mkdir()
    (tmp_path / "c.txt").symlink_to(tmp_path / "gone.txt")
    assert [d.text for d in lens.read_corpus(tmp_path).documents] == ["Some text."]


def test_odd_rows_of_a_corpus_are_named(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    deep = tmp_path / "deep.jsonl"
    deep.write_text('{"text": ' + "[" * 100_000, encoding="utf-8")
    with pytest.raises(CorpusError, match="line 1 is not JSON"):
        lens.read_corpus(deep)
    half = tmp_path / "half.jsonl"
    half.write_text('{"text": "\\ud83d"}', encoding="utf-8")
    assert "1 document" in repr(lens.read_corpus(half))
    bad = tmp_path / "bad.parquet"
    raw = pa.array([b"\xff\xfe"], type=pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": raw}), bad)
    with pytest.raises(CorpusError, match="cannot be read as Parquet"):
        lens.read_corpus(bad)


def test_a_long_line_is_cut_in_time_that_grows_with_it(tmp_path: Path) -> None:
    path = tmp_path / "line.txt"
    line = "word " * 40_000
    path.write_text(line, encoding="utf-8")
    documents = lens.read_corpus(path).documents
    assert all(len(d.text or "") <= 4000 for d in documents)
    assert "".join(d.text or "" for d in documents).split() == line.split()
