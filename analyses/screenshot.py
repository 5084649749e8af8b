"""Take the pictures of the report page that the README shows: reports/page-*.png.

Measures the demo model, and a fine-tune of it where that is installed, writes their pages to a
temporary folder, opens them in Chromium and saves what a picture's name says. Needs playwright and
a Chromium (``--browser`` says where).
"""

import argparse
import importlib.util
import tempfile
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

import headmix as hm

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


@dataclass(frozen=True)
class Picture:
    """A picture: which page, what is chosen on it, from the top of which panel, and its height."""

    name: str
    page: str
    chosen: str
    panel: str
    height: int


PICTURES = (
    Picture("heads", "demo", "layer=L4&head=2&metric=projection_kernel", "overview", 1000),
    Picture("pairs", "demo", "layer=L2&head=7&with=L2H9&order=likeness", "pairs", 1100),
    Picture("reads", "demo", "layer=L3&head=5", "graph", 760),
    Picture("fine-tune", "fine-tune", "layer=L4&head=9", "glance", 1000),
)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--out", type=Path, default=Path("reports"))
    options.add_argument("--browser", default="/usr/bin/chromium")
    options.add_argument("--dark", action="store_true")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        files = pages(Path(folder))
        browser = playwright.chromium.launch(executable_path=chosen.browser, args=ARGUMENTS)
        for picture in PICTURES:
            if picture.page in files:
                scheme = "dark" if chosen.dark else "light"
                take(browser, picture, files[picture.page], chosen.out, scheme)
        browser.close()


def pages(folder: Path) -> dict[str, Path]:
    """The pages that pictures are taken of, by name."""
    on_text = {"text": "default", "max_tokens": 20_000}
    demo = hm.measure("demo", **on_text)
    made = {"demo": hm.report(demo, folder / "demo.html")}
    if spec := importlib.util.find_spec("sre_embedding_model"):
        weights = Path((spec.submodule_search_locations or [""])[0]) / "model_weights"
        ds = hm.compare("demo", weights, **on_text)
        made["fine-tune"] = hm.report(ds, folder / "fine-tune.html")
    else:
        print("left out: page-fine-tune.png, for which sre-embedding-model is not installed")
    return made


def take(browser: Browser, picture: Picture, file: Path, out: Path, scheme: str) -> None:
    """Open a page where the picture's panel is at the top, and save what is seen."""
    window = {"width": 1280, "height": picture.height}
    page = browser.new_page(viewport=window, color_scheme=scheme)
    page.goto(f"file://{file}#{picture.chosen}")
    page.wait_for_selector("html[data-started]")
    page.evaluate(
        "id => scrollTo(0, document.getElementById(id).getBoundingClientRect().top + scrollY - "
        "document.querySelector('.bar').offsetHeight - 16)",
        picture.panel,
    )
    page.wait_for_timeout(3000)  # until the figures in sight are drawn
    path = out / f"page-{picture.name}.png"
    page.screenshot(path=path)
    page.close()
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
