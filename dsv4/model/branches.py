"""`Branches`: launches beside others. In a CUDA graph they run at the same time; everywhere else one after the other.

While a graph is captured, `beside` puts its call on a second stream: the graph forks there, and joins where the block
ends. What makes that safe:

* Order. The call comes after everything captured before it, and whatever follows the block comes after the call. Call
  and block must not touch what the other writes, nor share counters (ops/lib/arrivals.py): tests run the
  call first and last, and look at the counters each takes.
* Memory. The call, and through it every tensor it was given, is kept until the join, so no later launch gets that
  memory. What the call allocates belongs to the second stream and is used again on that stream alone, in order. A call
  returns nothing.
* Early starts (ops/lib/pdl.py). A launch behind the join depends on two launches. `pdl_wait` covers all that a launch
  was allowed to overtake, and the others have ended before it begins: kernels that touch nothing but weights before
  `pdl_wait` are right behind a join too.

Direct calls never fork: their launches are long, and every tensor would have to be recorded with the allocator.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Branches:
    """The second stream of a device; on a CPU there is none. It goes first: what runs there is short of programs, not
    of time, and would otherwise wait for room behind the many programs of a projection.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    @contextmanager
    def beside(self, call: Callable[[], None] | None, can_fork: bool = True) -> Iterator[None]:
        """`call` beside the block. None: nothing to do. A block that ends a graph and begins another cannot fork."""
        if call is None:
            yield
        elif self._stream is None or not can_fork or not torch.cuda.is_current_stream_capturing():
            call()
            yield
        else:
            main = torch.cuda.current_stream()
            self._stream.wait_stream(main)
            with torch.cuda.stream(self._stream):
                call()
            try:
                yield
            finally:
                main.wait_stream(self._stream)
