"""`GrammarQueue`: compiles requests' grammars in a thread beside the engine's: one may take seconds."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from dsv4.engine.link.connection import ClientConnection
from dsv4.engine.link.messages import RejectedGrammar, Submit
from dsv4.engine.step.constraint import Constraint
from dsv4.request import RequestError

# from a grammar's text, and the ids an answer must be able to open with
Constrain = Callable[[str, list[int]], Constraint]
Tell = Callable[[ClientConnection, Submit, list[Constraint] | Exception], None]


class GrammarQueue:
    """call  has something done in the engine's thread"""

    def __init__(self, constrain: Constrain, call: Callable[[Callable[[], None]], None]) -> None:
        self._constrain, self._call = constrain, call
        self._thread = ThreadPoolExecutor(1, "dsv4-grammar")
        self.num_requests = 0

    def compile(self, client: ClientConnection, message: Submit, tell: Tell) -> None:
        """`tell` is called in the engine's thread, unless the client has dropped the requests meanwhile."""
        client.compiling |= dict.fromkeys(message.handles, message.name)
        self.num_requests += len(message.params)

        def work() -> None:
            made: list[Constraint] | Exception
            try:
                assert message.grammar is not None
                made = [self._constrain(message.grammar, message.opening) for _ in message.params]
            except Exception as error:  # any error becomes the request's own
                made = error if isinstance(error, RequestError) else RejectedGrammar(str(error))
            self._call(lambda: self._done(client, message, made, tell))

        self._thread.submit(work)

    def _done(
        self, client: ClientConnection, message: Submit, made: list[Constraint] | Exception, tell: Tell
    ) -> None:  # fmt: skip
        handles = message.handles
        self.num_requests -= len(handles)
        is_wanted = client.compiling.keys() >= set(handles)
        for handle in handles:
            client.compiling.pop(handle, None)
        if is_wanted:
            tell(client, message, made)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
