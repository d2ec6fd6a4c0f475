"""`Follower`: any rank but the first, as far as it watches the first and is watched by it: see control.py."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple

from dsv4.dist import control
from dsv4.dist.control import BEAT_SECONDS, Progress, described, end_process
from dsv4.dist.errors import PeerLost, RankFailed
from dsv4.dist.messages import Channel, Kind

_STOP_SECONDS = 0.5  # a rank that ends as it should may be seen before the word that all do


class Follower:
    """Any other rank. `on_lost` is called, in a thread, when the leader has gone: by default the process ends."""

    def __init__(
        self, connection: socket.socket, rank: int, progress: Progress, *, on_lost: Callable[[str], None] | None = None
    ) -> None:  # fmt: skip
        self._rank = rank
        self._progress = progress
        self._on_lost = on_lost or self._end
        self._channel = Channel(connection)
        self._heard_at = time.monotonic()
        self._is_over = False
        self._stopped = threading.Event()
        self._on_stop: Callable[[], None] = lambda: None
        for task in (self._read, self._beat):
            threading.Thread(target=task, name=f"dsv4-{task.__name__.strip('_')}", daemon=True).start()

    @property
    def is_lost(self) -> bool:
        """Whether the leader has gone, or has ended the work."""
        return self._is_over

    @property
    def is_stopped(self) -> bool:
        """Whether the leader has ended the work, or has gone."""
        return self._stopped.is_set()

    def when_stopped(self, stop: Callable[[], None]) -> None:
        """`stop` is called, in a thread, at the end of the work; at once if that has come."""
        self._on_stop = stop
        if self.is_stopped:
            stop()

    def when_failed(self, tell: Callable[[RankFailed], None]) -> None:
        """A failure elsewhere ends this process."""

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around what ranks do together. An error here is the end of all."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, PeerLost):
                self._stopped.wait(_STOP_SECONDS)
            if self._is_over:
                raise RankFailed("the ranks were ended") from error
            if isinstance(error, RankFailed):
                raise
            self.report(error)
            raise RankFailed(f"rank {self._rank}: {described(error)}") from error

    def ready(self) -> None:
        """This rank is loaded."""
        self._progress.tick()
        self._channel.send(Kind.BEAT, *astuple(self._progress))
        self._channel.send(Kind.READY)

    def report(self, error: BaseException) -> None:
        """This rank cannot go on. The leader ends the others."""
        try:
            self._channel.send(Kind.FAILED, isinstance(error, PeerLost), described(error))
        except OSError:
            return  # the leader has gone too

    def close(self) -> None:
        self._is_over = True
        self._channel.close()

    def _read(self) -> None:
        while (message := self._channel.receive()) is not None:
            kind, _ = message
            self._heard_at = time.monotonic()
            if kind is Kind.STOP:
                self._is_over = True
                self._stopped.set()
                self._on_stop()
                return
        if not self._is_over:
            self._lose("rank 0 has gone")

    def _beat(self) -> None:
        while not self._is_over:
            try:
                self._channel.send(Kind.BEAT, *astuple(self._progress))
            except OSError:
                return  # the reader sees the end
            if time.monotonic() - self._heard_at > control.SILENT_SECONDS:
                self._lose(f"rank 0 has not been heard of for {control.SILENT_SECONDS:g} s")
                return
            time.sleep(BEAT_SECONDS)

    def _lose(self, why: str) -> None:
        self._is_over = True
        self._on_lost(why)
        self._stopped.set()
        self._on_stop()

    def _end(self, why: str) -> None:
        end_process(f"dsv4: rank {self._rank} ends: {why}")
