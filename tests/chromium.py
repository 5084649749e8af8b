"""A real browser that is offline and reports every request, error and console message."""

from pathlib import Path

import pytest

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


@pytest.fixture(scope="session")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}")
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture
def visit(browser):
    """Open a file; afterwards fail if it asked for anything else or complained."""
    contexts, troubles = [], []

    def open_page(path: Path, address: str = "", scheme: str = "light", width: int = 1280):
        context = browser.new_context(
            viewport={"width": width, "height": 860}, color_scheme=scheme, offline=True
        )
        contexts.append(context)
        page = context.new_page()
        own = f"file://{path}"
        page.on("request", lambda r: r.url.split("#")[0] == own or troubles.append(r.url))
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("dialog", lambda dialog: troubles.append(dialog.message))
        page.goto(own + address)
        if page.locator("#data").count():  # a report: until its numbers are unpacked
            page.wait_for_selector("html[data-started]", timeout=20_000)
        return page

    yield open_page
    for context in contexts:
        context.close()
    # pictures of a heatmap are data, not requests that leave the page
    assert [t for t in troubles if not t.startswith(("data:image/", "blob:null/"))] == []
