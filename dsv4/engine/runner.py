"""`Runner`: one forward call as one function, replayed from a CUDA graph where its number of tokens has one.

The function is `_compute`: every layer, then the logits of the rows asked for. On a GPU `warm_up` compiles what it
launches at every size and captures it once per bucket. A captured call reads its tokens from static buffers, so a
batch of n tokens is copied into the buffers of the smallest bucket that holds it, the rest padded (slot -1). Which
kernel runs is decided by the number of tokens alone, never by what they are: the graph of a bucket serves a decode
step, a few tokens of a prompt and any mixture. Larger batches call the same function directly.

How a call is captured: engine/graphs.py.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.manager import KVCacheManager
from dsv4.engine.graphs import Capture, Replay, RunnerError, capture_graph
from dsv4.engine.offload.pool import ExpertPool
from dsv4.engine.precompile import precompile
from dsv4.engine.sampler import rehearse
from dsv4.model.transformer import Transformer
from dsv4.ops import TORCH, OpSet
from dsv4.ops.lib.compile_only import can_compile_in_parallel
from dsv4.ops.triton_set import TRITON

_LOG = logging.getLogger("dsv4.engine")
PADDED_SLOT = -1
_FIELDS = ("token_ids", "positions", "slots", "chunk_starts", "chunk_ends")
_SLOTS_ROW = _FIELDS.index("slots")

Progress = Callable[[str, int, int], None]  # what is done, how many of them, of how many


def ops_for(device: torch.device, numerics: str) -> OpSet:
    """The kernels on a GPU in `official` numerics; the oracles everywhere else."""
    return TRITON if device.type == "cuda" and numerics == "official" else TORCH


def decode_buckets(max_tokens: int) -> tuple[int, ...]:
    """Powers of two up to `max_tokens`, and `max_tokens` itself: padding at most doubles a call."""
    powers = [1 << bit for bit in range(max_tokens.bit_length()) if 1 << bit < max_tokens]
    return (*powers, max_tokens)


class Runner:
    """Forward calls of one model on one cache. Not for several threads at once.

    buckets         numbers of tokens that get a graph
    use_graphs      False on a CPU, or to run every call directly
    experts         the pool of a model whose experts are offloaded
    capture         how a call is captured; by default as CUDA graphs
    forbid_compiles a kernel compiled after `warm_up` raises `RunnerError`; otherwise `compiled_late` lists it
    """

    def __init__(
        self, model: Transformer, cache: KVCacheManager, *, buckets: Sequence[int], use_graphs: bool,
        experts: ExpertPool | None = None, capture: Capture | None = None, forbid_compiles: bool = False,
    ) -> None:  # fmt: skip
        if any(not isinstance(bucket, int) or bucket < 1 for bucket in buckets):
            raise ValueError(f"buckets must be positive numbers of tokens, found {list(buckets)}")
        if use_graphs and capture is None and cache.device.type != "cuda":
            raise ValueError(f"graphs need a CUDA device, found {cache.device}")
        self.model = model
        self.cache = cache
        self.experts = experts
        self.buckets = tuple(sorted(set(buckets)))
        self.use_graphs = use_graphs
        self.forbid_compiles = forbid_compiles
        self.num_replays = self.num_direct = 0
        self._capture = capture or self._capture_cuda
        self._graphs: dict[int, _BucketGraph] = {}
        self._compiles = _CompileWatch()
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def captured(self) -> tuple[int, ...]:
        """Buckets that have a graph."""
        return tuple(sorted(self._graphs))

    @property
    def compiled_late(self) -> tuple[str, ...]:
        """Kernels compiled since `warm_up` ended: each one stalled a call."""
        return tuple(self._compiles.names)

    @torch.no_grad()
    def warm_up(self, progress: Progress = lambda what, done, total: None) -> None:
        """Compile every kernel and capture every bucket. Padding only: the cache stays as it is.

        Direct calls are compiled at the sizes where launch tables may change: powers of two up to `max_chunk_tokens`,
        half-way between them, and one row more, since sizes that 16 does not divide may be compiled apart. All cores
        compile first (engine/precompile.py); the first calls load the kernels, and compile what is still missing.
        """
        with self._compiles:
            if self.cache.device.type == "cuda":
                sizes = self._direct_sizes()
                self._precompile(sizes, progress)
                for done, size in enumerate(sizes):
                    self._compile(size)
                    progress("first calls", done + 1, len(sizes))
                torch.cuda.synchronize()
            if self.use_graphs:
                # the largest first: the smaller ones then find room in its memory
                wanted = [bucket for bucket in reversed(self.buckets) if self._can_capture(bucket)]
                for done, bucket in enumerate(wanted):
                    self._graphs[bucket] = self._make_graph(bucket)
                    progress("capturing", done + 1, len(wanted))
        self._compiles.names.clear()
        if self.experts is not None:
            self.experts.stats.reset()

    @torch.no_grad()
    def forward(self, batch: TokenBatch, sample_rows: Tensor) -> Tensor:
        """The batch through the model -> fp32 (or wider) logits [R, vocab] of the batch rows `sample_rows` [R].

        The result of a replay lives in the graph's memory: it is valid until the next call.
        """
        bucket = self._bucket_for(batch, sample_rows)
        with self._compiles:
            if bucket is None:
                self.num_direct += 1
                logits = self._compute(batch, sample_rows)
            else:
                self.num_replays += 1
                logits = self._graphs[bucket].run(batch, sample_rows)
        if self.forbid_compiles and self._compiles.names:
            raise RunnerError(f"compiled after warm-up, for {batch.num_tokens} tokens: {', '.join(self.compiled_late)}")
        return logits

    # ---- the one function ----

    def _compute(self, batch: TokenBatch, sample_rows: Tensor, num_valid: int | None = None) -> Tensor:
        with _padded_from(self.experts, num_valid):
            streams = self.model.forward(batch, self.cache.handle)
            return self.model.logits(streams.index_select(0, sample_rows))

    def _precompile(self, sizes: Sequence[int], progress: Progress) -> None:
        """A help, not a condition: what fails here fails again where it matters, or did not matter."""
        if self.model.context.ops is TORCH or not can_compile_in_parallel():
            return
        try:
            precompile(self.model, self.cache, sizes, self.experts, partial(progress, "compiling"))
        except Exception as error:
            _LOG.warning("kernels are compiled one by one: %s: %s", type(error).__name__, error)

    def _compile(self, size: int) -> None:
        batch, rows = self._padding_batch(size), self._padding_rows(size)
        logits = self._compute(batch, rows, num_valid=0)
        if size == 1:
            rehearse(self.model.context.ops.sample, logits)
        if self.experts is not None and not self.experts.always_fits(size):
            self.experts.stages_always = True
            self._compute(batch, rows, num_valid=0)
            self.experts.stages_always = False

    # ---- graphs ----

    def _bucket_for(self, batch: TokenBatch, sample_rows: Tensor) -> int | None:
        """The smallest captured bucket that holds the call, if there is one."""
        if batch.block_table.data_ptr() != self.cache.block_table.data_ptr():
            return None  # a graph reads the manager's own table
        needed = max(batch.num_tokens, sample_rows.shape[0])
        return next((bucket for bucket in self.buckets if bucket >= needed and bucket in self._graphs), None)

    def _can_capture(self, bucket: int) -> bool:
        return self.experts is None or self.experts.always_fits(bucket)

    def _direct_sizes(self) -> list[int]:
        largest = self.cache.engine.max_chunk_tokens
        sizes = {1, 2, largest, *self.buckets}
        for bit in range(1, largest.bit_length()):
            sizes |= {1 << bit, (1 << bit) + 1, 3 << (bit - 1)}
        return sorted(size for size in sizes if size <= max(largest, *self.buckets, 1))

    def _padding_batch(self, size: int) -> TokenBatch:
        fields = torch.zeros((len(_FIELDS), size), dtype=torch.int64, device=self.cache.device)
        fields[_SLOTS_ROW] = PADDED_SLOT
        return _batch_over(fields, self.cache.block_table)

    def _padding_rows(self, size: int) -> Tensor:
        return torch.zeros(min(size, self.cache.schema.num_slots), dtype=torch.int64, device=self.cache.device)

    @torch.no_grad()
    def _make_graph(self, bucket: int) -> _BucketGraph:
        graph = _BucketGraph(bucket, self.cache.block_table, self.experts)
        graph.replay = self._capture(lambda: self._compute(graph.batch, graph.sample_rows, graph.num_valid))
        return graph

    def _capture_cuda(self, call: Callable[[], Tensor]) -> Replay:
        if self._pool is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        return capture_graph(call, self._pool, self.experts, self._stream)


class _BucketGraph:
    """The static buffers of one bucket, and the captured call over them."""

    replay: Replay

    def __init__(self, size: int, block_table: Tensor, experts: ExpertPool | None) -> None:
        device = block_table.device
        self.size = size
        self.num_valid = 0
        self._experts = experts
        self._fields = torch.zeros((len(_FIELDS), size), dtype=torch.int64, device=device)
        self._fields[_SLOTS_ROW] = PADDED_SLOT
        self._padding = self._fields.clone()
        self.sample_rows = torch.zeros(size, dtype=torch.int64, device=device)
        self.batch = _batch_over(self._fields, block_table)
        self._num_filled = 0  # rows of the buffers that do not hold padding

    def run(self, batch: TokenBatch, sample_rows: Tensor) -> Tensor:
        num_tokens, num_rows = batch.num_tokens, sample_rows.shape[0]
        if self._num_filled > num_tokens:
            self._fields[:, num_tokens : self._num_filled].copy_(self._padding[:, num_tokens : self._num_filled])
        self._num_filled = self.num_valid = num_tokens
        targets = [*self._fields[:, :num_tokens].unbind(0), self.sample_rows[:num_rows]]
        torch._foreach_copy_(targets, [*(getattr(batch, name) for name in _FIELDS), sample_rows])
        with _padded_from(self._experts, num_tokens):
            return self.replay()[:num_rows]


def _padded_from(experts: ExpertPool | None, num_valid: int | None) -> AbstractContextManager[None]:
    """Rows from `num_valid` on fetch no experts."""
    return nullcontext() if experts is None else experts.only(num_valid)


def _batch_over(fields: Tensor, block_table: Tensor) -> TokenBatch:
    """A batch whose tensors are the rows of `fields` [5, T]."""
    token_ids, positions, slots, chunk_starts, chunk_ends = fields.unbind(0)
    return TokenBatch(token_ids, positions, slots, chunk_starts, chunk_ends, block_table)


class _CompileWatch:
    """Names of the kernels Triton specialises while the watch is on. Does nothing where there is no Triton."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._before: Any = None
        try:
            self._knobs: Any = importlib.import_module("triton").knobs.runtime
        except ImportError:
            self._knobs = None

    def __enter__(self) -> None:
        if self._knobs is not None:
            self._before = self._knobs.jit_post_compile_hook
            self._knobs.jit_post_compile_hook = self._note

    def __exit__(self, *error: object) -> None:
        if self._knobs is not None:
            self._knobs.jit_post_compile_hook = self._before

    def _note(self, *, key: str, **facts: Any) -> None:
        self.names.append(str(facts.get("repr", key)).split("[", 1)[0])
        if self._before is not None:
            self._before(key=key, **facts)
