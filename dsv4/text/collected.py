"""What an answer of many tokens is kept in: text and log-probabilities as few objects, however many pieces come."""

from array import array
from collections.abc import Sequence
from typing import overload

from dsv4.request import TokenLogprobs

_MAX_PIECES = 256  # a piece is an object of some 50 bytes: joined, a text is as long as its characters


class GrowingText:
    """A text that grows piece by piece."""

    __slots__ = ("_pieces",)

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def add(self, piece: str) -> None:
        self._pieces.append(piece)
        if len(self._pieces) == _MAX_PIECES:
            self._pieces = ["".join(self._pieces)]

    def __str__(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""


class LogprobList(Sequence[TokenLogprobs]):
    """A list of `TokenLogprobs` as arrays: 20 bytes a token, and 12 for each of the most likely ones beside it."""

    def __init__(self) -> None:
        self._ids = array("i")
        self._values = array("d")
        self._top_ids = array("i")
        self._top_values = array("d")
        self._top_ends = array("q")

    def append(self, one: TokenLogprobs) -> None:
        for token_id, logprob in one.top:
            self._top_ids.append(token_id)
            self._top_values.append(logprob)
        self._top_ends.append(len(self._top_ids))
        self._values.append(one.logprob)
        self._ids.append(one.token_id)

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, place: int) -> TokenLogprobs: ...

    @overload
    def __getitem__(self, place: slice) -> list[TokenLogprobs]: ...

    def __getitem__(self, place: int | slice) -> TokenLogprobs | list[TokenLogprobs]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        idx = place + len(self) if place < 0 else place
        if not 0 <= idx < len(self):
            raise IndexError(f"place {place} of {len(self)} log-probabilities")
        first, end = (self._top_ends[idx - 1] if idx else 0), self._top_ends[idx]
        top = tuple(zip(self._top_ids[first:end], self._top_values[first:end], strict=True))
        return TokenLogprobs(self._ids[idx], self._values[idx], top)
