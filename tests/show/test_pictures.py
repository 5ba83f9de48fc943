import asyncio
import builtins
import importlib.util
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from lens.cli import main
from lens.errors import MissingPackageError
from lens.show.export import export
from lens.show.heatmap import heatmap
from lens.show.pictures import MOST_PNG_PX, OFFLINE, _scale, picture, require_drawable
from tests.browsing import system_chromium
from tests.conftest import absent
from tests.show.made import made

MAGIC = {"png": b"\x89PNG\r\n\x1a\n", "svg": b"<svg", "pdf": b"%PDF-"}


def with_kaleido():
    if importlib.util.find_spec("kaleido") is None:
        absent("kaleido", 'pip install "tied-lens[images]"')
    import kaleido

    return kaleido


@pytest.fixture(scope="session")
def kaleido_server():
    """One browser for all pictures of the run."""
    system_chromium()
    kaleido = with_kaleido()
    kaleido.start_sync_server(n=1, silence_warnings=True, **OFFLINE)
    yield
    kaleido.stop_sync_server(silence_warnings=True)


@pytest.mark.browser
@pytest.mark.parametrize("kind", MAGIC)
def test_a_picture_has_its_format_and_holds_the_map(kind, small, tmp_path, kaleido_server):
    path = export(small, tmp_path / f"map.{kind}")
    data = path.read_bytes()
    assert data.startswith(MAGIC[kind])
    assert len(data) > 20_000
    if kind == "png":
        width = int.from_bytes(data[16:20], "big")
        assert width == 2 * heatmap(small, max_width_px=None).layout.width
    if kind == "svg":
        text = data.decode("utf-8")
        assert "␣Paris" in text
        assert "[U+FEFF]" in text
        assert "<script" not in text
        assert "http://127" not in text
    assert [one.name for one in tmp_path.iterdir()] == [f"map.{kind}"]


@pytest.mark.browser
def test_a_picture_can_be_drawn_while_an_event_loop_runs(small, kaleido_server):
    """As in a notebook."""

    async def inside():
        return picture(heatmap(small), "svg")

    with ThreadPoolExecutor(1) as own_thread:  # playwright keeps a loop running in this one
        assert own_thread.submit(asyncio.run, inside()).result().startswith(b"<svg")


def test_without_kaleido_the_message_holds_the_install_line(small, tmp_path, monkeypatch):
    real = builtins.__import__

    def no_kaleido(name, *args, **kwargs):
        if name.split(".")[0] == "kaleido":
            raise ImportError("No module named 'kaleido'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_kaleido)
    with pytest.raises(MissingPackageError, match=r'pip install "tied-lens\[images\]"'):
        export(small, tmp_path / "map.png")
    with pytest.raises(MissingPackageError, match=r'pip install "tied-lens\[images\]"'):
        require_drawable("png")
    assert not list(tmp_path.iterdir())
    export(small, tmp_path / "map.json")


def test_without_a_browser_the_message_holds_the_install_line(small, tmp_path, monkeypatch, capsys):
    with_kaleido()
    from choreographer.browsers.chromium import Chromium

    monkeypatch.setattr(Chromium, "find_browser", classmethod(lambda cls, **kwargs: None))
    monkeypatch.setattr(shutil, "which", lambda *args, **kwargs: None)
    monkeypatch.setattr(sys.modules["kaleido"], "_global_server", _Stopped())
    monkeypatch.delenv("BROWSER_PATH", raising=False)
    (tmp_path / "map.svg").write_text("mine")
    with pytest.raises(MissingPackageError, match="apt install chromium"):
        export(small, tmp_path / "map.svg")
    assert (tmp_path / "map.svg").read_text() == "mine"
    for command in ("run no-such-model x", "measure no-such-model", "compare no-such-model other"):
        assert main([*command.split(), "-o", str(tmp_path / "map.pdf")]) == 1
        assert "apt install chromium" in capsys.readouterr().err
    monkeypatch.setenv("BROWSER_PATH", "/somewhere/chromium")
    require_drawable("svg")  # what is named there is for the browser's start to judge


class _Stopped:
    def is_running(self):
        return False


def test_a_long_prompt_is_drawn_no_larger_than_chromium_can():
    assert _scale(heatmap(made(prompt=12)), "png") == 2.0
    wide = heatmap(made(prompt=400, layers=2, awkward=False), max_width_px=None)
    assert wide.layout.width * _scale(wide, "png") <= MOST_PNG_PX
    assert _scale(wide, "svg") == 1.0


def test_kaleido_is_told_to_fetch_nothing():
    assert OFFLINE["mathjax"] is False
    assert OFFLINE["proxy_server"].startswith("http://127.0.0.1:")
