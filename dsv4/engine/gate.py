"""`Gate`: whether an engine starts steps and takes requests, and under which weights. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal
from weakref import WeakSet

from dsv4.request import RequestError

if TYPE_CHECKING:
    from dsv4.engine.request import Request

PauseMode = Literal["wait", "keep", "abort"]
PAUSE_MODES = ("wait", "keep", "abort")


class Gate:
    """An engine's own; only the engine and `EngineControl` change it.

    mode      None: open. "wait": what was there before runs to its end. "keep": nothing runs
    version   of the weights that run
    refusal   why no request is taken, if none is; None while the weights are whole
    held      requests that came while it was shut, and when
    """

    def __init__(self) -> None:
        self.mode: Literal["wait", "keep"] | None = None
        self.version = "0"
        self.refusal: Exception | None = None
        self.held: dict[Request, float] = {}
        self._stamped: WeakSet[Request] = WeakSet()

    def check(self) -> None:
        """Raises `refusal`."""
        if self.refusal is not None:
            raise self.refusal

    @property
    def is_shut(self) -> bool:
        return self.mode is not None

    @property
    def is_still(self) -> bool:
        """Whether no step may start."""
        return self.mode == "keep"

    def shut(self, mode: str) -> None:
        """`keep` stops what a `wait` before it let run; `wait` sets nothing going that a `keep` stopped."""
        if mode not in PAUSE_MODES:
            raise RequestError(f"mode must be one of {', '.join(PAUSE_MODES)}, found {mode!r}", field="mode")
        self.mode = "wait" if mode == "wait" and self.mode != "keep" else "keep"

    def open(self) -> list[tuple[Request, float]]:
        """The requests that were held, in the order they came."""
        held, self.held, self.mode = list(self.held.items()), {}, None
        return held

    def leave(self, request: Request) -> bool:
        """Whether the request was held; it is not any more."""
        return self.held.pop(request, None) is not None

    def set_version(self, version: str) -> None:
        """Of the weights that run from now on, for requests that run too."""
        self.version = version
        for request in self._stamped:
            if not request.is_done:
                self.stamp(request)

    def stamp(self, request: Request) -> None:
        """The request's next tokens are of the weights that run now."""
        self._stamped.add(request)
        runs = request.weight_versions
        if runs and runs[-1][0] == request.num_output:
            runs.pop()
        if not runs or runs[-1][1] != self.version:
            runs.append((request.num_output, self.version))
