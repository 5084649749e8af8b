"""The report page: how large it is, and how long until a head can be chosen in it.

Run: python tests/benchmarks/bench_page.py [RUN.nc …]. Without files: the demo model and, where its
package is installed, SmolLM2-135M, both with everything there is on little text (the size of a page
does not depend on how much text was read), and a made-up run of 80 layers of 64 heads.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # chromium, synthetic

import xarray as xr
from chromium import ARGUMENTS, CHROMIUM
from playwright.sync_api import Browser, sync_playwright
from synthetic import large_run
from table import show

import headmix as hm

#: Megabytes and seconds.
BARS = {"MiniLM": (5, 2), "SmolLM2-135M": (12, None), "80 × 64 made up": (25, 3)}
TRIES = 3


def everything(model: Any) -> xr.Dataset:
    """All metrics, also those that measure leaves out unless asked, labels and interventions."""
    return hm.measure(
        model,
        "default",
        labels="position,capitalised,word_initial",
        causal=hm.Interventions(tokens=20, interactions=20),
        metrics=list(hm.catalogue()),
        max_tokens=1500,
        within_position=True,
        folds=2,  # what is summed over all layers' heads side by side is large
    )


def interactive(browser: Browser, path: Path) -> tuple[float, float, float]:
    """Seconds until the page's script has run, the map of heads is drawn, a chosen head shows."""
    page = browser.new_context(offline=True).new_page()
    begun = time.perf_counter()
    page.goto(f"file://{path}#overview", wait_until="commit")
    page.wait_for_selector("html[data-started]")
    started = time.perf_counter()
    page.wait_for_selector("#overview-plot[data-ready]")
    drawn = time.perf_counter()
    page.select_option("#card select[data-state=head]", "3")
    while not page.evaluate(
        "document.getElementById('card-name').textContent.endsWith('H3')"
        " && document.getElementById('overview-plot').layout.shapes.some((s) => s.x0 === 2.5)"
    ):
        page.wait_for_timeout(5)
    chosen = time.perf_counter()
    page.context.close()
    return started - begun, drawn - begun, chosen - begun


def row(browser: Browser, name: str, ds: xr.Dataset, folder: Path) -> None:
    begun = time.perf_counter()
    path = hm.report(ds, folder / f"{len(name)}.html")
    written = time.perf_counter() - begun
    size = path.stat().st_size / 1e6
    most, longest = BARS.get(name, (None, None))
    show(f"{name}: size (written in {written:.0f} s)", "", f"{size:.2f} MB", "",
         f"≤ {most} MB" if most else "", most and size <= most)  # fmt: skip
    tries = [interactive(browser, path) for _ in range(TRIES)]
    for what, times in zip(("script has run", "map is drawn", "a chosen head shows"),
                           zip(*tries, strict=True), strict=True):  # fmt: skip
        last = what == "a chosen head shows" and longest
        show(f"{name}: until {what}", "", f"{min(times):.2f} s", "",
             f"≤ {longest} s" if last else "", min(times) <= longest if last else None)  # fmt: skip


def smollm2() -> xr.Dataset | None:
    from smollm2 import folder_and_file

    try:
        folder, file = folder_and_file()
    except SystemExit as missing:
        print(missing)
        return None
    return everything(hm.load(str(folder), gguf_file=file))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        if files := sys.argv[1:]:
            runs = {file: lambda file=file: hm.open_results(file) for file in files}
        else:
            runs = {"MiniLM": lambda: everything(hm.load("demo"))}
            runs |= {"SmolLM2-135M": smollm2, "80 × 64 made up": large_run}
        for name, made in runs.items():
            if (ds := made()) is not None:
                row(browser, name, ds, Path(folder))
        browser.close()


if __name__ == "__main__":
    main()
