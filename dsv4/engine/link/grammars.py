"""`GrammarQueue`: compiles requests' grammars in threads beside the engine's: one may take seconds."""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from dsv4.engine.link.connection import ClientConnection
from dsv4.engine.link.messages import RejectedGrammar, Submit
from dsv4.engine.step.constraint import Constraint
from dsv4.request import RequestError

Make = Callable[[], Constraint]  # a request's own
# from a grammar's text, and the ids an answer must be able to open with; in any thread
Constrain = Callable[[str, list[int]], Make]
Finish = Callable[[ClientConnection, Submit, list[Constraint] | Exception], None]

_NUM_THREADS = 4
_NUM_KEPT = 32


class GrammarQueue:
    """The last few grammars are kept: clients send the same schema again and again. All methods belong to the engine's
    thread.

    call  has something done there
    """

    def __init__(self, constrain: Constrain, call: Callable[[Callable[[], None]], None]) -> None:
        self._constrain, self._call = constrain, call
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "dsv4-grammar")
        self._compiled: OrderedDict[str, Make] = OrderedDict()
        self.num_requests = 0

    def compile(self, client: ClientConnection, message: Submit, finish: Finish) -> None:
        """`finish` is called with a constraint for each request: at once if the grammar is known, never if the client
        has dropped the requests meanwhile."""
        lark = message.grammar
        assert lark is not None
        if lark in self._compiled:
            self._compiled.move_to_end(lark)
            finish(client, message, [self._compiled[lark]() for _ in message.params])
            return
        client.compiling |= dict.fromkeys(message.handles, message.name)
        self.num_requests += len(message.params)

        def work() -> None:
            made: Make | Exception
            try:
                made = self._constrain(lark, message.opening)
            except Exception as error:  # any error becomes the request's own
                made = error if isinstance(error, RequestError) else RejectedGrammar(str(error))
            self._call(lambda: self._done(client, message, lark, made, finish))

        self._threads.submit(work)

    def _done(
        self, client: ClientConnection, message: Submit, lark: str, made: Make | Exception, finish: Finish
    ) -> None:
        handles = message.handles
        self.num_requests -= len(handles)
        if not isinstance(made, Exception):
            self._compiled[lark] = made
            while len(self._compiled) > _NUM_KEPT:
                self._compiled.popitem(last=False)
        is_wanted = client.compiling.keys() >= set(handles)
        for handle in handles:
            client.compiling.pop(handle, None)
        if is_wanted:
            finish(client, message, made if isinstance(made, Exception) else [made() for _ in handles])

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
