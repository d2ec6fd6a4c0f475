"""`LLM`'s methods that look inside: logits, traces of layers, drafts. They run beside the engine, on rows of their
own."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dsv4.cache.batch import Chunk, TokenBatch
from dsv4.cache.manager import KVCacheManager
from dsv4.config import EngineConfig, ModelConfig, shown
from dsv4.config.layers import LayerSpec
from dsv4.engine.draft.trace import DraftRound, trace_drafts
from dsv4.llm_input import check_chunks
from dsv4.model.block import BlockOutput
from dsv4.model.transformer import Transformer
from dsv4.request import RequestError, check_token_ids


class Inside(ABC):
    config: ModelConfig
    model: Transformer
    cache: KVCacheManager

    @abstractmethod
    def _make_cache(self, limits: EngineConfig, schedule: Sequence[LayerSpec], fingerprint: str = "") -> KVCacheManager:
        """A cache of its own for this model."""

    def logits(self, token_ids: Sequence[int], chunks: Sequence[int] | None = None) -> Tensor:
        """fp32 [len, vocab]: every position's logits, the tokens fed in pieces of `chunks` through the cached state."""
        ids = self._check_ids(token_ids)
        rows: list[Tensor] = []
        self._run(ids, chunks, lambda batch, streams: rows.append(self.model.logits(streams).float()))
        return torch.cat(rows)

    def mtp_logits(self, token_ids: Sequence[int], chunks: Sequence[int] | None = None) -> Tensor:
        """fp32 [len - 1, vocab]: row t from the main streams of token t and the id of token t + 1, for token t + 2.

        The main model sees the tokens in one go; `chunks` (which sum to len - 1) are how the MTP block gets its pairs.
        """
        if not self.model.weights.mtp:
            why = "no mtp.* tensors" if self.model.weights.dspark is None else "a DSpark head: see draft_trace"
            raise RequestError(f"this checkpoint has no MTP block ({why})")
        ids = self._check_ids(token_ids)
        if len(ids) < 2:
            raise RequestError(f"mtp_logits needs at least two tokens, found {len(ids)}")
        pieces = check_chunks(chunks, len(ids) - 1)
        cache = self._make_cache(
            EngineConfig(max_context_tokens=len(ids), max_concurrent_requests=1, prefix_cache_bytes=0),
            self.model.schedule,
        )
        slot, handle = cache.admit(len(ids)), cache.handle(self.config.num_hidden_layers)
        rows: list[Tensor] = []

        def draft(batch: TokenBatch, streams: Tensor) -> None:
            start = 0
            for length in pieces:
                here = slice(start, start + length)
                pairs = TokenBatch.of([Chunk(slot, start, ids[start + 1 : start + length + 1])], cache.block_table)
                rows.append(self.model.mtp_logits(0, self.model.mtp(0, streams[here], pairs, handle)).float())
                start += length

        self._run(ids, None, draft)
        return torch.cat(rows)

    def draft_trace(
        self, prompt: Sequence[int], anchor: int, verified: Sequence[tuple[int, int]] = (),
        chunks: Sequence[int] | None = None,
    ) -> list[DraftRound]:  # fmt: skip
        """What the checkpoint's drafter (MTP or DSpark) says behind `anchor`, the token after the prompt, greedily; and
        again after each pair of `verified`: (accepted, bonus) keeps this many of the last drafts and goes on with bonus
        as the new anchor. The prompt is fed in pieces of `chunks`.
        """
        ids = self._check_ids(prompt)
        pieces = check_chunks(chunks, len(ids))
        if not self.model.weights.draft_blocks:
            raise RequestError("this checkpoint has no drafter (no mtp.* tensors)")
        return trace_drafts(self.model, self._make_cache, ids, pieces, anchor, verified)

    def trace(self, token_ids: Sequence[int]) -> list[BlockOutput]:
        """Per layer: streams after it, what its sublayers added, experts chosen, compressed entries picked."""
        layers: list[BlockOutput] = []
        self._run(self._check_ids(token_ids), None, observe=lambda _, output: layers.append(output))
        return layers

    def layer(self, layer_idx: int, streams: Tensor, token_ids: Sequence[int]) -> BlockOutput:
        """One block alone, as a prefill from position 0 on given streams [T, 4, D]."""
        config = self.config
        if not isinstance(layer_idx, int) or not 0 <= layer_idx < config.num_hidden_layers:
            raise RequestError(f"layer_idx must be from 0 to {config.num_hidden_layers - 1}, found {shown(layer_idx)}")
        ids = self._check_ids(token_ids)
        expected = (len(ids), config.hc_mult, config.hidden_size)
        if tuple(streams.shape) != expected:
            raise RequestError(f"streams must be {list(expected)} for {len(ids)} tokens, found {list(streams.shape)}")
        with self._slot(ids) as slot:
            batch = self.cache.make_batch([slot], [ids])
            given = streams.to(device=self.cache.device, dtype=self.model.context.dtype)
            return self.model.block(layer_idx, given, self.cache.handle(layer_idx), batch)

    def _check_ids(self, token_ids: Iterable[int]) -> list[int]:
        ids = check_token_ids(token_ids, self.config.vocab_size, "token")
        if not ids:
            raise RequestError("token_ids is empty; at least one token is needed")
        return ids

    def _run(
        self, token_ids: list[int], chunks: Sequence[int] | None,
        each: Callable[[TokenBatch, Tensor], None] | None = None,
        observe: Callable[[int, BlockOutput], None] | None = None,
    ) -> None:  # fmt: skip
        """Feed the tokens in pieces from position 0; `each` sees every piece's batch and final streams."""
        pieces = check_chunks(chunks, len(token_ids))
        remaining = list(token_ids)
        with self._slot(token_ids) as slot:
            for length in pieces:
                batch = self.cache.make_batch([slot], [remaining[:length]])
                streams = self.model.forward(batch, self.cache.handle, observe)
                del remaining[:length]
                if each is not None:
                    each(batch, streams)

    @contextmanager
    def _slot(self, token_ids: list[int]) -> Iterator[int]:
        slot = self.cache.admit(len(token_ids))
        try:
            yield slot
        finally:
            self.cache.release(slot)
