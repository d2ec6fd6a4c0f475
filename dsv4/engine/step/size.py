"""`StepSize`: how large the calls of a step are, and who decides it: an engine alone, or several that run in step."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

from dsv4.dist.errors import RankFailed


class StepSize(NamedTuple):
    """Padding included.

    num_rows      of the forward call
    num_requests  the drafter runs for
    num_drafts    it is asked for behind each of them; 0 asks for none
    is_direct     whether the forward call keeps what no graph keeps, so that all ranks must make it directly
    """

    num_rows: int = 0
    num_requests: int = 0
    num_drafts: int = 0
    is_direct: int = 0


class Sizes(Protocol):
    """Who decides. `sockets`: something to read on one of them may be a call to a step (`is_called`)."""

    @property
    def sockets(self) -> Sequence[socket.socket]: ...

    @property
    def is_called(self) -> bool:
        """Whether others have begun a step, which needs this engine."""

    def agree(self, own: StepSize | None) -> StepSize | None:
        """The size of the next step on all ranks, where this one needs `own`; None if no rank needs a step."""

    def working(self) -> AbstractContextManager[None]:
        """Around a step: an error in it may be the end of others."""

    def when_failed(self, tell: Callable[[RankFailed], None]) -> None:
        """`tell` is called, in any thread, if another engine fails, even while nothing runs."""


class OwnSizes:
    """Of an engine alone: a step is as large as it plans it."""

    sockets: Sequence[socket.socket] = ()
    is_called = False

    def agree(self, own: StepSize | None) -> StepSize | None:
        return own

    def working(self) -> AbstractContextManager[None]:
        return nullcontext()

    def when_failed(self, tell: Callable[[RankFailed], None]) -> None:
        pass
