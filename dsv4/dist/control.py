"""`Leader` and `Follower`: rank 0 and the others watch one another; each notices within seconds when one is gone.

One TCP connection from each follower to the leader carries what they say while loading, and a beat every second in
both directions.
A rank has failed when it says so, when its connection ends, when it is silent, or when it stands still while others
wait for it: each rank counts its steps through the same sequence of exchanges, so the slowest is known by its count.

What a failure does: the leader's calls raise `RankFailed`, processes it started are killed (which also frees a rank
that waits in a collective), and a follower that loses its leader ends its process. No process is left behind.
"""

from __future__ import annotations

import atexit
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from dsv4.dist.errors import PeerLost, RankFailed
from dsv4.dist.messages import Channel, Kind, pack, text_numbers, unpack

BEAT_SECONDS = 1.0
SILENT_SECONDS = 6.0  # without a beat: stopped, or cut off
STALLED_SECONDS = 8.0  # behind the others without a step
_BLAME_SECONDS = 2.0  # a rank that lost its peer speaks before the peer's end is seen
_CONNECT_SECONDS = 120.0
_EXIT_SECONDS = 5.0
_STUCK_SECONDS = 3.0  # after a failure: a silent rank on a GPU ends all within 10 s


class Progress:
    """How far this rank is: a count that only grows, the same on every rank at the same place; and bytes loaded."""

    def __init__(self) -> None:
        self.count = self.bytes_done = self.bytes_total = 0

    def tick(self, weight: int = 1) -> None:
        """`weight`: of a place that a rank must not be taken to share with others for having counted as far."""
        self.count += weight

    def load(self, done: int, total: int) -> None:
        self.bytes_done, self.bytes_total = done, total

    def numbers(self) -> list[int]:
        return [self.count, self.bytes_done, self.bytes_total]


@dataclass
class _Peer:
    """What the leader knows of one follower."""

    rank: int
    channel: Channel
    heard_at: float
    moved_at: float
    progress: list[int] = field(default_factory=lambda: [0, 0, 0])
    answers: queue.SimpleQueue[bytes] = field(default_factory=queue.SimpleQueue)


class Leader:
    """Rank 0. `processes[i]` is rank i + 1 where this process started it, and is killed if anything fails.

    may_be_stuck  a call that waits for a rank which is gone may never come back (a GPU waits at a barrier): then this
                  process ends, with the failure on stderr. Nor would what Python does at a process's end (memory that
                  the GPU still uses is given back): after a failure it is left out, and the exit code is 1
    """

    def __init__(
        self, size: int, host: str, token: bytes, progress: Progress, *,
        processes: Sequence[subprocess.Popen[bytes]] = (), stalled_seconds: float = STALLED_SECONDS,
        may_be_stuck: bool = False,
    ) -> None:  # fmt: skip
        self._size = size
        self._token = token
        self._progress = progress
        self._moved_at = time.monotonic()
        self._last_count = 0
        self._stalled_seconds = stalled_seconds
        self._may_be_stuck = may_be_stuck
        self.processes = list(processes)
        self._listener = socket.create_server((host, 0), backlog=size)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._peers: dict[int, _Peer] = {}
        self._changed = threading.Condition()
        self._failure: str | None = None
        self._suspicion: tuple[float, str] | None = None  # when, and what a rank that blames another one said
        self._is_stopping = False
        self._working_since: float | None = None
        self._tell: Callable[[RankFailed], None] = lambda error: None
        self._monitor = threading.Thread(target=self._watch, name="dsv4-ranks", daemon=True)

    # ---- the life of the ranks ----

    def connect(self) -> None:
        """Wait until every follower has come."""
        until = time.monotonic() + _CONNECT_SECONDS
        self._listener.settimeout(0.2)
        while len(self._peers) < self._size - 1:
            self._check_started()
            if time.monotonic() > until:
                missing = [rank for rank in range(1, self._size) if rank not in self._peers]
                raise RankFailed(f"ranks {missing} did not connect within {_CONNECT_SECONDS:g} s")
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            self._welcome(Channel(connection))
        self._listener.close()
        for peer in self._peers.values():
            threading.Thread(target=self._read, args=(peer,), name=f"dsv4-rank-{peer.rank}", daemon=True).start()
        self._monitor.start()

    def stop(self) -> None:
        """End every follower; those this process started are gone when it returns. Safe to repeat."""
        with self._changed:
            if self._is_stopping:
                return
            self._is_stopping = True
        for peer in self._peers.values():
            try:
                peer.channel.send(Kind.STOP)
            except OSError:
                continue  # gone already
        end_processes(self.processes, _EXIT_SECONDS)
        for peer in self._peers.values():
            peer.channel.close()
        self._listener.close()

    # ---- work ----

    @property
    def is_lost(self) -> bool:
        """Whether waiting for the others is in vain."""
        return self._failure is not None

    @property
    def failure(self) -> RankFailed | None:
        """Why the ranks are no more, once they are not."""
        return None if self._failure is None else RankFailed(self._failure)

    def when_failed(self, tell: Callable[[RankFailed], None]) -> None:
        """`tell` is called, in a thread of its own, if a rank fails, even while nothing runs."""
        self._tell = tell

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around what ranks do together. An error of rank 0's own is raised as it is, and is the end of the others; one
        that comes of losing another rank is reported as that rank's failure."""
        if self._failure is not None or self._is_stopping:
            raise RankFailed(self._failure or "the ranks were ended before")
        self._working_since = time.monotonic()
        try:
            yield
        except RankFailed:
            raise
        except BaseException as error:
            is_own = not isinstance(error, PeerLost)
            self._suspect(f"rank 0: {described(error)}", is_sure=is_own)
            if is_own:
                raise
            raise RankFailed(self._wait_for_failure()) from error
        finally:
            self._working_since = None

    def answers(self, while_waiting: Callable[[], None] = lambda: None) -> list[bytes]:
        """One answer from every follower, by rank."""
        found: dict[int, bytes] = {}
        while len(found) < self._size - 1:
            while_waiting()
            for rank, peer in self._peers.items():
                if rank in found:
                    continue
                try:
                    found[rank] = peer.answers.get(timeout=0.2)
                except queue.Empty:
                    if self._failure is not None:
                        raise RankFailed(self._failure) from None
        self._progress.tick()
        return [found[rank] for rank in sorted(found)]

    def bytes_loaded(self) -> tuple[int, int]:
        """Done and in total, over all ranks."""
        reports = [self._progress.numbers(), *(peer.progress for peer in self._peers.values())]
        return sum(report[1] for report in reports), sum(report[2] for report in reports)

    # ---- watching ----

    def _welcome(self, channel: Channel) -> None:
        message = channel.receive()
        if message is None or message[0] is not Kind.HELLO or message[1][8:] != self._token:
            channel.close()  # a stranger
            return
        rank, now = unpack(message[1][:8])[0], time.monotonic()
        self._peers[rank] = _Peer(rank, channel, heard_at=now, moved_at=now)

    def _check_started(self) -> None:
        for place, process in enumerate(self.processes):
            if process.poll() is not None:
                raise RankFailed(f"{_name(place + 1, process)} {_ending(process)} before it was ready")

    def _read(self, peer: _Peer) -> None:
        """A follower's messages, until there are no more."""
        while (message := peer.channel.receive()) is not None:
            kind, payload = message
            peer.heard_at = time.monotonic()
            if kind is Kind.ANSWER:
                peer.answers.put(payload)
            elif kind is Kind.BEAT:
                progress = unpack(payload)
                if progress[0] != peer.progress[0]:
                    peer.moved_at = peer.heard_at
                peer.progress = progress
            elif kind is Kind.FAILED:
                is_peer_lost, _, *text = unpack(payload)
                self._suspect(f"rank {peer.rank}: {bytes(text).decode(errors='replace')}", is_sure=not is_peer_lost)
        if self._is_stopping:
            return
        process = self._process(peer.rank)
        how = "closed its connection"
        if process is not None:
            try:
                process.wait(1.0)
                how = _ending(process)
            except subprocess.TimeoutExpired:
                pass  # the connection is gone all the same
        has_spoken = self._suspicion is not None and self._suspicion[1].startswith(f"rank {peer.rank}:")
        if not has_spoken:
            self._suspect(f"{_name(peer.rank, process)} {how}", is_sure=True)

    def _watch(self) -> None:
        beat_at = 0.0
        while not self._is_stopping and self._failure is None:
            time.sleep(0.1)
            now = time.monotonic()
            if now - beat_at >= BEAT_SECONDS:
                beat_at = now
                for peer in self._peers.values():
                    try:
                        peer.channel.send(Kind.BEAT)
                    except OSError:
                        continue  # its reader sees the end
            if self._progress.count != self._last_count:
                self._last_count, self._moved_at = self._progress.count, now
            self._look_for_trouble(now)
        if self._failure is not None:
            for process in self.processes:
                process.kill()
            self._tell(RankFailed(self._failure))
            self._end_if_stuck(time.monotonic() + _STUCK_SECONDS)

    def _end_if_stuck(self, until: float) -> None:
        while self._may_be_stuck and self._working_since is not None:
            if time.monotonic() > until:
                end_process(f"dsv4: error: {self._failure}")
            time.sleep(0.1)

    def _look_for_trouble(self, now: float) -> None:
        for peer in self._peers.values():
            if now - peer.heard_at > SILENT_SECONDS:
                name = _name(peer.rank, self._process(peer.rank))
                self._suspect(f"{name} has not been heard of for {SILENT_SECONDS:g} s", is_sure=True)
        self._look_for_standstill(now)
        if self._suspicion is not None and now - self._suspicion[0] > _BLAME_SECONDS:
            self._suspect(self._suspicion[1], is_sure=True)

    def _look_for_standstill(self, now: float) -> None:
        working_since = self._working_since
        if working_since is None:
            return
        furthest = max(self._progress.count, *(peer.progress[0] for peer in self._peers.values()))
        standing = [(self._progress.count, self._moved_at, 0)]
        standing += [(peer.progress[0], peer.moved_at, peer.rank) for peer in self._peers.values()]
        count, since, rank = min(standing)
        if count < furthest and now - max(since, working_since) > self._stalled_seconds:
            name = _name(rank, self._process(rank))
            self._suspect(
                f"{name} has made no progress for {self._stalled_seconds:g} s while the others wait for it",
                is_sure=True,
            )

    def _suspect(self, text: str, *, is_sure: bool) -> None:
        """A failure, or what a rank says that lost another one: then the other's own end is waited for a moment."""
        with self._changed:
            if self._failure is None and not self._is_stopping:
                if is_sure:
                    self._failure = text
                    if self._may_be_stuck:
                        atexit.register(_leave)
                elif self._suspicion is None:
                    self._suspicion = time.monotonic(), text
            self._changed.notify_all()

    def _wait_for_failure(self) -> str:
        """The failure behind an error that was just seen."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, SILENT_SECONDS + _BLAME_SECONDS)
            return self._failure or "a rank was lost"

    def _process(self, rank: int) -> subprocess.Popen[bytes] | None:
        return self.processes[rank - 1] if 0 < rank <= len(self.processes) else None


def end_processes(processes: Sequence[subprocess.Popen[bytes]], patience: float = 0.0) -> None:
    """Wait for processes that should end, and kill those that do not."""
    until = time.monotonic() + patience
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdin is not None:
            process.stdin.close()


def end_process(text: str) -> None:
    """At once: the main thread may wait for another rank, and would for ever."""
    print(text, file=sys.stderr, flush=True)
    os._exit(1)


def _leave() -> None:
    """In place of the end that Python gives a process."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)


def described(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, (PeerLost, ValueError)) and text else f"{type(error).__name__}: {text}"


def _name(rank: int, process: subprocess.Popen[bytes] | None) -> str:
    return f"rank {rank}" if process is None else f"rank {rank} (process {process.pid})"


def _ending(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
