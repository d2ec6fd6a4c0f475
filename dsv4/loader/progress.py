"""Progress over bytes: a transient bar on stderr, a caller's function, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = bool | Callable[[int, int], None]  # a function gets (bytes done, bytes in total)


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
        with RichProgress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task(title, total=total_bytes)
            yield lambda num_bytes: bar.advance(task, num_bytes)
    else:
        done = 0

        def advance(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            progress(done, total_bytes)

        yield advance
