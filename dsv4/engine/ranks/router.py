"""`Router`: which rank a new request is given to, and when. Pure Python, no torch.

Requests that no rank has room for wait here, in one order: that of any scheduler (priority with ageing, then arrival).
The first of them goes to a rank as soon as one has room; none overtakes it. After that a request never changes its
rank, whose engine runs and preempts it like any other.

It goes to the rank that has the longest prefix of its tokens, unless that rank has too many requests already: one more
than the emptiest rank has costs as much as reading `IMBALANCE_TOKENS` tokens again. Where no prefix decides, it goes to
the rank with most room. If no rank has room, a request of higher priority goes to the rank that holds the lowest-ranked
request, which it preempts.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from math import inf

from dsv4.cache.prefix.tree import KEY_BYTES, ChainKeys
from dsv4.cache.schema import blocks_at_position
from dsv4.config import BLOCK_TOKENS
from dsv4.engine.link.messages import Load
from dsv4.engine.request import Request, expire

IMBALANCE_TOKENS = BLOCK_TOKENS
AGING_STEPS = 1024
Order = tuple[int, int]


@dataclass
class Room:
    """What a rank has left, and what it knows.

    num_open    requests it was given that are not over
    num_tokens  that they have yet to feed
    known       keys of prefixes that it can start from
    """

    num_slots: int
    num_blocks: int
    num_tokens: int
    num_open: int
    num_waiting: int = 0
    known: Container[bytes] = frozenset()

    def take(self, num_blocks: int, num_tokens: int) -> None:
        """A request was given to the rank."""
        self.num_slots -= 1
        self.num_open += 1
        self.num_blocks -= num_blocks
        self.num_tokens += num_tokens


class Rank:
    """What the router knows of a rank: its engine is in this process (own.py) or in another (remote.py).

    load      what it last said of its room, and `load.stats`
    known     keys of the prefixes it can start from
    reserved  blocks and tokens of requests that its load does not count yet
    """

    def __init__(self) -> None:
        self.load = Load(0, 0, 0, 0)
        self.known: set[bytes] = set()
        self.reserved: dict[Request, tuple[int, int]] = {}

    @property
    def num_open(self) -> int:
        """Requests it was given that are not over."""
        raise NotImplementedError

    def note(self, load: Load) -> None:
        if load.stats is None:
            load.stats = self.load.stats
        self.load = load
        self.known.difference_update(_keys(load.removed))
        self.known.update(_keys(load.added))

    def room(self) -> Room:
        load = self.load
        room = Room(
            load.num_free_slots, load.num_free_blocks, load.num_tokens, self.num_open - len(self.reserved),
            load.num_waiting, self.known,
        )  # fmt: skip
        for num_blocks, num_tokens in self.reserved.values():
            room.take(num_blocks, num_tokens)
            room.num_waiting += not num_blocks
        return room


@dataclass(order=True)
class Waiting:
    """`order` as a scheduler's; `since` the clock at its arrival."""

    order: Order
    request: Request = field(compare=False)
    since: float = field(compare=False)


class Router:
    """`add` requests, then `give` them away. `max_batched_tokens`: of a rank's step."""

    def __init__(self, max_batched_tokens: int) -> None:
        self._max_batched_tokens = max_batched_tokens
        self._queue: list[Waiting] = []
        self._num_added = 0
        self._next_deadline = inf  # none is before
        self._given: dict[Request, Order] = {}
        self._by_priority: defaultdict[int, list[tuple[Order, int]]] = defaultdict(list)  # given, with their ranks

    def __len__(self) -> int:
        """Requests that wait here."""
        return len(self._queue)

    @property
    def requests(self) -> tuple[Request, ...]:
        return tuple(one.request for one in self._queue)

    def add(self, request: Request, now: float, step: int) -> None:
        order = step - request.params.priority * AGING_STEPS, self._num_added
        self._num_added += 1
        insort(self._queue, Waiting(order, request, now))
        if request.params.deadline is not None:
            self._next_deadline = min(self._next_deadline, now + request.params.deadline)

    def rename(self, make: Callable[[Sequence[int], str | None], ChainKeys | None]) -> None:
        """Prefixes have other keys now."""
        for one in self._queue:
            one.request.chain = one.request.chain_by(make)

    def remove(self, request: Request) -> bool:
        """Whether it waited here."""
        order = self._given.pop(request, None)
        if order is not None:
            given = self._by_priority[request.params.priority]
            del given[bisect_left(given, (order, 0))]
            return False
        found = next((place for place, one in enumerate(self._queue) if one.request is request), None)
        if found is not None:
            del self._queue[found]
        return found is not None

    def expire(self, now: float) -> list[Request]:
        """Requests whose deadline has passed; they have left."""
        if now < self._next_deadline:
            return []
        deadlines = {
            one.request: one.since + one.request.params.deadline
            for one in self._queue
            if one.request.params.deadline is not None
        }
        late = [request for request, deadline in deadlines.items() if now >= deadline]
        for request in late:
            self.remove(request)
            request.error = expire(request)
            del deadlines[request]
        self._next_deadline = min(deadlines.values(), default=inf)
        return late

    def give(self, rooms: Sequence[Room]) -> tuple[Waiting, int, int, int] | None:
        """The first request, its rank, and the blocks and tokens it takes there; None if no rank can take it."""
        if not self._queue:
            return None
        first = self._queue[0]
        found = self._best(rooms, first)
        if found is None:
            home = self._with_last_victim(rooms, first)
            if home is None:
                return None
            found = home, 0, first.request.num_pending
        return self._take(first, rooms, found)

    def give_anyway(self, rooms: Sequence[Room]) -> tuple[Waiting, int, int, int] | None:
        """As `give`, to the emptiest rank, whether it has room or not."""
        if not self._queue:
            return None
        home = min(range(len(rooms)), key=lambda rank: rooms[rank].num_open)
        return self._take(self._queue[0], rooms, (home, 0, self._queue[0].request.num_pending))

    def _take(
        self, first: Waiting, rooms: Sequence[Room], found: tuple[int, int, int]
    ) -> tuple[Waiting, int, int, int]:  # fmt: skip
        home, num_blocks, num_tokens = found
        rooms[home].take(num_blocks, num_tokens)
        del self._queue[0]
        self._given[first.request] = first.order
        insort(self._by_priority[first.request.params.priority], (first.order, home))
        return first, home, num_blocks, num_tokens

    def _best(self, rooms: Sequence[Room], one: Waiting) -> tuple[int, int, int] | None:
        """The rank to live on, and the blocks and tokens it takes there; None if none has room."""
        fewest = min(room.num_open for room in rooms)
        worths = []
        for rank, room in enumerate(rooms):
            if room.num_slots <= 0 or room.num_waiting:
                continue
            start = prefix_len(one.request.chain, room.known, one.request.num_pending)
            num_blocks = blocks_at_position(min(one.request.num_pending, start + self._max_batched_tokens))
            if room.num_blocks < num_blocks:
                continue
            saved = max(0, start - IMBALANCE_TOKENS * (room.num_open - fewest))
            worth = saved, -room.num_tokens // self._max_batched_tokens, room.num_blocks, room.num_slots, -rank
            worths.append((worth, num_blocks, one.request.num_pending - start))
        if not worths:
            return None
        worth, num_blocks, num_tokens = max(worths)
        return -worth[-1], num_blocks, num_tokens

    def _with_last_victim(self, rooms: Sequence[Room], one: Waiting) -> int | None:
        """Where the worst-ranked request runs that this one may displace."""
        worst: tuple[Order, int] | None = None
        if all(room.num_waiting for room in rooms):
            return None
        for priority, given in self._by_priority.items():
            if priority >= one.request.params.priority:
                continue
            found = next(((order, home) for order, home in reversed(given) if not rooms[home].num_waiting), None)
            if found is not None and found[0] > one.order and (worst is None or found > worst):
                worst = found
        return None if worst is None else worst[1]


def prefix_len(chain: ChainKeys | None, known: Container[bytes], num_tokens: int) -> int:
    """Tokens of the longest known prefix, of which the last token is none."""
    if chain is None:
        return 0
    keys = chain.first(min(chain.num_known, max(0, num_tokens - 1) // BLOCK_TOKENS))
    return next((place * BLOCK_TOKENS for place in range(len(keys), 0, -1) if keys[place - 1] in known), 0)


def _keys(data: bytes) -> list[bytes]:
    return [data[start : start + KEY_BYTES] for start in range(0, len(data), KEY_BYTES)]
