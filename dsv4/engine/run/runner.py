"""`Runner`: a step on the device: the forward call, then the draw; replayed from CUDA graphs where it is small enough.

The forward call is one function, `_compute`: token ids that only the device knows are looked up, every layer, then the
logits of the rows asked for. On a GPU `warm_up` compiles what a step launches at every size and captures it once per
bucket (bucket.py). A captured call reads its tokens from static buffers, so a batch of n tokens is copied into
the buffers of the smallest bucket that holds it, the rest padded (slot -1). Which kernel runs is decided by the number
of tokens alone, never by what they are: the graph of a bucket serves a decode step, a few tokens of a prompt and any
mixture. Larger batches call the same function directly.

Nothing here waits for the device. How a call is captured: engine/run/graphs.py.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.manager import KVCacheManager
from dsv4.engine.draft.round import Drafted, FedDrafts, extend, make_table, propose
from dsv4.engine.offload.pool import ExpertPool
from dsv4.engine.run.bucket import BucketGraph, Drafting, Draws, Forwarded, padded_from, padding_batch
from dsv4.engine.run.compile_watch import CompileWatch
from dsv4.engine.run.graphs import Capture, Replay, Result, RunnerError, capture_graph
from dsv4.engine.run.precompile import precompile, rehearse, rehearse_drafts
from dsv4.engine.step.builder import StepBuffer
from dsv4.engine.step.sampler import NUM_TOP, SCORED_ROWS
from dsv4.engine.step.slots import SlotStates
from dsv4.model.block import BlockOutput
from dsv4.model.transformer import Transformer
from dsv4.ops.compile_only import can_compile_in_parallel
from dsv4.ops.sampling import SamplingRows

_LOG = logging.getLogger("dsv4.engine")

CALLS_A_CAPTURE = 32  # beside requests: they wait while a graph is captured

Progress = Callable[[str, int, int], None]  # what is done, how many of them, of how many


class Runner:
    """Steps of one model on one cache, and `slots`: how each slot draws. Not for several threads at once.

    buckets         numbers of tokens that get a graph
    use_graphs      False on a CPU, or to run every call directly
    experts         the pool of a model whose experts are offloaded
    drafting        the drafter whose rows every call writes, and how many drafts it may be asked for
    capture         how a call is captured; by default as CUDA graphs
    forbid_compiles a kernel compiled after `warm_up` raises `RunnerError`; otherwise `compiled_late` lists it
    """

    def __init__(
        self, model: Transformer, cache: KVCacheManager, *, buckets: Sequence[int], use_graphs: bool,
        experts: ExpertPool | None = None, drafting: Drafting | None = None, capture: Capture | None = None,
        forbid_compiles: bool = False,
    ) -> None:  # fmt: skip
        if any(not isinstance(bucket, int) or bucket < 1 for bucket in buckets):
            raise ValueError(f"buckets must be positive numbers of tokens, found {list(buckets)}")
        if use_graphs and capture is None and cache.device.type != "cuda":
            raise ValueError(f"graphs need a CUDA device, found {cache.device}")
        self.model = model
        self.cache = cache
        self.experts = experts
        self.drafting = drafting
        self.buckets = tuple(sorted(set(buckets)))
        self.use_graphs = use_graphs
        self.forbid_compiles = forbid_compiles
        self.num_replays = self.num_direct = 0
        self._capture: Capture = capture or self._capture_cuda
        self.slots = SlotStates(cache.schema.num_slots, model.config.vocab_size, cache.device)
        self.draft_table: Tensor | None = None  # the last drafts of every slot
        if drafting is not None:
            self.draft_table = make_table(cache.schema.num_slots, drafting.max_drafts, cache.device)
        self._graphs: dict[int, BucketGraph] = {}
        self._missed: int | None = None  # the bucket that the last call would have taken, had it a graph
        self._num_since_capture = 0  # calls
        self._compiles = CompileWatch()
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def captured(self) -> tuple[int, ...]:
        """Buckets that have a graph."""
        return tuple(sorted(self._graphs))

    @property
    def max_draws(self) -> int:
        """Rows of a step that draw, at most."""
        most = 0 if self.drafting is None else self.drafting.max_drafts
        return self.cache.schema.num_slots * (1 + most)

    @property
    def compiled_late(self) -> tuple[str, ...]:
        """Kernels compiled since `warm_up` ended: each one stalled a call."""
        return tuple(self._compiles.names)

    @torch.no_grad()
    def warm_up(
        self, progress: Progress = lambda what, done, total: None, *, is_compiled: bool = False,
        num_graphs: int | None = None,
    ) -> None:  # fmt: skip
        """Compile every kernel and capture every bucket, or the first `num_graphs` that will be needed. Padding only:
        the cache stays as it is. is_compiled: `precompile` has been done, beside other work.

        Direct calls are compiled at the sizes where launch tables may change: powers of two up to `chunk_tokens`,
        half-way between them, and one row more, since sizes that 16 does not divide may be compiled apart. All cores
        compile first (engine/run/precompile.py); the first calls load the kernels, and compile what is still missing.
        """
        with self._compiles:
            if self.cache.device.type == "cuda":
                sizes = self._direct_sizes()
                if not is_compiled:
                    self.precompile(progress)
                torch.cuda.empty_cache()
                for done, size in enumerate(reversed(sizes)):  # smaller calls find room in what the largest took
                    self._compile(size)
                    progress("first calls", done + 1, len(sizes))
                torch.cuda.synchronize()
            self.capture_graphs(progress, num_graphs)
        self._compiles.names.clear()
        if self.experts is not None:
            self.experts.stats.reset()

    def capture_graphs(
        self, progress: Progress = lambda what, done, total: None, num_graphs: int | None = None
    ) -> None:  # fmt: skip
        """Of every bucket that has none, or of the next `num_graphs`."""
        wanted = self.missing[:num_graphs]
        for done, bucket in enumerate(wanted):
            self._graphs[bucket] = self._make_graph(bucket)
            progress("capturing", done + 1, len(wanted))

    @property
    def missing(self) -> list[int]:
        """Buckets that are to have a graph and have none, in the order in which they will be needed: the largest, whose
        memory the others then share and which serves for all of them; then from one request upwards."""
        if not self.use_graphs:
            return []
        wanted = [bucket for bucket in self.buckets if self._can_capture(bucket)]
        return [bucket for bucket in (*wanted[-1:], *wanted[:-1]) if bucket not in self._graphs]

    @torch.no_grad()
    def capture_next(self, *, is_idle: bool) -> bool:
        """Capture one more graph, if one is missing, and say so: where the engine `is_idle` the next; else that which
        the last call missed, once in `CALLS_A_CAPTURE`. Not between a call and its draw: graphs share memory."""
        missing = self.missing if is_idle or self._missed is not None else []
        if not missing or not (is_idle or self._num_since_capture >= CALLS_A_CAPTURE):
            return False
        bucket = missing[0] if self._missed not in missing else self._missed
        assert bucket is not None
        num_late = len(self._compiles.names)
        with self._compiles:
            self._graphs[bucket] = self._make_graph(bucket)
        del self._compiles.names[num_late:]  # a rehearsal, not a call that stalled
        self._missed, self._num_since_capture = None, 0
        return True

    def drop_graphs(self) -> None:
        """Let go of them and their memory: the addresses they know are about to change."""
        self._graphs.clear()
        self._pool = self._stream = None

    def step_buffer(self, num_tokens: int, num_draws: int) -> StepBuffer | None:
        """The input buffer of this step's graph, to build the step in place; None without a graph, or with drafts."""
        if self.drafting is not None:  # a step with drafts has more numbers, some of which only the device knows
            return None
        bucket = self._bucket_of(max(num_tokens, num_draws))
        return None if bucket is None else self._graphs[bucket].buffer

    @torch.no_grad()
    def forward(self, batch: TokenBatch, draw_rows: Tensor) -> Forwarded:
        """The batch through the model; logits of the batch rows `draw_rows` [R]."""
        return self._forward(batch, draw_rows, self._bucket_for(batch, draw_rows))

    @torch.no_grad()
    def forward_with_picks(self, batch: TokenBatch, draw_rows: Tensor) -> Forwarded:
        """With those of the indexers, which no graph keeps."""
        return self._forward(batch, draw_rows, None, keeps_picks=True)

    def _forward(
        self, batch: TokenBatch, draw_rows: Tensor, bucket: int | None, *, keeps_picks: bool = False
    ) -> Forwarded:  # fmt: skip
        self._num_since_capture += 1
        with self._compiles:
            if bucket is None:
                self.num_direct += 1
                made = self._compute(batch, draw_rows, keeps_picks=keeps_picks)
            else:
                self.num_replays += 1
                made = self._graphs[bucket].forward(batch, draw_rows)
        self._check_compiles(f"{batch.num_tokens} tokens")
        return made

    @torch.no_grad()
    def draw(self, forwarded: Forwarded, rows: SamplingRows, num_top: int | None = None) -> Draws:
        """A token for each row of the last forward call's logits; log-probabilities with the `num_top` likeliest."""
        ops, num_top = self.model.context.ops, self._num_top(num_top)
        with self._compiles:
            if forwarded.bucket is not None:
                drawn = forwarded.bucket.draw(rows, num_top)
            else:
                token_ids = ops.sample(forwarded.logits, rows, self.slots.state)
                listed = () if num_top is None else ops.sampled_logprobs(forwarded.logits, token_ids, num_top)
                drawn = Draws(token_ids, listed)
        self._check_compiles(f"drawing from {rows.slots.shape[0]} rows")
        return drawn

    @torch.no_grad()
    def draft(
        self, forwarded: Forwarded, batch: TokenBatch, token_ids: Tensor | None, fed: FedDrafts, num_drafts: int
    ) -> Drafted | None:
        """Let the drafter write its rows of the last forward call, and ask it for `num_drafts` drafts for each request
        of `fed`; None for 0. token_ids [N]: what the last draw gave, None if nothing drew."""
        drafting = self.drafting
        assert drafting is not None, "a runner without a drafter"
        with self._compiles:
            if forwarded.bucket is not None:
                made = forwarded.bucket.draft(fed, num_drafts, has_drawn=token_ids is not None)
            else:
                made = self._draft(drafting, forwarded, batch, token_ids, fed, num_drafts)
        self._check_compiles(f"drafting for {fed.slots.shape[0]} requests")
        return made

    @torch.no_grad()
    def score(self, forwarded: Forwarded, rows: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, ...]:
        """Log-probabilities of given tokens after the batch rows `rows`, as `sampled_logprobs`; 0 lists none."""
        assert rows.shape == token_ids.shape
        assert rows.shape[0] in SCORED_ROWS, f"one of {SCORED_ROWS} rows"
        listed = self._num_top(num_top)
        assert listed is not None
        with self._compiles:
            scores = self._score(forwarded, rows, token_ids, listed)
        self._check_compiles("scores")
        return scores

    def _num_top(self, num_top: int | None) -> int | None:
        return None if num_top is None else min(num_top, self.model.config.vocab_size)

    def _check_compiles(self, what: str) -> None:
        if self.forbid_compiles and self._compiles.names:
            raise RunnerError(f"compiled after warm-up, for {what}: {', '.join(self.compiled_late)}")

    # ---- the one function ----

    def _compute(
        self, batch: TokenBatch, draw_rows: Tensor, num_valid: int | None = None, *, keeps_picks: bool = False
    ) -> Forwarded:  # fmt: skip
        ops, last_tokens = self.model.context.ops, self.slots.state.last_tokens
        batch = replace(batch, token_ids=ops.resolve_tokens(batch.token_ids, batch.slots, last_tokens))
        experts: list[Tensor] = []
        picks: list[Tensor] = []
        tap = None if self.drafting is None else self.drafting.drafter.tap(batch.num_tokens)

        def keep(layer_idx: int, output: BlockOutput) -> None:
            experts.append(output.experts)
            if keeps_picks and output.entries is not None:
                picks.append(output.entries)
            if tap is not None:
                tap(layer_idx, output)

        with padded_from(self.experts, num_valid):
            streams = self.model.forward(batch, self.cache.handle, keep)
            logits = self.model.logits(streams.index_select(0, draw_rows))
            hidden = None if tap is None else tap.hidden
            return Forwarded(logits, streams, tuple(experts), hidden, picks=tuple(picks))

    def _draft(
        self, drafting: Drafting, forwarded: Forwarded, batch: TokenBatch, token_ids: Tensor | None, fed: FedDrafts,
        num_drafts: int,
    ) -> Drafted | None:  # fmt: skip
        drafter, ops, state = drafting.drafter, self.model.context.ops, self.slots.state
        assert forwarded.hidden is not None
        drawn = fed.slots.new_zeros(1) if token_ids is None else token_ids  # padding looks at the first
        ends = extend(drafter, ops, state, batch, forwarded.hidden, drawn, fed)
        assert self.draft_table is not None
        return propose(drafter, ops, state, ends, num_drafts, self.draft_table) if num_drafts else None

    def _score(self, forwarded: Forwarded, rows: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, ...]:
        logits = self.model.logits(forwarded.streams.index_select(0, rows))
        return self.model.context.ops.sampled_logprobs(logits, token_ids, num_top)

    def precompile(self, progress: Progress = lambda what, done, total: None, *, raises: bool = False) -> None:
        """Compile on all cores, into the disk cache, where other processes find it too. A help, not a condition: what
        fails here fails again where it matters, or did not matter (unless `raises`)."""
        if not self.model.context.backend.has_kernels or not can_compile_in_parallel():
            return
        try:
            precompile(
                self.model, self.cache, self._direct_sizes(), self.experts, partial(progress, "compiling"),
                max_draws=self.max_draws, drafting=self.drafting,
            )  # fmt: skip
        except Exception as error:
            if raises:
                raise
            _LOG.warning("kernels are compiled one by one: %s: %s", type(error).__name__, error)

    def _compile(self, size: int) -> None:
        self._rehearse(size)
        if self.experts is not None and not self.experts.always_fits(self._most_rows(size)):
            self.experts.stages_always = True
            self._rehearse(size)
            self.experts.stages_always = False

    def _rehearse(self, size: int) -> None:
        """Run all calls of a step of `size` tokens, on padding."""
        _, batch = padding_batch(size, self.cache.block_table)
        made = self._compute(batch, self._padding_rows(size), num_valid=0)
        rehearse(self.model.context.ops, made.logits, self.slots.state)
        for num_rows in SCORED_ROWS:
            scored = torch.zeros(num_rows, dtype=torch.int64, device=self.cache.device)
            for num_top in (0, *NUM_TOP):
                self._score(made, scored, scored, min(num_top, self.model.config.vocab_size))
        if self.drafting is not None:
            assert made.hidden is not None and self.draft_table is not None
            with padded_from(self.experts, 0):
                ops, state = self.model.context.ops, self.slots.state
                rehearse_drafts(self.drafting, ops, state, self.draft_table, batch, made.hidden, made.logits)

    def _most_rows(self, size: int) -> int:
        """Rows of the largest call of a step of `size` tokens."""
        each = 0 if self.drafting is None else self.drafting.drafter.rows_per_request
        return max(size, min(size, self.cache.schema.num_slots) * each)

    # ---- graphs ----

    def _bucket_for(self, batch: TokenBatch, draw_rows: Tensor) -> int | None:
        """The smallest captured bucket that holds the call, if there is one."""
        if batch.block_table.data_ptr() != self.cache.block_table.data_ptr():
            return None  # a graph reads the manager's own table
        return self._bucket_of(max(batch.num_tokens, draw_rows.shape[0]))

    def _bucket_of(self, needed: int) -> int | None:
        own = next((bucket for bucket in self.buckets if bucket >= needed), None)
        if own is not None and own not in self._graphs:
            self._missed = own
        return next((bucket for bucket in self.buckets if bucket >= needed and bucket in self._graphs), None)

    def _can_capture(self, bucket: int) -> bool:
        return self.experts is None or self.experts.always_fits(self._most_rows(bucket))

    def _direct_sizes(self) -> list[int]:
        largest = self.cache.limits.chunk_tokens
        sizes = {1, 2, largest, *self.buckets}
        for bit in range(1, largest.bit_length()):
            sizes |= {1 << bit, (1 << bit) + 1, 3 << (bit - 1)}
        return sorted(size for size in sizes if size <= max(largest, *self.buckets, 1))

    def _padding_rows(self, size: int) -> Tensor:
        return torch.zeros(min(size, self.max_draws), dtype=torch.int64, device=self.cache.device)

    @torch.no_grad()
    def _make_graph(self, bucket: int) -> BucketGraph:
        graph = BucketGraph(
            bucket, self.cache.block_table, self.slots.state, self.model.context.ops, self.experts, self.drafting,
            self.draft_table,
        )  # fmt: skip
        graph.capture(self._compute, self._capture)
        return graph

    def _capture_cuda(self, call: Callable[[], Result]) -> Replay[Result]:
        if self._pool is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        return capture_graph(call, self._pool, self.experts, self._stream)
