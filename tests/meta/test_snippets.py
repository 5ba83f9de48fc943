import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from snippets import NOT_RUN, alike, blocks, run_page

import lens

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DEMO = 'lens.load("demo")'
HUB_ID = re.compile(r"""lens\.load\(\s*["'](?!(?:demo|(?:un)?tied-twin)["'])""")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_python_of_a_page_runs_and_prints_what_it_says(
    path: Path,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = [b for b in blocks(path) if b.language == "python" and b.mark != NOT_RUN]
    if any(DEMO in block.body for block in wanted):
        demo, load = request.getfixturevalue("gemma3"), lens.load
        # Loaded once for the whole run; anything but the plain call loads as ever.
        monkeypatch.setattr(
            lens, "load", lambda *a, **k: demo if (a, k) == (("demo",), {}) else load(*a, **k)
        )
    monkeypatch.chdir(tmp_path)
    assert run_page(path) == len(wanted)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_hub_ids_stand_only_in_blocks_that_are_not_run(path: Path) -> None:
    run = [b for b in blocks(path) if b.language == "python" and b.mark != NOT_RUN]
    assert [str(block) for block in run if HUB_ID.search(block.body)] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_commands_of_a_page_exist_with_their_options(path: Path) -> None:
    assert [fault for b in blocks(path) if b.language == "bash" for fault in faults(b.body)] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_links_of_a_page_lead_somewhere(path: Path) -> None:
    assert dead_links(path) == []


def dead_links(path: Path) -> list[str]:
    """Links and pictures that name a file that is not there."""
    links = re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8"))
    files = [link for link in links if not re.match(r"[a-z]+:", link)]
    return [link for link in files if not (path.parent / link).exists()]


def faults(script: str) -> list[str]:
    """Calls of `lens` with a command or an option that there is not."""
    from typer.main import get_command

    from lens.cli import app

    commands: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    found = []
    for call in re.split(r"&&|\||\n", script.replace("\\\n", " ")):
        words = shlex.split(call, comments=True)
        if not words or words[0] != "lens":
            continue
        command = commands.get(words[1]) if len(words) > 1 else None
        if command is None:
            found.append(call.strip())
            continue
        known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        options = [w.partition("=")[0] for w in words[2:] if re.match(r"--?[a-z]", w)]
        found += [f"{call.strip()}: {option}" for option in options if option not in known]
    return found


@pytest.mark.parametrize(
    "script",
    ["lens look demo", "lens run demo text --topk 3", "ls && lens demo --out x", "lens run -x 1"],
)
def test_a_command_that_does_not_exist_is_seen(script: str) -> None:
    assert len(faults(script)) == 1


def page(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "page.md"
    path.write_text(text)
    return path


def test_a_link_to_nowhere_is_seen(tmp_path: Path) -> None:
    path = page(tmp_path, "[a](page.md#x) ![b](none.png) [c](https://example.org/d)")
    assert dead_links(path) == ["none.png"]


def test_a_block_that_fails_is_seen(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        run_page(page(tmp_path, "# x\n\n```python\n1 / 0\n```\n"))


def test_a_block_marked_as_not_run_is_not_run(tmp_path: Path) -> None:
    text = "<!-- not run -->\n```python\n1 / 0\n```\n\n```python\n1\n```\n"
    assert run_page(page(tmp_path, text)) == 1


def test_a_false_output_is_seen(tmp_path: Path) -> None:
    text = "```python\na = 1.50\na\n```\n\n<!-- prints -->\n```text\n{}\n```\n"
    assert run_page(page(tmp_path, text.format("1.51"))) == 1
    with pytest.raises(AssertionError, match="not what was printed"):
        run_page(page(tmp_path, text.format("1.53")))


@pytest.mark.parametrize(("shown", "printed"), [("a 1.0", "b 1.0"), ("1.0", "1"), ("1", "2")])
def test_other_words_or_whole_numbers_are_not_alike(shown: str, printed: str) -> None:
    assert not alike(shown, printed)
    assert alike(shown, shown)
