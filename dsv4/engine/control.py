"""`EngineControl`: commands to a running engine: pause and resume, new weights, sleep and wake, what it is.

The same verbs are methods of `LLM` (`Controls`) and coroutines of `AsyncLLM` (`AsyncControls`), and go through the
engine's socket as `EngineClient.control(verb, **arguments)`. They are carried out between two steps.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol
from uuid import uuid4

from dsv4.cache.manager import KVCacheManager
from dsv4.config import ModelConfig
from dsv4.engine.engine import Engine
from dsv4.engine.fingerprint import Identity
from dsv4.engine.gate import PauseMode
from dsv4.engine.offload.pool import ExpertPool
from dsv4.engine.profile import Profiler
from dsv4.engine.request import WeightsIncomplete
from dsv4.engine.serving import Serving
from dsv4.engine.sleep import LEVELS, WEIGHTS, Sleeper
from dsv4.engine.weight_inbox import WeightInbox
from dsv4.engine.weight_update import WeightSource, WeightUpdate, open_source
from dsv4.loader.checkpoint import Checkpoint
from dsv4.loader.progress import Progress
from dsv4.model.transformer import Transformer
from dsv4.ops.backend import Backend
from dsv4.request import RequestError


class Controlled(Protocol):
    """What is controlled: an `LLM`."""

    config: ModelConfig
    numerics: Any
    model: Transformer
    cache: KVCacheManager
    engine: Engine
    pool: ExpertPool | None
    checkpoint: Checkpoint | None
    num_ranks: int
    start_seconds: dict[str, float]

    def identity(self) -> Identity: ...


class EngineControl:
    """`obey` a verb with arguments by name, or call its method. Between two steps, in the engine's thread.

    A name for weights that came from no checkpoint is `weights_name`.
    """

    def __init__(self, llm: Controlled, backend: Backend) -> None:
        self._llm, self._backend = llm, backend
        self._num_updates = 0
        self.weights_name = ""
        self._inbox = WeightInbox(llm)
        profiler = Profiler()
        self._verbs: dict[str, Callable[..., Any]] = {
            "pause": self.pause, "resume": self.resume, "reset_prefix_cache": self.reset_prefix_cache,
            "update_weights": self.update_weights, "set_weight_version": self.set_weight_version,
            "init_group": self._inbox.join, "receive_weights": self.receive_weights,
            "sleep": self.sleep, "wake": self.wake, "info": self.info,
            "start_profile": profiler.start, "stop_profile": profiler.stop,
        }  # fmt: skip
        self._sleeper = Sleeper()
        self._wakes_open = False  # whether waking is also going on

    def obey(self, verb: str, arguments: Mapping[str, Any]) -> Any:
        """`RequestError` for what is no verb, or not its arguments."""
        method = self._verbs.get(verb)
        if method is None:
            raise RequestError(f"verb must be one of abort, {', '.join(self._verbs)}, found {verb!r}", field="verb")
        try:
            inspect.signature(method).bind(**arguments)
        except TypeError as error:
            raise RequestError(f"{verb}: {error}", field="arguments") from None
        return method(**arguments)

    # ---- pause ----

    @property
    def is_paused(self) -> bool:
        return self._llm.engine.gate.is_shut

    def pause(self, mode: PauseMode = "keep") -> None:
        """Start no step for what comes from now on; it waits. `wait`: what was there before runs to its end. `keep`:
        that stands still too, with what it has in the cache. `abort`: as `keep`, and the caller ends what is there.
        The pause has come about once the engine `has_work` no more."""
        self._llm.engine.gate.shut(mode)

    def resume(self) -> None:
        """Go on. `WeightsIncomplete` if there are no whole weights to go on with."""
        engine = self._llm.engine
        if self._sleeper.asleep:
            raise RequestError("the engine sleeps: wake() it first")
        self._inbox.check_empty()
        engine.gate.check()
        engine.resume()

    def reset_prefix_cache(self, running: bool = False, name: str | None = None) -> None:
        """No later request starts from what is cached now, on any tier. With `running`, paused requests also compute
        all their rows again. `name`: of the prefixes from now on."""
        self._check_still("the prefix cache can be reset")
        if self._llm.engine.scheduler.has_work and running and not self.is_paused:
            raise RequestError("rows of running requests can be computed again only while the engine is paused")
        self._llm.engine.start_anew(name or uuid4().hex, clears=running)

    # ---- weights ----

    @property
    def weights(self) -> tuple[str, str]:
        """Fingerprint and version of those that run."""
        return self._llm.identity().name, self._llm.engine.gate.version

    def update_weights(
        self, source: WeightSource, version: str | None = None, clear_cache: bool = False, progress: Progress = False
    ) -> str:  # fmt: skip
        """See `Controls.update_weights`."""
        if WEIGHTS in self._sleeper.asleep:
            raise RequestError("the weights sleep: wake(['weights']) first")
        self._inbox.clear()
        llm = self._llm
        engine = llm.engine
        self._check_rest("weights can be updated")
        if version is not None and not isinstance(version, str):
            raise RequestError(f"version must be a string or None, found {version!r}", field="version")
        update = WeightUpdate(
            open_source(source, llm.config), llm.config, llm.model.params, self._backend, pool=llm.pool,
            dequantize_to=llm.model.context.dtype if llm.numerics == "exact" else None,
        )  # fmt: skip
        engine.gate.refusal = WeightsIncomplete("an update of the weights failed half way; update them again first")
        self.weights_name = uuid4().hex
        engine.start_anew(self.weights_name, clears=clear_cache)
        update.run(progress)
        engine.gate.refusal = None
        self._num_updates += 1
        llm.checkpoint = None if update.is_from_memory else update.checkpoint
        return self.set_weight_version(version if version is not None else str(self._num_updates))

    def receive_weights(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], version: str | None = None
    ) -> str | None:  # fmt: skip
        """Tensors that the trainer's group sends now (`init_group`). Once the model is whole it is updated, and this
        returns its version; None before. What has been received is kept beside the weights until then."""
        self._check_rest("weights can be received")
        if self._inbox.receive(names, dtypes, shapes):
            return self.update_weights(self._inbox.take(), version)
        return None

    def set_weight_version(self, version: str) -> str:
        """Another name for the weights that run; requests that run have it from their next token on."""
        if not isinstance(version, str):
            raise RequestError(f"version must be a string, found {version!r}", field="version")
        self._llm.engine.gate.set_version(version)
        return version

    def _check_rest(self, what: str) -> None:
        if self._llm.num_ranks > 1:
            raise RequestError(f"{what} only with gpus=1: not yet on several ranks")
        self._check_still(what)

    def _check_still(self, what: str) -> None:
        if self._llm.engine.has_work:
            raise RequestError(f"{what} only while no request runs or waits, or while the engine is paused: pause() it")

    # ---- sleep ----

    def sleep(self, level: int = 1) -> None:
        """Give memory back: of the weights, which level 1 keeps in host memory and level 2 drops, and of the cache.
        Requests that are there wait, and compute their rows again after waking."""
        llm, gate = self._llm, self._llm.engine.gate
        self._check_rest("an engine can sleep")
        if not self._sleeper.asleep and level in LEVELS:
            self._wakes_open = not gate.is_shut
            gate.shut("keep")
            llm.engine.start_anew(llm.cache.fingerprint, clears=True)
        self._sleeper.sleep(level, llm.model.params, llm.pool, llm.cache, llm.engine.runner)
        if level == 2:
            gate.refusal = WeightsIncomplete("the weights were dropped (sleep level 2); wake() and update them first")

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """Take memory again, of `weights`, `kv_cache` or both. Once both are there, goes on if it was not paused."""
        self._sleeper.wake(tags, self._llm.cache, self._llm.engine.runner)
        if self._wakes_open and not self._sleeper.asleep and self._llm.engine.gate.refusal is None:
            self._wakes_open = False
            self._llm.engine.resume()

    # ---- what it is ----

    def info(self) -> dict[str, Any]:
        """Where the engine stands, and its limits."""
        llm = self._llm
        engine, (fingerprint, version) = llm.engine, self.weights
        stats = engine.stats()
        return {
            "is_paused": self.is_paused,
            "pause_mode": engine.gate.mode,
            "is_sleeping": bool(self._sleeper.asleep),
            "asleep": sorted(self._sleeper.asleep),
            "weight_version": version,
            "weights_are_whole": engine.gate.refusal is None,
            "fingerprint": fingerprint,
            "num_requests": stats.num_waiting + stats.num_running,
            "world_size": llm.num_ranks,
            "num_slots": engine.num_slots,
            "max_context_tokens": llm.cache.limits.max_context_tokens,
            "vocab_size": llm.config.vocab_size,
            "num_layers": llm.config.num_hidden_layers,
            "experts_per_token": llm.config.num_experts_per_tok,
            "start_seconds": llm.start_seconds,
        }


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
        progress: Progress = False,
    ) -> str:  # fmt: skip
        """New weights for the same model, in place; returns their version. `source` is a checkpoint folder, or named
        tensors of this process (a mapping or pairs), in the formats that were loaded.

        Captured graphs stay valid, nothing is compiled, and the extra memory is one layer. The bits are those of an
        engine that starts with these weights. The source is checked before anything changes. No request may run, unless
        the engine is paused: those that it keeps go on with the new weights (`Completion.weight_versions`), on the rows
        they have, or with `clear_cache` on rows that are computed again. Cached prefixes are not used any more. If
        copying itself fails, requests are refused (`WeightsIncomplete`) until a whole update follows.
        """
        with self._lock:
            return self.control.update_weights(source, version, clear_cache, progress)

    def set_weight_version(self, version: str) -> str:
        """Give the weights that run another name."""
        with self._lock:
            return self.control.set_weight_version(version)

    def sleep(self, level: int = 1) -> None:
        """Give memory back to others on this device: level 1 keeps the weights in host memory, level 2 drops them; the
        cache is dropped. Running requests stop as by `pause("keep")`. The bits after waking are the same."""
        with self._lock:
            self.pause("keep") if self.engine.has_work else None
            self.control.sleep(level)
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

    async def pause(self, mode: PauseMode = "keep") -> None:
        await asyncio.wrap_future(self._tell("pause", mode=mode))

    async def resume(self) -> None:
        await asyncio.wrap_future(self._tell("resume"))

    async def abort_all(self) -> int:
        ended: int = await asyncio.wrap_future(self._tell("abort"))
        return ended

    async def reset_prefix_cache(self, running: bool = False) -> None:
        await asyncio.wrap_future(self._tell("reset_prefix_cache", running=running))

    async def update_weights(
        self, source: WeightSource, *, version: str | None = None, clear_cache: bool = False
    ) -> str:  # fmt: skip
        told = self._tell("update_weights", source=source, version=version, clear_cache=clear_cache)
        found: str = await asyncio.wrap_future(told)
        return found

    async def set_weight_version(self, version: str) -> str:
        found: str = await asyncio.wrap_future(self._tell("set_weight_version", version=version))
        return found

    async def sleep(self, level: int = 1) -> None:
        await asyncio.wrap_future(self._tell("sleep", level=level))

    async def wake(self, tags: Sequence[str] | None = None) -> None:
        await asyncio.wrap_future(self._tell("wake", tags=tags))

    async def info(self) -> dict[str, Any]:
        found: dict[str, Any] = await asyncio.wrap_future(self._tell("info"))
        return found
