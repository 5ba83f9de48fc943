import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Spelled in pieces, so that this file does not hold what it looks for.
PLACES = [
    rf"(?<![\w.<>])/{place}/"
    for place in ("work", "root", "opt", "tmp", "home" + "/[a-z]", "Users")
]
HOSTS = [r"pypi" + r"\.org/simple", r"index" + r"-url", r"find" + r"-links"]
FORBIDDEN = re.compile("|".join([*PLACES, *HOSTS]))


def tracked() -> list[Path]:
    run = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if run.returncode != 0:
        pytest.skip("not a git clone")
    return [ROOT / name for name in run.stdout.split("\0") if name]


def offences(text: str) -> list[str]:
    return [line[:120] for line in text.splitlines() if FORBIDDEN.search(line)]


def test_no_tracked_file_names_a_place_on_one_machine() -> None:
    found = {}
    for path in tracked():
        if not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if offences(text):
            found[str(path.relative_to(ROOT))] = offences(text)
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "open('/" + "work/main/x')",
        "--extra-index" + "-url https://host/simple",
        "cache: /" + "root/.cache",
        "/" + "tmp/x",
    ],
)
def test_a_place_on_one_machine_is_seen(line: str) -> None:
    assert offences(f"first\n{line}") == [line]


@pytest.mark.parametrize("line", ["docs/work/x", "tmp_path / 'a'", "https://pypi.org/project/x"])
def test_an_innocent_line_passes(line: str) -> None:
    assert offences(line) == []


def test_the_package_marks_itself_as_typed_and_licensed() -> None:
    assert (ROOT / "lens" / "py.typed").exists()
    assert "Apache License" in (ROOT / "LICENSE").read_text()
