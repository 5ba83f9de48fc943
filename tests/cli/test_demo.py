import re
from pathlib import Path
from typing import Any

import pytest

import lens
from lens.cli import DEMO_PROMPT, main


def test_demo_reads_paris_and_says_where_its_heatmap_is(
    gemma3: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # The same checkpoint, loaded once for the whole run.
    monkeypatch.setattr(lens, "load", lambda source, **how: {("demo", 0): gemma3}[source, len(how)])
    folder = tmp_path / "new" / "lens-demo"
    assert main(["demo", "-o", str(folder)]) == 0
    out = capsys.readouterr().out
    assert repr(gemma3) in out
    assert "shared parameter" in out
    assert DEMO_PROMPT in out
    rows = [line.split() for line in out.split("\n") if re.match(r" *\d+ ", line)]
    assert [int(row[0]) for row in rows] == list(range(gemma3.n_layers + 1))
    assert rows[-1][1] == "␣Paris"
    assert abs(float(rows[-1][2]) - 0.76) <= 0.02
    page = folder / "heatmap.html"
    assert out.rstrip().endswith(str(page.resolve()))
    assert "Paris" in page.read_text(encoding="utf-8")
    assert sorted(folder.iterdir()) == [page]


def test_demo_leaves_no_folder_behind_when_it_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("no model")

    monkeypatch.setattr("lens.cli._load", fail)
    assert main(["demo", "-o", str(tmp_path / "new" / "lens-demo")]) == 1
    assert list(tmp_path.iterdir()) == []
