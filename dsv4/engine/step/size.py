"""`StepSize`: how large the calls of a step are, and who decides it: an engine alone, or several that run in step."""

import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple


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


class Sizes:
    """An engine alone decides itself. Several agree (engine/ranks/agreement.py), so for them each of these differs."""

    @property
    def sockets(self) -> Sequence[socket.socket]:
        """Something to read on one of them may be a call to a step (`is_called`)."""
        return ()

    @property
    def is_called(self) -> bool:
        """Whether others have begun a step, which needs this engine."""
        return False

    def agree(self, own: StepSize | None) -> StepSize | None:
        """The size of the next step, where this engine needs `own`; None if no engine needs a step."""
        return own

    def working(self) -> AbstractContextManager[None]:
        """Around a step: an error in it may be the end of others."""
        return nullcontext()

    def when_failed(self, tell: Callable[[Exception], None]) -> None:
        """`tell` is called, in any thread, if another engine fails, even while nothing runs."""
