"""`StopBuffer`: lets text through as it comes, but never a part of a stop string."""

from collections.abc import Sequence


class StopBuffer:
    """Feed text with `push`; once `stopped`, the text that came before the first stop string (`found`) has all been
    returned.

    The first is the one that ends first (of several that end there, the longest), so the result does not depend on how
    the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    @property
    def stopped(self) -> bool:
        return self.found is not None

    def push(self, text: str) -> str:
        """Text that is certain to come before any stop string."""
        if self.stopped:
            return ""
        self._held += text
        places = [(stop, self._held.find(stop)) for stop in self._stops]
        found = [(place + len(stop), place, stop) for stop, place in places if place >= 0]
        if found:
            _, place, self.found = min(found)
            out, self._held = self._held[:place], ""
            return out
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        split = len(self._held) - keep
        out, self._held = self._held[:split], self._held[split:]
        return out

    def flush(self) -> str:
        """The end of the stream: what was held back in case it became a stop string."""
        out, self._held = self._held, ""
        return "" if self.stopped else out

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
