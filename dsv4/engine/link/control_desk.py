"""`ControlDesk`: commands of clients and other threads, obeyed in the engine's thread, answered once done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from dsv4.engine.control import EngineControl
from dsv4.engine.link.connection import ClientConnection
from dsv4.engine.link.messages import pack_error, pack_reply
from dsv4.request import RequestError


def reply_to(client: ClientConnection, number: int) -> Future[Any]:
    """Whatever this gets goes to the client."""

    def reply(done: Future[Any]) -> None:
        error = done.exception()
        client.replies.append(pack_reply(number, done.result()) if error is None else pack_error(number, error))

    answer: Future[Any] = Future()
    answer.add_done_callback(reply)
    return answer


def _pass_on(done: Future[Any], answer: Future[Any]) -> None:
    """What is done is an object of the engine's own."""
    error = done.exception()
    answer.set_result(None) if error is None else answer.set_exception(error)


class ControlDesk:
    """end_early  ends the named requests and returns how many it ended
    announce   tells clients which weights run: their fingerprint and version
    later      has the engine's thread call something, from any thread
    """

    def __init__(
        self, control: EngineControl, end_early: Callable[[Callable[[str], bool]], int],
        announce: Callable[[str, str], None], later: Callable[[Callable[[], None]], None],
    ) -> None:  # fmt: skip
        self._control, self._end_early, self._announce, self._later = control, end_early, announce, later
        self._pausing: list[Future[Any]] = []

    def obey(self, verb: str, arguments: Mapping[str, Any], answer: Future[Any]) -> None:
        """`abort` takes the `names` of requests, or None for all; a pause is answered once nothing runs any more, and
        what goes on in another thread once that is done."""
        try:
            if verb == "abort":
                names = arguments.get("names")
                if names is not None and not (isinstance(names, list) and all(isinstance(one, str) for one in names)):
                    raise RequestError("names must be a list of strings, or None for all requests", field="names")
                answer.set_result(self._end_early(lambda name: names is None or name in names))
                return
            before = self._control.weights
            result = self._control.obey(verb, arguments)
            if verb == "pause" and arguments.get("mode") == "abort":
                self._end_early(lambda name: True)
            if self._control.weights != before:
                self._announce(*self._control.weights)
        except Exception as error:  # becomes the command's answer; the engine goes on
            answer.set_exception(error)
            return
        if verb == "pause":
            self._pausing.append(answer)
        elif isinstance(result, Future):
            result.add_done_callback(lambda done: self._later(lambda: _pass_on(done, answer)))
        else:
            answer.set_result(result)

    def settle(self, *, has_work: bool) -> None:
        """Answer pauses that have come about, or ended."""
        if self._pausing and not (has_work and self._control.is_paused):
            pausing, self._pausing = self._pausing, []
            for answer in pausing:
                answer.set_result(None)

    def close(self, problem: Exception) -> None:
        for answer in self._pausing:
            answer.set_exception(problem)
