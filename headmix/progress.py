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

#: Called with (what, done, total); a total of 0 is unknown.
Progress = Callable[[str, int, int], None]


@contextmanager
def progress(shown: bool) -> Iterator[Progress]:
    """A ``progress(what, done, total)`` that draws on stderr once work has lasted two seconds."""
    bar = Bar(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        _Rate(), TimeRemainingColumn(), console=Console(stderr=True), transient=True,
    )  # fmt: skip
    task = bar.add_task("starting", total=None)

    def report(what: str, done: int, total: int) -> None:
        bar.update(task, description=printable(what), completed=done, total=total or None)

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
    """Steps a second, or seconds a step where those are slow."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        if not speed:
            return Text("")
        return Text(f"{speed:.1f}/s" if speed >= 1 else f"{1 / speed:.1f} s each", style="dim")
