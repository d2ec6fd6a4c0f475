"""`Engine`: runs many requests over one model and one cache, a step at a time. Synchronous, first come first served.

A request is admitted when a slot is free and the blocks of its longest possible life are, so no step can run out of
blocks half-way. Each step feeds every running request its next piece: a chunk of prompt, or the token it drew last.

One cache has one engine: two would promise the same blocks. Not for several threads at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from dsv4.cache.errors import NoFreeSlot
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.schema import blocks_at_position
from dsv4.engine.constraint import Constraint, ConstraintError
from dsv4.engine.sampler import Undrawable, draw
from dsv4.engine.sequence import Sequence
from dsv4.engine.stats import EngineStats
from dsv4.model.block import BlockOutput
from dsv4.model.transformer import Transformer
from dsv4.request import RequestError, SamplingParams, check_prompt
from dsv4.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class StepResult:
    """One request's new token in a step, and the text that became certain with it."""

    sequence: Sequence
    token_id: int
    text: str


class Engine:
    """`add` requests, call `step` until `has_work` is false (or until those that matter are done).

    `observe`, when set, sees every layer's output of every step (`Transformer.forward`).
    """

    def __init__(self, model: Transformer, cache: KVCacheManager, tokenizer: Tokenizer | None) -> None:
        self.model = model
        self.cache = cache
        self.tokenizer = tokenizer
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self.observe: Callable[[int, BlockOutput], None] | None = None
        self._num_steps = self._num_prompt_tokens = self._num_output_tokens = 0
        self._num_finished = self._num_aborted = self._num_failed = 0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def stats(self) -> EngineStats:
        """Where the engine stands now."""
        schema = self.cache.schema
        return EngineStats(
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            num_slots=schema.num_slots,
            num_blocks_used=schema.num_blocks - self.cache.num_free_blocks,
            num_blocks=schema.num_blocks,
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_finished=self._num_finished,
            num_aborted=self._num_aborted,
            num_failed=self._num_failed,
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
        """Queue a prepared request."""
        self._waiting.append(sequence)

    def add(self, prompt: Iterable[int], params: SamplingParams) -> Sequence:
        """`prepare` and `submit`."""
        sequence = self.prepare(prompt, params)
        self.submit(sequence)
        return sequence

    def step(self) -> list[StepResult]:
        """Admit what fits, run one forward call, draw a token for every request whose known tokens are all in.

        A request whose logits are no numbers, or whose constraint allows no token, fails alone (`Sequence.error`). If
        the call itself fails, every request in it is aborted: some layers may have moved on and others not, so none
        of them could be continued.
        """
        self._admit()
        if not self._running:
            if self._waiting:
                raise NoFreeSlot(f"{len(self._waiting)} requests wait for slots or blocks held outside this engine")
            return []
        try:
            return self._forward(self._next_pieces())
        except BaseException:
            for sequence in list(self._running):
                self.abort(sequence)
            raise

    def abort(self, sequence: Sequence) -> None:
        """Drop a request and free what it holds. One that has finished, or was never queued, is left as it is."""
        if sequence in self._running:
            self._release(sequence)
            sequence.is_aborted = True
            self._num_aborted += 1
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
            sequence.is_aborted = True
            self._num_aborted += 1

    # ---- the parts of a step ----

    def _admit(self) -> None:
        reserved = sum(blocks_at_position(sequence.max_len) for sequence in self._running)
        while self._waiting and self.cache.num_free_slots:
            needed = blocks_at_position(self._waiting[0].max_len)
            if reserved + needed > self.cache.schema.num_blocks:
                return
            sequence = self._waiting.popleft()
            sequence.slot = self.cache.admit(sequence.max_len)
            reserved += needed
            self._running.append(sequence)

    def _next_pieces(self) -> list[tuple[Sequence, int]]:
        """Every running request with a share of the token budget: one token each, the rest to the oldest prompts."""
        budget = self.cache.engine.max_chunk_tokens - len(self._running)
        pieces = []
        for sequence in self._running:
            extra = min(sequence.num_pending - 1, max(budget, 0))
            budget -= extra
            pieces.append((sequence, 1 + extra))
        return pieces

    def _forward(self, pieces: list[tuple[Sequence, int]]) -> list[StepResult]:
        batch = self.cache.make_batch(
            [_slot(sequence) for sequence, _ in pieces],
            [sequence.token_ids[sequence.num_processed :][:length] for sequence, length in pieces],
        )
        streams = self.model.forward(batch, self.cache.handle, self.observe)
        self._num_steps += 1
        last_rows, ready, row = [], [], 0
        for sequence, length in pieces:
            self._num_prompt_tokens += max(0, min(length, sequence.prompt_len - sequence.num_processed))
            sequence.num_processed += length
            row += length
            if sequence.num_pending == 0:
                last_rows.append(row - 1)
                ready.append(sequence)
        return self._draw(streams[last_rows], ready) if ready else []

    def _draw(self, streams: Tensor, ready: list[Sequence]) -> list[StepResult]:
        """The next token of every request that is ready; those that are over, or cannot go on, leave."""
        results = []
        for sequence, drawn in zip(ready, draw(self.model, streams, ready), strict=True):
            if isinstance(drawn, Undrawable):
                self._fail(sequence, drawn.reason)
                continue
            text = sequence.append(drawn.token_id, drawn.logprobs)
            self._num_output_tokens += 1
            results.append(StepResult(sequence, drawn.token_id, text))
            if sequence.finish_reason is not None:
                self._release(sequence)
                self._num_finished += 1
            elif sequence.constraint is not None:
                try:
                    sequence.constraint.accept(drawn.token_id)
                except ConstraintError as error:
                    self._fail(sequence, str(error))
        return results

    def _fail(self, sequence: Sequence, reason: str) -> None:
        self._release(sequence)
        sequence.error = reason
        self._num_failed += 1

    def _release(self, sequence: Sequence) -> None:
        self.cache.release(_slot(sequence))
        sequence.slot = None
        self._running.remove(sequence)


def _slot(sequence: Sequence) -> int:
    assert sequence.slot is not None, "a running request has a slot"
    return sequence.slot
