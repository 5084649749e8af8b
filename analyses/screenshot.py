"""Take the picture of the report page that the README shows: reports/report-demo.png.

Measures the demo model, writes its page to a temporary folder, opens it in Chromium and saves what
fits a window. Needs playwright and a Chromium (``--browser`` says where).
"""

import argparse
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

import headmix as hm

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--out", type=Path, default=Path("reports/report-demo.png"))
    options.add_argument("--browser", default="/usr/bin/chromium")
    options.add_argument("--dark", action="store_true")
    chosen = options.parse_args()
    dataset = hm.measure("demo", "default", max_tokens=20_000)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = hm.report(dataset, Path(folder) / "report.html")
        browser = playwright.chromium.launch(executable_path=chosen.browser, args=ARGUMENTS)
        page = browser.new_page(
            viewport={"width": 1280, "height": 1160},
            color_scheme="dark" if chosen.dark else "light",
        )
        page.goto(f"file://{file}#layer=L4&head=2")
        page.wait_for_selector("#overview-plot[data-ready]")
        page.evaluate("scrollTo(0, document.getElementById('overview').offsetTop - 64)")
        page.wait_for_selector("#depth-plot[data-ready]")
        page.wait_for_timeout(500)  # until the figures have settled
        page.screenshot(path=chosen.out)
        browser.close()
    print(f"{chosen.out}: {chosen.out.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
