"""The verbs of `EngineControl` as methods: `Controls` of `LLM`, `AsyncControls` of `AsyncLLM`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

from dsv4.engine.control import EngineControl
from dsv4.engine.gate import PauseMode
from dsv4.engine.serving import Serving
from dsv4.engine.weights.update import WeightSource
from dsv4.loader.progress import Progress
from dsv4.request import RequestError


class Controls:
    """The verbs as methods of `LLM`, for any of its threads. Other threads' requests go on, or wait, meanwhile."""

    control: EngineControl
    engine: Serving
    _lock: threading.RLock

    @property
    def weight_version(self) -> str:
        """Of the weights that run."""
        return self.engine.gate.version

    def pause(self, mode: PauseMode = "keep") -> None:
        """Answers stop growing until `resume`; what is asked for meanwhile waits. Returns once nothing runs.

        `wait`: requests that are there are finished first. `keep`: they stop between two of their tokens and go on
        later. `abort`: they end with what they have (`FinishReason.ABORT`).
        """
        with self._lock:
            if mode == "abort":
                self.abort_all()
            self.control.pause(mode)
            while self.engine.has_work:
                self.step()
            self._paused_by = threading.get_ident()

    def resume(self) -> None:
        """Go on after `pause`. `WeightsIncomplete` if the last update failed."""
        with self._lock:
            self.control.resume()
            self._may_go_on.notify_all()

    def abort_all(self) -> int:
        """End every request with what it has (`FinishReason.ABORT`); returns how many there were."""
        with self._lock:
            num_ended = self._end_all()
            self._may_go_on.notify_all()
        return num_ended

    def reset_prefix_cache(self, running: bool = False) -> None:
        """No later request starts from what is cached now, in device or host memory or in files. With `running`, paused
        requests compute their rows again too."""
        with self._lock:
            self.control.reset_prefix_cache(running)

    def update_weights(
        self, source: WeightSource, *, version: str | None = None, clear_cache: bool = False,
        progress: Progress = False, search_scales: bool = False,
    ) -> str:  # fmt: skip
        """New weights for the same model, in place; returns their version. `source` is a checkpoint folder, named
        tensors of this process (a mapping, a list of pairs, or an iterator of pairs), or those of another on the same
        GPU (`SharedTensors`). Weights have the formats that were loaded; plain ones for a quantised model are rounded
        by the rules of `dsv4 quantize`, its search of scales only with `search_scales`.

        Captured graphs stay valid, nothing is compiled, and the extra memory is less than a layer. The bits are those
        of an engine that starts with these weights. A folder, mapping or list is checked before anything changes. Of an
        iterator, which nothing can check ahead, each layer is checked and written once it is whole. No request may run,
        unless the engine is paused: those that it keeps go on with the new weights (`Completion.weight_versions`), on
        the rows they have, or with `clear_cache` on rows that are computed again. Cached prefixes are not used any
        more. If something fails after the first layer was written, requests are refused (`WeightsIncomplete`) until a
        whole update follows.
        """
        with self._lock:
            return self.control.update_weights(source, version, clear_cache, progress, search_scales)

    def set_weight_version(self, version: str) -> str:
        """Give the weights that run another name."""
        with self._lock:
            return self.control.set_weight_version(version)

    def sleep(self, level: int = 1, tags: Sequence[str] | None = None) -> None:
        """Give memory back to others on this device: level 1 keeps the weights in host memory, level 2 drops them; the
        cache is dropped. `tags`: "weights" or "kv_cache" alone. Running requests stop as by `pause("keep")`. The bits
        after waking are the same."""
        with self._lock:
            self.pause("keep") if self.engine.has_work else None
            self.control.sleep(level, tags)
            self._paused_by = threading.get_ident()

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again: of "weights", of "kv_cache", by default of both; then go on, unless it was paused.
        After level 2 the engine refuses requests until `update_weights`; then `resume`."""
        with self._lock:
            self.control.wake(tags)
            self._may_go_on.notify_all()

    def info(self) -> dict[str, Any]:
        """Where the engine stands, and its limits: see `EngineControl.info`."""
        with self._lock:
            return self.control.info()

    def _set_up_control(self, control: EngineControl) -> None:
        self.control = control
        self._may_go_on = threading.Condition(self._lock)
        self._paused_by = 0

    def _wait_while_paused(self) -> None:
        """Until another thread has gone on. The lock is free meanwhile."""
        if not self.engine.gate.is_shut or self.engine.has_work:
            return
        if self._paused_by == threading.get_ident():
            raise RequestError("this thread paused the engine: resume() before waiting for an answer")
        self._may_go_on.wait()

    def step(self) -> None:
        raise NotImplementedError

    def _end_all(self) -> int:
        raise NotImplementedError


class AsyncControls:
    """The verbs as coroutines of `AsyncLLM`: see those of `LLM`. Answers of other callers go on, or wait, meanwhile."""

    def _tell(self, verb: str, **arguments: Any) -> Future[Any]:
        """Tell the engine's thread."""
        raise NotImplementedError

    async def _ask(self, verb: str, **arguments: Any) -> Any:
        return await asyncio.wrap_future(self._tell(verb, **arguments))

    def pause(self, mode: PauseMode = "keep") -> Coroutine[Any, Any, None]:
        return self._ask("pause", mode=mode)

    def resume(self) -> Coroutine[Any, Any, None]:
        return self._ask("resume")

    def abort_all(self) -> Coroutine[Any, Any, int]:
        return self._ask("abort")

    def reset_prefix_cache(self, running: bool = False) -> Coroutine[Any, Any, None]:
        return self._ask("reset_prefix_cache", running=running)

    def update_weights(
        self, source: WeightSource, *, version: str | None = None, clear_cache: bool = False,
        search_scales: bool = False,
    ) -> Coroutine[Any, Any, str]:  # fmt: skip
        return self._ask(
            "update_weights", source=source, version=version, clear_cache=clear_cache, search_scales=search_scales
        )

    def set_weight_version(self, version: str) -> Coroutine[Any, Any, str]:
        return self._ask("set_weight_version", version=version)

    def sleep(self, level: int = 1, tags: Sequence[str] | None = None) -> Coroutine[Any, Any, None]:
        return self._ask("sleep", level=level, tags=tags)

    def wake(self, tags: Sequence[str] | None = None) -> Coroutine[Any, Any, None]:
        return self._ask("wake", tags=tags)

    def info(self) -> Coroutine[Any, Any, dict[str, Any]]:
        return self._ask("info")
