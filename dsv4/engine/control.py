"""`EngineControl`: commands to a running engine: pause and resume, new weights, sleep and wake, what it is.

The same verbs are methods of `LLM` and coroutines of `AsyncLLM` (verbs.py), and go through the engine's socket as
`EngineClient.control(verb, **arguments)`. They are carried out between two steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any, Protocol, cast
from uuid import uuid4

from torch import Tensor

from dsv4.cache.manager import KVCacheManager
from dsv4.config import ModelConfig
from dsv4.engine.engine import Engine
from dsv4.engine.fingerprint import Identity, weights_digest
from dsv4.engine.gate import PauseMode
from dsv4.engine.offload.pool import ExpertPool
from dsv4.engine.profile import Profiler
from dsv4.engine.request import WeightsIncomplete
from dsv4.engine.sleep import CACHE, WEIGHTS, Sleeper
from dsv4.engine.weights.group import Coming
from dsv4.engine.weights.inbox import WeightInbox
from dsv4.engine.weights.shared import SharedTensors
from dsv4.engine.weights.target import WeightTarget
from dsv4.engine.weights.update import IncomingWeights, WeightSource, WeightUpdate, open_source
from dsv4.loader.checkpoint import Checkpoint
from dsv4.loader.memory_source import TensorSource
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
    weights_digest: str
    num_ranks: int
    start_seconds: dict[str, float]
    own_experts: range

    def identity(self) -> Identity: ...


class EngineControl:
    """`obey` a verb with arguments by name, or call its method. Between two steps, in the engine's thread."""

    def __init__(self, llm: Controlled, backend: Backend) -> None:
        self._llm, self._backend = llm, backend
        self._num_updates = 0
        self._inbox = WeightInbox()
        self.on_turn: Callable[[], None] = lambda: None  # a sign of life, where a command takes long
        profiler = Profiler()
        self._verbs: dict[str, Callable[..., Any]] = {
            "pause": self.pause, "resume": self.resume, "reset_prefix_cache": self.reset_prefix_cache,
            "update_weights": self.update_weights, "set_weight_version": self.set_weight_version,
            "init_group": self.init_group, "receive_weights": self.receive_weights, "take_weights": self.take_weights,
            "finish_update": self.finish_update, "sleep": self.sleep, "wake": self.wake, "info": self.info,
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
        self._wakes_open = False

    def resume(self, later: bool = False) -> None:
        """Go on; what sleeps must be awake, or with `later` goes on once it is. `WeightsIncomplete` if there are no
        whole weights to go on with."""
        if self._sleeper.asleep:
            if not later:
                raise RequestError("the engine sleeps: wake() it first")
            self._wakes_open = True
            return
        self._inbox.check_empty()
        self._llm.engine.gate.check()
        self._llm.engine.resume()

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
        self, source: WeightSource, version: str | None = None, clear_cache: bool = False, progress: Progress = False,
        search_scales: bool = False,
    ) -> str:  # fmt: skip
        """See `Controls.update_weights`."""
        self._check_update(version)
        self._inbox.incoming = None
        llm, target = self._llm, self._sharing_target(search_scales)
        checkpoint = open_source(source, llm.config)
        if checkpoint is None:
            incoming = IncomingWeights(target, lambda: self._begin(clear_cache))
            for pair in cast(Iterable[tuple[str, Tensor]], source):
                incoming.add(*pair)
            incoming.finish()
            return self._end(version, target.digest.hexdigest())
        with closing(checkpoint):
            update = WeightUpdate(checkpoint, target)
            if isinstance(checkpoint, TensorSource):
                self._begin(clear_cache)
                update.run(progress)
                return self._end(version, target.digest.hexdigest())
            digest = weights_digest(checkpoint, llm.config)
            self._check_shares(checkpoint, search_scales)
            self._begin(clear_cache)
            self._write(update, progress)
            return self._end(version, digest, checkpoint)

    def take_weights(self, tensors: Sequence[Mapping[str, Any]], version: str | None = None) -> str | None:
        """Tensors of another process that shares a GPU with this one (weights/shared.py). What is whole with them is
        written, all of it checked before; nothing of theirs is needed afterwards. Returns as `receive_weights`."""
        self._check_update(version)
        incoming = self._inbox.next(lambda: self._incoming(self._sharing_target()))
        with closing(SharedTensors(tensors)) as given:
            is_whole = self._inbox.take(incoming, given)
        return self._end(version, incoming.target.digest.hexdigest()) if is_whole else None

    def init_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, backend: str = "nccl",
        group_name: str = "weight_update_group", timeout: float | None = None,
    ) -> Future[Any]:  # fmt: skip
        """Join the trainer's group, for `receive_weights`; `timeout` in seconds, also of every receipt. Each rank has a
        place in it, from `rank_offset` on. Done once all are there."""
        group: dict[str, Any] = {
            "master_address": master_address, "master_port": master_port, "rank_offset": rank_offset,
            "world_size": world_size, "backend": backend, "group_name": group_name, "timeout": timeout,
        }  # fmt: skip
        self._let_join(group)
        return self._inbox.join(self._llm.model.weights.embed.device, **group)

    def receive_weights(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], version: str | None = None
    ) -> str | None:  # fmt: skip
        """Tensors that the trainer's group sends now (`init_group`). A layer is written once it is whole; until the
        model is, the engine refuses to go on. Returns the version then, None before."""
        self._check_update(version)
        group, coming = self._inbox.group(), Coming(names, dtypes, shapes)
        incoming = self._inbox.next(lambda: self._incoming(self._target()))
        incoming.announce(coming.infos())
        with self._receiving(coming, incoming):
            is_whole = self._inbox.receive(incoming, group, coming)
        return self._end(version, incoming.target.digest.hexdigest()) if is_whole else None

    def _incoming(self, target: WeightTarget) -> IncomingWeights:
        return IncomingWeights(target, lambda: self._begin(clear_cache=False))

    def _sharing_target(self, search_scales: bool = False) -> WeightTarget:
        """For tensors of this process, or that it can read."""
        return self._target(search_scales)

    def _let_join(self, group: Mapping[str, Any]) -> None:
        """Other ranks."""

    def _receiving(self, coming: Coming, incoming: IncomingWeights) -> AbstractContextManager[None]:
        """While this rank receives, others do."""
        return nullcontext()

    def _check_shares(self, folder: Checkpoint, search_scales: bool) -> None:
        """Of other ranks: that they can take theirs."""

    def _write(self, update: WeightUpdate, progress: Progress = False) -> None:
        update.run(progress)

    def _check_update(self, version: object) -> None:
        if WEIGHTS in self._sleeper.asleep:
            raise RequestError("the weights sleep: wake(['weights']) first")
        self._check_still("weights can be updated")
        if version is not None and not isinstance(version, str):
            raise RequestError(f"version must be a string or None, found {version!r}", field="version")

    def _target(self, search_scales: bool = False) -> WeightTarget:
        llm = self._llm
        is_exact = llm.numerics == "exact"
        if not llm.model.weights.formats and not is_exact:
            raise RequestError("these parameters came from no loader: in which formats updates must be is not known")
        return WeightTarget(
            llm.config, llm.model.weights, self._backend, pool=llm.pool, experts=llm.own_experts,
            dequantize_to=llm.model.context.dtype if is_exact else None, search=search_scales, on_turn=self.on_turn,
        )  # fmt: skip

    def _begin(self, clear_cache: bool) -> None:
        """From now on the weights are neither old nor new."""
        llm, name = self._llm, uuid4().hex
        llm.engine.gate.refusal = WeightsIncomplete(
            "an update of the weights failed half way, or has not ended: update them again first"
        )
        llm.weights_digest, llm.checkpoint = name, None
        llm.engine.start_anew(name, clears=clear_cache)

    def _end(self, version: str | None, digest: str, checkpoint: Checkpoint | None = None) -> str:
        self._llm.weights_digest, self._llm.checkpoint = digest, checkpoint
        self._llm.engine.gate.refusal = None
        self._num_updates += 1
        return self.set_weight_version(version if version is not None else str(self._num_updates))

    def finish_update(self, version: str | None = None) -> str:
        """`WeightsIncomplete` unless the weights are whole; returns their version, a new one if that is given."""
        self._inbox.check_empty()
        self._llm.engine.gate.check()
        return self._llm.engine.gate.version if version is None else self.set_weight_version(version)

    def set_weight_version(self, version: str) -> str:
        """Another name for the weights that run; requests that run have it from their next token on."""
        if not isinstance(version, str):
            raise RequestError(f"version must be a string, found {version!r}", field="version")
        self._inbox.check_empty()
        self._llm.engine.gate.set_version(version)
        return version

    def _check_still(self, what: str) -> None:
        if self._llm.engine.has_work:
            raise RequestError(f"{what} only while no request runs or waits, or while the engine is paused: pause() it")

    # ---- sleep ----

    def sleep(self, level: int = 1, tags: Sequence[str] | None = None, resumes: bool | None = None) -> None:
        """Give memory back: of the weights, which level 1 keeps in host memory and level 2 drops, and of the cache, or
        of what `tags` name. Requests that are there wait; those that lose rows compute them again. Level 0 is a pause.

        resumes  whether the engine goes on after waking; by default if it was not paused before
        """
        llm, gate = self._llm, self._llm.engine.gate
        self._check_still("an engine can sleep")
        wanted = self._sleeper.check(level, tags) if level else set[str]()
        if not self._sleeper.asleep:
            self._wakes_open = not gate.is_shut if resumes is None else resumes
        gate.shut("keep")
        if not wanted:
            return
        if CACHE in wanted:
            llm.engine.start_anew(llm.cache.fingerprint, clears=True)
        self._sleeper.sleep(level, wanted, llm.model.weights, llm.pool, llm.cache, llm.engine.runner)
        if level == 2 and WEIGHTS in wanted:
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
