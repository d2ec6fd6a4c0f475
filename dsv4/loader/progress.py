"""Progress over bytes, and over counts: a transient bar on stderr, lines of the log where that is no terminal, a
caller's function, or nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = bool | Callable[[int, int], None]  # a function gets (bytes done, bytes in total)


_LINE_SECONDS = 10.0
_LOG = logging.getLogger("dsv4.engine")


@contextmanager
def byte_progress(progress: Progress, total_bytes: int, title: str) -> Iterator[Callable[[int], None]]:
    """Yields `advance(num_bytes)`."""
    if progress is False:
        yield lambda num_bytes: None
    elif progress is True:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as RichProgress

        columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        console = Console(stderr=True)
        if not console.is_terminal:
            yield _lines(total_bytes, title)
            return
        with RichProgress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(title, total=total_bytes)
            yield lambda num_bytes: bar.advance(task, num_bytes)
    else:
        done = 0

        def advance(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            progress(done, total_bytes)

        yield advance


@contextmanager
def count_progress(progress: Progress) -> Iterator[Callable[[str, int, int], None]]:
    """Yields `tell(what, done, total)`. A caller's function hears of bytes alone."""
    if progress is not True:
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
    from rich.progress import Progress as RichProgress

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    last = time.monotonic()

    def tell_log(what: str, done: int, total: int) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= _LINE_SECONDS and done < total:
            last = now
            _LOG.info("%s: %d of %d", what, done, total)

    if not console.is_terminal:
        yield tell_log
        return
    bar, tasks = RichProgress(*columns, console=console, transient=True), dict[str, TaskID]()

    def tell(what: str, done: int, total: int) -> None:
        if what not in tasks:
            bar.start()  # not before: a terminal has one bar at a time, and bytes may have it now
            tasks[what] = bar.add_task(what, total=total)
        bar.update(tasks[what], completed=done, total=total)

    try:
        yield tell
    finally:
        bar.stop()


def _lines(total_bytes: int, title: str) -> Callable[[int], None]:
    """A line every ten seconds: for services, whose start would be silent for minutes."""
    begun = last = time.monotonic()
    done = 0

    def advance(num_bytes: int) -> None:
        nonlocal done, last
        done += num_bytes
        now = time.monotonic()
        if now - last >= _LINE_SECONDS and done < total_bytes:
            last, speed = now, done / (now - begun)
            left = (total_bytes - done) / speed
            _LOG.info(
                "%s: %.1f of %.1f GB, %.2f GB/s, %.0f s left", title, done / 1e9, total_bytes / 1e9, speed / 1e9, left
            )

    return advance
