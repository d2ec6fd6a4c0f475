"""`Leader` and `Follower`: rank 0 and the others watch one another; each notices within seconds when one is gone.

A connection of the mesh from each follower to the leader carries a beat every second in both directions. A rank has
failed when it says so, when its connection ends, when it is silent, or when it stands still:

* in a step, while others wait for it: each rank counts its steps through the same sequence of exchanges, so the slowest
  is known by its count;
* outside of one (it takes a request, plans, answers): its engine's loop comes round at least every second, busy or not.

What a failure does: the leader's calls raise `RankFailed`, processes it started are killed (which also frees a rank
that waits in a collective), and a follower that loses its leader ends its process. No process is left behind.
"""

import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from dsv4.dist.errors import PeerLost, RankFailed
from dsv4.dist.messages import Channel, Kind

BEAT_SECONDS = 1.0
SILENT_SECONDS = 6.0  # without a beat: stopped, or cut off
STALLED_SECONDS = 8.0  # behind the others without a step
_BLAME_SECONDS = 2.0  # a rank that lost its peer speaks before the peer's end is seen
_EXIT_SECONDS = 5.0
_STUCK_SECONDS = 3.0  # after a failure: a silent rank on a GPU ends all within 10 s


@dataclass
class Progress:
    """How far a rank is.

    count         only grows, and is the same on every rank at the same place
    num_turns     of the loop of its engine, and of waiting for others; 0 before there is an engine
    is_computing  whether the rank is in a step, which takes as long as it takes
    is_busy       whether it obeys a command that does
    """

    count: int = 0
    bytes_done: int = 0
    bytes_total: int = 0
    num_turns: int = 0
    is_computing: bool = False
    is_busy: bool = False

    def tick(self, weight: int = 1) -> None:
        """`weight`: of a place that a rank must not be taken to share with others for having counted as far."""
        self.count += weight

    def turn(self) -> None:
        """A sign of life of the thread that runs the engine."""
        self.num_turns += 1

    @contextmanager
    def busy(self) -> Iterator[None]:
        self.is_busy = True
        try:
            yield
        finally:
            self.is_busy = False

    def load(self, done: int, total: int) -> None:
        self.bytes_done, self.bytes_total = done, total


@dataclass
class _Peer:
    """What the leader knows of one follower."""

    rank: int
    channel: Channel
    heard_at: float
    moved_at: float
    turned_at: float
    progress: Progress = field(default_factory=Progress)
    is_ready: threading.Event = field(default_factory=threading.Event)


class Leader:
    """Rank 0, `connections` with the others by rank. `processes[i]` is rank i + 1 where this process started it, and is
    killed if anything fails.

    may_be_stuck  a call that waits for a rank which is gone may never come back (a GPU waits at a barrier): then this
                  process ends, with the failure on stderr. Nor would what Python does at a process's end (memory that
                  the GPU still uses is given back): after a failure it is left out, and the exit code is 1
    """

    def __init__(
        self, connections: Mapping[int, socket.socket], progress: Progress, *,
        processes: Sequence[subprocess.Popen[bytes]] = (), stalled_seconds: float = STALLED_SECONDS,
        may_be_stuck: bool = False,
    ) -> None:  # fmt: skip
        self._progress = progress
        now = self._moved_at = time.monotonic()
        self._last_count = 0
        self._stalled_seconds = stalled_seconds
        self._may_be_stuck = may_be_stuck
        self.processes = list(processes)
        self._peers = {rank: _Peer(rank, Channel(one), now, now, now) for rank, one in connections.items()}
        self._changed = threading.Condition()
        self._failure: str | None = None
        self._suspicion: tuple[float, str] | None = None  # when, and what a rank that blames another one said
        self._is_stopping = False
        self._working_since: float | None = None
        self._tell: Callable[[RankFailed], None] = lambda error: None
        for peer in self._peers.values():
            threading.Thread(target=self._read, args=(peer,), name=f"dsv4-rank-{peer.rank}", daemon=True).start()
        threading.Thread(target=self._watch, name="dsv4-ranks", daemon=True).start()

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

    # ---- work ----

    @property
    def is_lost(self) -> bool:
        """Whether waiting for the others is in vain."""
        return self._failure is not None or self._is_stopping

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

    def wait_until_ready(self, while_waiting: Callable[[], None] = lambda: None) -> None:
        """Until every follower is loaded."""
        for peer in self._peers.values():
            while not peer.is_ready.wait(0.2):
                while_waiting()
                if self._failure is not None:
                    raise RankFailed(self._failure)
        self._progress.tick()

    @property
    def bytes_loaded(self) -> int:
        """Over all ranks."""
        return self._progress.bytes_done + sum(peer.progress.bytes_done for peer in self._peers.values())

    # ---- watching ----

    def _read(self, peer: _Peer) -> None:
        """A follower's messages, until there are no more."""
        while (message := peer.channel.receive()) is not None:
            kind, values = message
            peer.heard_at = time.monotonic()
            if kind is Kind.READY:
                peer.is_ready.set()
            elif kind is Kind.BEAT:
                before, peer.progress = peer.progress, Progress(*values)
                if peer.progress.count != before.count:
                    peer.moved_at = peer.heard_at
                if peer.progress.num_turns != before.num_turns or peer.progress.is_computing or peer.progress.is_busy:
                    peer.turned_at = peer.heard_at
            elif kind is Kind.FAILED:
                is_peer_lost, text = values
                self._suspect(f"rank {peer.rank}: {text}", is_sure=not is_peer_lost)
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
            name = _name(peer.rank, self._process(peer.rank))
            if now - peer.heard_at > SILENT_SECONDS:
                self._suspect(f"{name} has not been heard of for {SILENT_SECONDS:g} s", is_sure=True)
            elif peer.progress.num_turns and now - peer.turned_at > SILENT_SECONDS:
                self._suspect(f"{name} hangs, and in no step, for {SILENT_SECONDS:g} s", is_sure=True)
        self._look_for_standstill(now)
        if self._suspicion is not None and now - self._suspicion[0] > _BLAME_SECONDS:
            self._suspect(self._suspicion[1], is_sure=True)

    def _look_for_standstill(self, now: float) -> None:
        """Of those that have come least far: who is awaited by others in a step, or is in one that others have left."""
        ranks = [(self._progress, self._moved_at, 0)]
        ranks += [(peer.progress, peer.moved_at, peer.rank) for peer in self._peers.values()]
        counts, working_since = [progress.count for progress, *_ in ranks], self._working_since
        is_left = not all(progress.is_computing for progress, *_ in ranks)
        for progress, since, rank in ranks:
            is_awaited = working_since is not None and progress.count < max(counts)
            if progress.count > min(counts) or not (is_awaited or (progress.is_computing and is_left)):
                continue
            if now - max(since, working_since or 0.0) > self._stalled_seconds:
                name, seconds = _name(rank, self._process(rank)), f"{self._stalled_seconds:g} s"
                self._suspect(f"{name} has made no progress for {seconds} while the others wait for it", is_sure=True)

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
            self._changed.wait_for(lambda: self.is_lost, SILENT_SECONDS + _BLAME_SECONDS)
            return self._failure or "a rank was lost"

    def _process(self, rank: int) -> subprocess.Popen[bytes] | None:
        return self.processes[rank - 1] if 0 < rank <= len(self.processes) else None


def check_started(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """`RankFailed` if one of the ranks 1, 2, ... has ended already."""
    for rank, process in enumerate(processes, 1):
        if process.poll() is not None:
            raise RankFailed(f"{_name(rank, process)} {_ending(process)} before it was ready")


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
