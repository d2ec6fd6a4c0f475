"""`Agreement`: ranks agree on the size of each step, since every rank computes its experts for all of them.

A rank with requests sends the sizes it needs to all others and waits for theirs; then all run a step of the largest
sizes. A rank without requests answers with zeros and runs padding: its experts serve the others. While all ranks are
idle, no message is sent.

What is said is six numbers, to each other rank over a connection of its own:

    round   how many there were before; the same on all ranks
    kind    a step, or a call outside the engine (calls.py), which only rank 0 makes: it goes first
    4 more  `StepSize`, or the call's rows and layer

On a GPU a step is agreed on while the one before it runs, so that nothing waits for this but the host.
"""

import selectors
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from dsv4.cache.errors import NoFreeSlot
from dsv4.dist.control import Leader, Progress
from dsv4.dist.errors import PeerLost, RankFailed, RanksDiverged
from dsv4.dist.follower import Follower
from dsv4.engine.step.size import Sizes, StepSize

STEP = 0  # other kinds are calls
_LAYOUT = struct.Struct("<6q")
_LOOK_UP_SECONDS = 0.5
_READ_BYTES = 4096
_NOTHING = StepSize()
_ROUND = 1 << 20  # more than the exchanges of a step: who is in an earlier round is behind, and is seen to be


class Said(NamedTuple):
    """By one rank, in one round."""

    round: int
    kind: int
    first: int
    second: int
    third: int
    fourth: int


class Agreement(Sizes):
    """`Sizes` of a rank among others. `sockets` by rank, not blocking; `link` and `progress`: see dsv4/dist/control.py.

    serve       makes a call of rank 0's with rows of padding
    num_rounds  how many there have been
    """

    def __init__(
        self, sockets: Mapping[int, socket.socket], link: Leader | Follower, progress: Progress,
        serve: Callable[[Said], None],
    ) -> None:  # fmt: skip
        self._sockets = dict(sockets)
        self._link, self._progress, self._serve = link, progress, serve
        self._held = {rank: bytearray() for rank in sockets}
        self._said: dict[int, deque[Said]] = {rank: deque() for rank in sockets}
        self.num_rounds = 0
        self._lost: list[int] = []
        self.selector = selectors.DefaultSelector()
        for rank, one in self._sockets.items():
            self.selector.register(one, selectors.EVENT_READ, rank)

    @property
    def sockets(self) -> Sequence[socket.socket]:
        return tuple(self._sockets.values())

    @property
    def is_called(self) -> bool:
        """Also when a rank has gone: a step is then refused. Reads nothing: a loop that waits for the same sockets must
        see it too."""
        if self._link.is_lost:
            return False
        return bool(self._lost) or any(self._said.values()) or bool(self.selector.select(0.0))

    def agree(self, own: StepSize | None) -> StepSize | None:
        size: StepSize | None = None
        while size is None and (own is not None or self.is_called):
            said = self._exchange(STEP, *(own or _NOTHING))
            self._progress.is_computing = True
            call = next((one for one in said if one.kind != STEP), None)
            if call is None:
                size = StepSize(*(max(numbers) for numbers in zip(*(one[2:] for one in said), strict=True)))
            else:
                self._serve(call)
        self._progress.is_computing = True  # also where what was launched before is waited for
        return size

    def call(self, kind: int, num_rows: int, layer_idx: int) -> None:
        """All ranks run this many rows through the same layers; this one does so when it returns."""
        self._exchange(kind, num_rows, layer_idx, 0, 0)
        self._progress.is_computing = True

    @contextmanager
    def working(self) -> Iterator[None]:
        passed: NoFreeSlot | None = None
        with self._link.working():
            try:
                yield
            except NoFreeSlot as error:  # of this rank's requests alone
                passed = error
            finally:
                self._progress.is_computing = False
        if passed is not None:
            raise passed

    def when_failed(self, tell: Callable[[RankFailed], None]) -> None:
        self._link.when_failed(tell)

    def _exchange(self, kind: int, first: int, second: int, third: int, fourth: int) -> list[Said]:
        """What every rank says in this round, this one included."""
        self._progress.is_computing = False
        self._progress.tick(_ROUND)
        own = Said(self.num_rounds, kind, first, second, third, fourth)
        data = _LAYOUT.pack(*own)
        for rank, one in self._sockets.items():
            try:
                one.sendall(data)  # no more than two rounds are ever on their way
            except OSError as error:
                raise PeerLost(f"rank {rank} has closed its connection") from error
        while not all(self._said.values()):
            if self._lost or self._link.is_lost:
                names = ", ".join(map(str, self._lost)) or "another"
                raise PeerLost(f"a step will never begin: rank {names} has failed")
            self._receive(_LOOK_UP_SECONDS)
            self._progress.turn()
        said = [own, *(one.popleft() for one in self._said.values())]
        for rank, heard in zip(self._said, said[1:], strict=True):
            if heard.round != self.num_rounds:
                raise RanksDiverged(f"rank {rank} is in step {heard.round}, this one in step {self.num_rounds}")
        self.num_rounds += 1
        self._progress.tick()
        return said

    def _receive(self, seconds: float) -> None:
        for key, _ in self.selector.select(seconds):
            try:
                data = self._sockets[key.data].recv(_READ_BYTES)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if not data:
                self.selector.unregister(self._sockets[key.data])
                self._lost.append(key.data)
            held = self._held[key.data]
            held += data
            while len(held) >= _LAYOUT.size:
                self._said[key.data].append(Said._make(_LAYOUT.unpack_from(held)))
                del held[: _LAYOUT.size]
