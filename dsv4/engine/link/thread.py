"""`EngineThread`: an `EngineLoop` in a thread of this process."""

import logging
import socket
import sys
import threading

from dsv4.engine.link.loop import EngineLoop

# The interpreter hands the lock to another thread after this long: the engine's thread would otherwise keep the event
# loop waiting 5 ms for every token it passes on.
_SWITCH_SECONDS = 0.0005
_LOG = logging.getLogger("dsv4.engine")


class EngineThread:
    """`start`, then clients of `connect`, then `stop`. The engine belongs to the thread in between."""

    def __init__(self, loop: EngineLoop) -> None:
        self.loop = loop
        self._thread = threading.Thread(target=self._run, name="dsv4-engine", daemon=True)
        self.error: BaseException | None = None

    def _run(self) -> None:
        try:
            self.loop.run()
        except BaseException as error:
            _LOG.exception("the engine's thread ended")
            self.error = error

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        sys.setswitchinterval(_SWITCH_SECONDS)
        self._thread.start()

    def connect(self) -> socket.socket:
        """A client's end of a new connection."""
        ours, theirs = socket.socketpair()
        self.loop.attach(ours)
        return theirs

    def stop(self, seconds: float | None = None, *, drains: bool = False) -> bool:
        """Stop and wait for the step that runs, for `seconds` at most; returns whether the thread has ended."""
        self.loop.stop(drains=drains)
        self._thread.join(seconds)
        return not self._thread.is_alive()
