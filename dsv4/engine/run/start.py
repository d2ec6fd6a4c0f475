"""`Start`: how a model comes up: what each phase takes, what it shows meanwhile, and kernels compiled beside it; how
many threads it takes on a CPU."""

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from time import perf_counter

import torch

from dsv4.config import ModelConfig
from dsv4.loader.progress import Progress, count_progress

Tell = Callable[[str, int, int], None]  # what is done, how many of them, of how many
_SHOWN_SECONDS = 0.5
_LOG = logging.getLogger("dsv4.engine")
ONE_THREAD_BELOW = 2048  # hidden_size; measured in docs/decisions/server-life.md


def choose_threads(config: ModelConfig) -> int | None:
    """How many threads a forward call takes on a CPU: 1 for a small model, whose products are too small to share, and
    threads that wait for one another spin. None leaves it to torch (one per core), as where OMP_NUM_THREADS is set.

    `official` numerics have the same bits on any number of threads; `exact` ones do not.
    The model alone decides, never a measurement: the same call must give the same bits at any time.
    """
    return 1 if config.hidden_size < ONE_THREAD_BELOW and "OMP_NUM_THREADS" not in os.environ else None


def set_threads(config: ModelConfig) -> None:
    """Apply the choice, to the whole process: torch has one setting for all its threads."""
    number = choose_threads(config)
    if number is not None:
        torch.set_num_threads(number)


class Start:
    """seconds   of each phase, in order; of `beside` tasks too, which take part in no sum
    progress  as `LLM` takes it
    """

    def __init__(self, progress: Progress = False) -> None:
        self.progress = progress
        self.seconds: dict[str, float] = {}
        self.beside_seconds: dict[str, float] = {}
        self._begun = perf_counter()
        self._beside: Future[bool] | None = None
        self._beside_at = ("", 0, 1)

    @contextmanager
    def phase(self, name: str) -> Iterator[Tell]:
        """Times what is inside, and yields a function of (what is done, how many of them, of how many)."""
        begun = perf_counter()
        with count_progress(self.progress) as tell:
            yield tell
        self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - begun
        _LOG.info("%s: %.1f s", name, self.seconds[name])

    def beside(self, name: str, work: Callable[[Tell], None]) -> None:
        """Begin `work` in a thread; `join` waits for it. What it raises is only logged: it is a help."""

        def note(what: str, done: int, total: int) -> None:
            self._beside_at = (what, done, total)

        def timed() -> bool:
            begun = perf_counter()
            try:
                work(note)
            except Exception as error:
                _LOG.warning("%s beside the reading failed: %s: %s", name, type(error).__name__, error)
                return False
            self.beside_seconds[name] = perf_counter() - begun
            return True

        threads = ThreadPoolExecutor(1, thread_name_prefix="dsv4-start")
        self._beside = threads.submit(timed)
        threads.shutdown(wait=False)

    def join(self, tell: Tell) -> bool:
        """Wait for what was begun beside; whether there was something, and it did its work."""
        while self._beside is not None and not self._beside.done():
            tell(*self._beside_at)
            wait([self._beside], timeout=_SHOWN_SECONDS)
        return self._beside is not None and self._beside.result()

    @property
    def text(self) -> str:
        """One line: all phases, and what ran beside them."""
        parts = [f"{name} {seconds:.1f}" for name, seconds in self.seconds.items()]
        beside = [f"{name} {seconds:.1f} meanwhile" for name, seconds in self.beside_seconds.items()]
        return f"{perf_counter() - self._begun:.1f} s: {', '.join(parts + beside)}"
