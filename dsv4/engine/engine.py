"""`Engine`: runs many requests over one model and one cache, a step at a time. Synchronous.

A step: the `Scheduler` says which requests feed how many tokens, `StepBuilder` makes that one batch, a runner computes
the logits of the rows that matter, and each request whose known tokens are all in draws its next one. How requests
wait, share and lose the cache is the scheduler's business (scheduler.py).

One cache has one engine: two would promise the same blocks. Not for several threads at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.errors import NoFreeSlot
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.schema import blocks_at_position
from dsv4.engine.constraint import Constraint
from dsv4.engine.offload.pool import ExpertPool, TransferStats
from dsv4.engine.sampler import Undrawable, constraint_failure, draw
from dsv4.engine.scheduler import Scheduler, StepPlan
from dsv4.engine.sequence import Sequence
from dsv4.engine.stats import EngineStats
from dsv4.engine.step import StepBuilder, StepInput
from dsv4.model.block import BlockOutput
from dsv4.model.transformer import Transformer
from dsv4.request import RequestError, SamplingParams, check_prompt
from dsv4.text.tokenizer import Tokenizer


class StepRunner(Protocol):
    """What computes a forward call."""

    def forward(self, batch: TokenBatch, sample_rows: Tensor) -> Tensor:
        """Logits [R, vocab] of the batch rows `sample_rows` [R]; valid until the next call."""


@dataclass(frozen=True)
class StepResult:
    """One request's new token in a step, and the text that became certain with it."""

    sequence: Sequence
    token_id: int
    text: str


class Engine:
    """`add` requests, call `step` until `has_work` is false (or until those that matter are done).

    runner   computes the forward calls; by default directly, without graphs
    pad_to   rows a call of n tokens is padded to, at least n; by default n
    experts  the pool of a model whose experts are offloaded, for `stats` and `check_integrity`
    clock    seconds, for deadlines
    observe  when set, sees every layer's output of every step (`Transformer.forward`), which then runs directly
    """

    def __init__(
        self, model: Transformer, cache: KVCacheManager, tokenizer: Tokenizer | None, *,
        runner: StepRunner | None = None, pad_to: Callable[[int], int] | None = None,
        clock: Callable[[], float] = time.monotonic, experts: ExpertPool | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self.cache = cache
        self.tokenizer = tokenizer
        self.scheduler = Scheduler(
            cache, num_blocks=cache.schema.num_blocks, max_batched_tokens=cache.engine.max_chunk_tokens
        )
        self.observe: Callable[[int, BlockOutput], None] | None = None
        self._direct = _EagerRunner(model, cache)
        self.runner: StepRunner = runner or self._direct
        self._builder = StepBuilder(cache)
        self._pad_to = pad_to
        self._clock = clock
        self._experts = experts
        self._num_output_tokens = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def stats(self) -> EngineStats:
        """Where the engine stands now."""
        schema, scheduler = self.cache.schema, self.scheduler
        moved = TransferStats() if self._experts is None else self._experts.stats
        return EngineStats(
            num_waiting=scheduler.num_waiting,
            num_running=scheduler.num_running,
            num_slots=schema.num_slots,
            num_blocks_used=schema.num_blocks - self.cache.num_free_blocks,
            num_blocks=schema.num_blocks,
            num_steps=scheduler.num_steps,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_finished=scheduler.num_finished,
            num_aborted=scheduler.num_aborted,
            num_failed=scheduler.num_failed,
            num_preemptions=scheduler.num_preemptions,
            num_recomputed_tokens=scheduler.num_recomputed_tokens,
            num_expert_hits=moved.num_hits,
            num_expert_misses=moved.num_misses,
            num_expert_bytes=moved.bytes_moved,
        )

    def prepare(
        self, prompt: Iterable[int], params: SamplingParams, constraint: Constraint | None = None
    ) -> Sequence:  # fmt: skip
        """A request that could run, not yet queued. `RequestError` if it could never."""
        config, limits = self.model.config, self.cache.engine
        token_ids = check_prompt(prompt, config.vocab_size, limits.max_context_tokens)
        outside = [token_id for token_id in params.stop_token_ids if token_id >= config.vocab_size]
        if outside:
            raise RequestError(f"stop_token_ids holds {outside[0]}; ids are integers from 0 to {config.vocab_size - 1}")
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this checkpoint has none; use stop_token_ids")
        sequence = Sequence.start(
            token_ids, params, max_context_tokens=limits.max_context_tokens,
            eos_token_id=config.eos_token_id, tokenizer=self.tokenizer, constraint=constraint,
        )  # fmt: skip
        needed, total = blocks_at_position(sequence.max_len), self.cache.schema.num_blocks
        if needed > total:
            raise RequestError(
                f"the request may reach {sequence.max_len} tokens, which need {needed} cache blocks of {total}: "
                "lower max_tokens or raise num_blocks"
            )
        return sequence

    def submit(self, sequence: Sequence) -> None:
        """Queue a prepared request. Its deadline counts from here."""
        self.scheduler.add(sequence, self._clock())

    def add(self, prompt: Iterable[int], params: SamplingParams) -> Sequence:
        """`prepare` and `submit`."""
        sequence = self.prepare(prompt, params)
        self.submit(sequence)
        return sequence

    def step(self) -> list[StepResult]:
        """Run one forward call, draw a token for every request whose known tokens are all in.

        A request whose logits are no numbers, whose constraint allows no token, whose deadline has passed or for which
        no block can ever be free fails alone (`Sequence.error`). If the call itself fails, every request in it is
        aborted: some layers may have moved on and others not, so none of them could be continued.
        """
        plan = self.scheduler.schedule(self._clock())
        if not plan.pieces:
            self.scheduler.commit(plan)
            if self.scheduler.num_waiting:
                raise NoFreeSlot(
                    f"{self.scheduler.num_waiting} requests wait for slots or blocks held outside this engine"
                )
            return []
        try:
            results = self._forward(plan)
        except BaseException:
            self.scheduler.discard(plan)
            raise
        self.scheduler.commit(plan)
        return results

    def abort(self, sequence: Sequence) -> None:
        """Drop a request and free what it holds. One that has finished, or was never queued, is left as it is."""
        self.scheduler.abort(sequence)

    def check_integrity(self) -> None:
        """Recompute the truth of the scheduler's, the cache's and the experts' books. Between two steps."""
        self.scheduler.check_integrity()
        self.cache.check_integrity()
        if self._experts is not None:
            self._experts.check_integrity()

    # ---- the parts of a step ----

    def _forward(self, plan: StepPlan) -> list[StepResult]:
        pad_to = 0 if self._pad_to is None else self._pad_to(plan.num_tokens)
        step = self._builder.build(plan, pad_to=pad_to)
        if self.observe is None:
            logits = self.runner.forward(step.batch, step.sample_rows)
        else:
            logits = self._direct.forward(step.batch, step.sample_rows, self.observe)
        return self._draw(logits, step) if step.drawing else []

    def _draw(self, logits: Tensor, step: StepInput) -> list[StepResult]:
        """The next token of every request that is ready. Those that are over, or cannot go on, are marked so."""
        results = []
        outcomes = draw(self.model.context.ops.sample, logits, step.drawing)
        for sequence, drawn in zip(step.drawing, outcomes, strict=True):
            if sequence.is_done:
                continue  # aborted while the step ran
            if isinstance(drawn, Undrawable):
                sequence.error = drawn.reason
                continue
            text = sequence.append(drawn.token_id, drawn.logprobs)
            self._num_output_tokens += 1
            results.append(StepResult(sequence, drawn.token_id, text))
            if sequence.finish_reason is None and sequence.constraint is not None:
                try:
                    sequence.constraint.accept(drawn.token_id)
                except Exception as error:  # a rule is not our code: whatever it does, it does to its own request
                    sequence.error = constraint_failure(error)
        return results


class _EagerRunner:
    """The forward call as it is: every layer, then the logits of the rows asked for."""

    def __init__(self, model: Transformer, cache: KVCacheManager) -> None:
        self._model = model
        self._cache = cache

    def forward(
        self, batch: TokenBatch, sample_rows: Tensor, observe: Callable[[int, BlockOutput], None] | None = None
    ) -> Tensor:
        streams = self._model.forward(batch, self._cache.handle, observe)
        return self._model.logits(streams[sample_rows])
