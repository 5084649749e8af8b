"""Progress on a terminal: what is done, how fast, and how long the rest will take."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.text import Text

from headmix.terminal import printable

#: Work that ends sooner shows no progress.
PATIENCE_S = 2.0

#: What is counted while text runs.
TOKENS = "tokens"

#: Called with (what, done, total); a total of 0 is unknown.
Progress = Callable[[str, int, int], None]


@contextmanager
def progress(shown: bool) -> Iterator[Progress]:
    """A ``progress(what, done, total)`` that draws on stderr once work has lasted two seconds.

    What begins with "plan: " is printed as a line of its own, and stays.
    """
    bar = Bar(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        _Rate(), TimeRemainingColumn(), console=Console(stderr=True), transient=True,
    )  # fmt: skip
    task, kind = bar.add_task("starting", total=None), ("", 0)

    def report(what: str, done: int, total: int) -> None:
        nonlocal task, kind
        if shown and what.startswith("plan: "):
            return bar.console.print(printable(what.removeprefix("plan: ")), highlight=False)
        unit = TOKENS if what == TOKENS else ""
        if kind != (unit, total):  # other work, with a rate of its own
            bar.remove_task(task)
            task, kind = bar.add_task("", total=total or None, unit=unit), (unit, total)
        bar.update(task, description=printable(what), completed=done)

    timer = threading.Timer(PATIENCE_S, bar.start)
    timer.daemon = True
    if shown:
        timer.start()
    try:
        yield report
    finally:
        timer.cancel()
        if timer.is_alive():  # it may be about to start the bar
            timer.join()
        if bar.live.is_started:  # stopping one that never started prints an empty line
            bar.stop()


class _Rate(ProgressColumn):
    """Steps or tokens a second, or seconds a step where those are slow."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        if not speed:
            return Text("")
        if task.fields.get("unit"):
            return Text(f"{speed:,.0f} {task.fields['unit']}/s", style="dim")
        return Text(f"{speed:.1f}/s" if speed >= 1 else f"{1 / speed:.1f} s each", style="dim")
