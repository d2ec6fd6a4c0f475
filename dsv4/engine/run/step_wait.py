"""`StepWait`: waits for a step's end without a processor core of its own.

To ask a device again and again takes a whole core. Steps of about as many rows take about as long, so the host sleeps
until shortly before the end, and only then asks. No bit depends on it.
"""

import time
from collections.abc import Callable

from torch import Tensor

from dsv4.cache.transfer import HostCopy

EARLY_SHARE, EARLY_SECONDS = 0.05, 0.00015  # before the expected end: steps differ, and a sleeper wakes up late
NAP_SECONDS = 0.001  # a step much shorter than expected is seen this late at most
_SIZE_BITS = 4  # leading bits of a number of rows: where they agree, one expectation serves


class StepWait:
    """Of one engine. Expected is a value near the shortest of the last steps: a longer one only costs some asking."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep):
        self._clock, self._sleep = clock, sleep
        self._expected: dict[int, float] = {}  # seconds, by size
        self._last_end = 0.0  # when the last step was seen to be over: the device began the next one

    def until_over(self, copy: HostCopy, num_rows: int, launched: float) -> tuple[Tensor, ...]:
        """What a step of `num_rows` rows, launched at that time, copied to the host at its end."""
        shift = max(num_rows.bit_length() - _SIZE_BITS, 0)
        size, began, was_over = num_rows >> shift << shift, max(launched, self._last_end), copy.is_there
        expected = self._expected.get(size, 0.0)
        wake_up = began + (1 - EARLY_SHARE) * expected - EARLY_SECONDS
        while not copy.is_there and (rest := wake_up - self._clock()) > 0:
            self._sleep(min(rest, NAP_SECONDS))
        found = copy.wait()
        self._last_end = self._clock()
        took = self._last_end - began
        if not was_over:  # otherwise the host came late, and does not know
            self._expected[size] = min(took, (7 * expected + took) / 8) if expected else took
        return found
