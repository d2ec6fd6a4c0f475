"""`Serving`: what requests are given to: an `Engine`, or the engines of several ranks as one. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from dsv4.engine.gate import Gate
from dsv4.engine.request import Request
from dsv4.engine.stats import EngineStats
from dsv4.engine.step.tokens import StepTokens
from dsv4.request import FinishReason, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from dsv4.cache.manager import KVCacheManager
    from dsv4.engine.step.constraint import Constraint
    from dsv4.engine.step.size import Sizes
    from dsv4.model.transformer import Transformer


class Serving(Protocol):
    """See `Engine`."""

    observers: list[Callable[[Tensor], None]]

    @property
    def model(self) -> Transformer: ...

    @property
    def cache(self) -> KVCacheManager: ...

    @property
    def gate(self) -> Gate: ...

    @property
    def sizes(self) -> Sizes: ...

    @property
    def num_slots(self) -> int: ...

    @property
    def has_work(self) -> bool: ...

    @property
    def has_idle_work(self) -> bool: ...

    def idle_step(self) -> None: ...

    def prepare(
        self, prompt: Iterable[int], params: SamplingParams, constraint: Constraint | None = None
    ) -> Request: ...  # fmt: skip

    def submit(self, request: Request, waited: float = 0.0) -> None: ...

    def add(self, prompt: Iterable[int], params: SamplingParams) -> Request: ...

    def resume(self) -> None: ...

    def step(self) -> StepTokens: ...

    def take_results(self) -> StepTokens: ...

    def abort(self, request: Request) -> None: ...

    def finish(self, request: Request, reason: FinishReason = FinishReason.STOP) -> None: ...

    def stats(self) -> EngineStats: ...

    def check_integrity(self) -> None: ...
