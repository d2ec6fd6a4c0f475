"""A forward call captured as CUDA graphs: in one piece, or in several with something for the host to do between them.

Which calls are captured, and over which buffers, is the runner's to say (engine/runner.py). A model with offloaded
experts is captured in pieces, cut where the host must read the routing (engine/offload/pool.py).
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, Protocol, TypeVar

import torch

from dsv4.engine.offload.pool import ExpertPool, Recorder
from dsv4.errors import Dsv4Error


class RunnerError(Dsv4Error, RuntimeError):
    """A model that cannot be captured, or a kernel compiled when none should be."""


Result = TypeVar("Result")  # tensors, in any structure
Result_co = TypeVar("Result_co", covariant=True)


class Replay(Protocol[Result_co]):
    """A captured call: runs again on whatever its static buffers hold, and returns its static `result`."""

    @property
    def result(self) -> Result_co: ...

    def __call__(self) -> Result_co: ...


class Capture(Protocol):
    """Makes a `Replay` of a call."""

    def __call__(self, call: Callable[[], Result], /) -> Replay[Result]: ...


def capture_graph(
    call: Callable[[], Result], pool: Any = None, experts: ExpertPool | None = None,
    stream: torch.cuda.Stream | None = None,
) -> Replay[Result]:  # fmt: skip
    """`call` as a CUDA graph (in pieces, with offloaded experts) in the memory `pool`. It is run once before.

    What one capture has freed in a pool, another finds there only if it captures on the same `stream`.
    """
    stream = torch.cuda.Stream() if stream is None else stream
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        with _recording(experts, _Rehearsal()):
            call()  # outside a capture: what first calls allocate and load
        torch.cuda.synchronize()
        recorder = _CudaRecorder(torch.cuda.graph_pool_handle() if pool is None else pool)
        with _recording(experts, recorder):
            recorder.begin()
            try:
                result = call()
            except BaseException as error:
                recorder.abandon()
                raise RunnerError(f"the forward call cannot be captured: {error}") from error
            recorder.end()
    torch.cuda.current_stream().wait_stream(stream)
    return _CudaReplay(recorder.pieces, result)


class _CudaRecorder:
    """Captures a call as one graph, or as several with something for the host to do between them."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self.pieces: list[tuple[torch.cuda.CUDAGraph, Callable[[], None] | None]] = []

    def begin(self) -> None:
        gc.collect()  # a graph freed during a capture would end it
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self, then: Callable[[], None] | None = None) -> None:
        """Close the current piece; a replay calls `then` after launching it."""
        assert self._graph is not None, "nothing is being captured"
        self._graph.capture_end()
        self.pieces.append((self._graph, then))
        self._graph = None

    def cut(self, then: Callable[[], None]) -> None:
        self.end(then)
        self.begin()

    def abandon(self) -> None:
        """Leave capture mode after an error; the capture itself is already invalid."""
        if self._graph is not None:
            with suppress(RuntimeError):  # it would say again what the caller is about to report
                self._graph.capture_end()


class _Rehearsal:
    """Runs a call as it will be captured, every cut included."""

    def cut(self, then: Callable[[], None]) -> None:
        then()


class _CudaReplay(Generic[Result]):
    def __init__(self, pieces: list[tuple[torch.cuda.CUDAGraph, Callable[[], None] | None]], result: Result) -> None:
        self._pieces = pieces
        self.result = result

    def __call__(self) -> Result:
        for graph, then in self._pieces:
            graph.replay()
            if then is not None:
                then()
        return self.result


@contextmanager
def _recording(experts: ExpertPool | None, recorder: Recorder) -> Iterator[None]:
    """While a capture runs, the experts' pool cuts it at every layer whose routing the host must see."""
    if experts is None:
        yield
        return
    experts.recorder = recorder
    try:
        yield
    finally:
        experts.recorder = None
