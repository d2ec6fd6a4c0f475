"""`Engine`: runs many requests over one model and one cache, a step at a time. Synchronous, first come first served.

A request is admitted when a slot is free and the blocks of its longest possible life are, so no step can run out of
blocks half-way. Each step feeds every running request its next piece: a chunk of prompt, or the token it drew last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from torch import Tensor

from dsv4.cache.errors import CacheError
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.schema import blocks_at_position
from dsv4.engine.sampler import draw
from dsv4.engine.sequence import Sequence
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
    """Add requests, call `step` until `has_work` is false."""

    def __init__(self, model: Transformer, cache: KVCacheManager, tokenizer: Tokenizer | None) -> None:
        self.model = model
        self.cache = cache
        self.tokenizer = tokenizer
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._reserved_blocks = 0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, request_idx: int, prompt: SequenceOf[int], params: SamplingParams) -> Sequence:
        """Queue a request. `RequestError` if it could never run."""
        config, limits = self.model.config, self.cache.engine
        check_prompt(prompt, config.vocab_size, limits.max_context_tokens)
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this checkpoint has none; use stop_token_ids")
        sequence = Sequence.start(
            request_idx, prompt, params, max_context_tokens=limits.max_context_tokens,
            eos_token_id=config.eos_token_id, tokenizer=self.tokenizer,
        )  # fmt: skip
        needed, total = blocks_at_position(sequence.max_len), self.cache.schema.num_blocks
        if needed > total:
            raise RequestError(
                f"the request may reach {sequence.max_len} tokens, which need {needed} cache blocks of {total}: "
                "lower max_tokens or raise num_blocks"
            )
        self._waiting.append(sequence)
        return sequence

    def step(self) -> list[StepResult]:
        """Admit what fits, run one forward call, draw a token for every request whose known tokens are all in."""
        self._admit()
        pieces = self._next_pieces()
        batch = self.cache.make_batch(
            [self._slot(sequence) for sequence, _ in pieces],
            [sequence.token_ids[sequence.num_processed :][:length] for sequence, length in pieces],
        )
        streams = self.model.forward(batch, self.cache.handle)
        last_rows, ready, row = [], [], 0
        for sequence, length in pieces:
            sequence.num_processed += length
            row += length
            if sequence.num_pending == 0:
                last_rows.append(row - 1)
                ready.append(sequence)
        return self._draw(streams[last_rows], ready) if ready else []

    def abort(self) -> None:
        """Drop every request and free what it held."""
        for sequence in self._running:
            self.cache.release(self._slot(sequence))
        self._running, self._waiting, self._reserved_blocks = [], deque(), 0

    # ---- the parts of a step ----

    def _admit(self) -> None:
        total = self.cache.schema.num_blocks
        while self._waiting and self.cache.num_free_slots:
            needed = blocks_at_position(self._waiting[0].max_len)
            if self._reserved_blocks + needed > total:
                return
            sequence = self._waiting.popleft()
            sequence.slot = self.cache.admit(sequence.max_len)
            self._reserved_blocks += needed
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

    def _draw(self, streams: Tensor, ready: list[Sequence]) -> list[StepResult]:
        results = []
        for sequence, (token_id, logprobs) in zip(ready, draw(self.model, streams, ready), strict=True):
            text = sequence.append(token_id, logprobs)
            results.append(StepResult(sequence, token_id, text))
            if sequence.finish_reason is not None:
                self._finish(sequence)
        return results

    def _finish(self, sequence: Sequence) -> None:
        self.cache.release(self._slot(sequence))
        self._running.remove(sequence)
        self._reserved_blocks -= blocks_at_position(sequence.max_len)

    def _slot(self, sequence: Sequence) -> int:
        if sequence.slot is None:
            raise CacheError("the request has no slot")
        return sequence.slot
