"""One Chromium for the whole run; with CI=true its absence fails instead of skipping."""

import shutil

import pytest

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


def system_chromium():
    """Where the system's Chromium is; skips, or fails under CI, where there is none."""
    from tests.conftest import absent

    found = shutil.which("chromium") or shutil.which("chromium-browser")
    return found or absent("Chromium", "apt install chromium")


@pytest.fixture(scope="session")
def browser():
    path = system_chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        launched = play.chromium.launch(executable_path=path, args=FLAGS)
        yield launched
        launched.close()


def _opener(browser, folder):
    """A function that opens HTML text in a fresh page, and the list of pages it opened.

    A page records what it requests, and its errors and dialogs.
    """
    pages = []

    def open_(html, *, ready="html[data-ready=yes]", width=1280, **context):
        path = folder / f"page{len(pages)}.html"
        path.write_text(html, encoding="utf-8")
        page = browser.new_page(viewport={"width": width, "height": 900}, **context)
        pages.append(page)
        page.requests, page.faults, page.refused = [], [], []
        page.on("request", lambda request: page.requests.append(request.url))
        page.on("requestfailed", lambda request: page.refused.append(request.failure))
        page.on("pageerror", lambda error: page.faults.append(str(error)))
        page.on("dialog", lambda dialog: page.faults.append(f"dialog {dialog.message}"))
        page.goto(path.as_uri())
        if ready:
            page.wait_for_selector(ready, timeout=60_000)
        return page

    return open_, pages


@pytest.fixture
def opened(browser, tmp_path):
    """Opens pages for one test."""
    open_, pages = _opener(browser, tmp_path)
    yield open_
    for page in pages:
        page.close()


@pytest.fixture(scope="module")
def module_opened(browser, tmp_path_factory):
    """Opens pages that the tests of a module share, because they only look."""
    open_, pages = _opener(browser, tmp_path_factory.mktemp("pages"))
    yield open_
    for page in pages:
        page.close()
