"""A model's kernels compiled on all cores, before it first runs.

A forward call on "meta" tensors launches what a real one would; each launch only compiles (ops/compile_only.py).
The stand-ins have the shapes, strides, dtypes and alignment of the real weights and cache, so that the kernels have the
keys of the real ones and the first real call finds them. No weight and no row of the cache is touched, and no memory of
the GPU is taken.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsv4.cache.batch import COLUMNS, TokenBatch, aligned
from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.manager import KVCacheManager
from dsv4.config.layers import LayerSpec
from dsv4.dist.exchange import StandInExchange
from dsv4.engine.draft.round import FedDrafts, extend, make_drafter, make_table, propose
from dsv4.engine.offload.pool import ExpertPool, LayerExperts
from dsv4.engine.run.bucket import Drafting, padding_rows
from dsv4.engine.step.sampler import NUM_TOP, SCORED_ROWS
from dsv4.formats.trees import map_tensors, tensors_of
from dsv4.model.block import BlockOutput
from dsv4.model.branches import Branches
from dsv4.model.drafter import Drafter
from dsv4.model.parameters import BlockParams, ExpertParams, ModelParams
from dsv4.model.transformer import Transformer
from dsv4.ops import OpSet
from dsv4.ops.compile_only import compiled_in_parallel, launches_only_compile
from dsv4.ops.sampling import SamplingRows, SamplingState

META = torch.device("meta")
ALIGNMENT = 16  # bytes; a pointer that has it is compiled for apart


@dataclass(frozen=True)
class StandIn:
    """A model and its cache on "meta", with one layer of each kind, and with its drafter, if it is to draft."""

    model: Transformer
    handles: tuple[LayerCacheHandle, ...]
    block_table: Tensor
    state: SamplingState
    drafting: Drafting | None = None

    @torch.no_grad()
    def launch(self, size: int, num_rows: int) -> None:
        """What a step of `size` tokens launches that draws from `num_rows` rows, scores prompts, and drafts."""
        ops = self.model.context.ops
        columns = torch.empty((len(COLUMNS), aligned(size)), dtype=torch.int64, device=META)  # as `columns_of` makes
        batch = TokenBatch.over(columns, self.block_table, size)
        token_ids = ops.resolve_tokens(batch.token_ids, batch.slots, self.state.last_tokens)
        batch = replace(batch, token_ids=token_ids)
        outputs: list[BlockOutput] = []
        streams = self.model.forward(batch, self.handles.__getitem__, lambda _, output: outputs.append(output))
        for count in (*SCORED_ROWS, num_rows):
            logits = self.model.logits(streams.index_select(0, torch.empty(count, dtype=torch.int64, device=META)))
            rehearse(ops, logits, self.state)
        if self.drafting is not None:
            tap = self.drafting.drafter.tap(size)
            for layer_idx in range(self.model.config.num_hidden_layers):
                tap(layer_idx, outputs[-1])
            table = make_table(len(self.state.flags), self.drafting.max_drafts, META)
            rehearse_drafts(self.drafting, ops, self.state, table, batch, tap.hidden, logits)


def rehearse(ops: OpSet, logits: Tensor, state: SamplingState) -> None:
    """Draw from every row, as padding, and ask for log-probabilities: a request has nothing of it left to compile."""
    num_rows, vocab_size = logits.shape
    slots = torch.full((num_rows,), -1, dtype=torch.int64, device=logits.device)
    token_ids = ops.sample(logits, SamplingRows(slots, torch.zeros_like(slots)), state)
    for num_top in (0, *NUM_TOP):
        ops.sampled_logprobs(logits, token_ids, min(num_top, vocab_size))


def rehearse_drafts(
    drafting: Drafting, ops: OpSet, state: SamplingState, table: Tensor, batch: TokenBatch, hidden: Tensor,
    logits: Tensor,
) -> None:  # fmt: skip
    """The drafter's calls behind a step that drew from `logits`, for requests that are not there."""
    device, num_requests = logits.device, min(batch.num_tokens, len(state.flags))
    fed = FedDrafts.padding(batch.num_tokens, num_requests, drafting.max_drafts, device)
    rows = padding_rows(logits.shape[0], logits.shape[1], device, drafting.max_drafts)
    token_ids = ops.sample(logits, rows, state)
    for num_drafts in drafting.choices:
        ends = extend(drafting.drafter, ops, state, batch, hidden, token_ids, fed)
        propose(drafting.drafter, ops, state, ends, num_drafts, table)


def precompile(
    model: Transformer, cache: KVCacheManager, sizes: Sequence[int], experts: ExpertPool | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None, max_draws: int | None = None,
    drafting: Drafting | None = None,
) -> None:  # fmt: skip
    """Compile what steps of these numbers of tokens launch, for the current GPU; `progress` hears how many kernels are
    compiled, of how many. Logits are those of as many rows as there are tokens, at most `max_draws`, which is one for
    each request by default."""
    resident = stand_in(model, cache, experts, drafting=drafting)
    # a call whose experts may not fit the slots finds all of them in a staging stack
    staged = None
    if experts is not None:
        staged = stand_in(model, cache, experts, num_stacked=experts.num_experts, drafting=drafting)
    with launches_only_compile(), compiled_in_parallel(progress):
        for size in sorted(sizes, reverse=True):  # the kernels of many rows take longest
            num_rows = min(size, max_draws or cache.schema.num_slots)
            resident.launch(size, num_rows)
            if staged is not None and experts is not None and not experts.always_fits(size):
                staged.launch(size, num_rows)


def stand_in(
    model: Transformer, cache: KVCacheManager, experts: ExpertPool | None = None, num_stacked: int | None = None,
    drafting: Drafting | None = None,
) -> StandIn:  # fmt: skip
    """The layers that no other before them equals in all that decides a launch, and the last one: it alone has none
    behind it. Offloaded experts become the stack of their slots, or one of `num_stacked` experts: the host reads no
    routing."""
    kept: list[int] = []
    blocks: list[BlockParams] = []
    handles: list[LayerCacheHandle] = []
    seen = set()
    for layer_idx, block in enumerate(model.weights.layers):
        layer = model.schedule[layer_idx]
        block = on_meta(_with_stack(block, num_stacked))
        handle = on_meta(cache.handle(layer_idx))
        kind = (layer.attention, layer.router, *map(_facts, tensors_of((block, handle))))
        if kind not in seen or layer_idx == len(model.weights.layers) - 1:
            seen.add(kind)
            kept.append(layer_idx)
            blocks.append(block)
            handles.append(handle)
    params, context = model.weights, model.context
    copied = copy.copy(model)
    copied.weights = on_meta(_with_drafter(replace(params, layers=blocks), drafting is not None, num_stacked))
    copied.schedule = tuple(model.schedule[layer_idx] for layer_idx in kept)
    copied.context = replace(
        context,
        backend=context.backend if experts is None else experts.inner,
        window_freqs=on_meta(context.window_freqs),
        compressed_freqs=on_meta(context.compressed_freqs),
        branches=Branches(META),
        exchange=None if context.exchange is None else StandInExchange(context.exchange),
    )
    state = SamplingState.empty(cache.schema.num_slots, model.config.vocab_size, META)
    block_table = on_meta(cache.block_table)
    if drafting is not None:
        drafting = replace(drafting, drafter=_drafter(copied, model.schedule, cache, block_table))
    return StandIn(copied, tuple(handles), block_table, state, drafting)


class _StandInCache:
    def __init__(self, cache: KVCacheManager, block_table: Tensor) -> None:
        self._cache, self.block_table = cache, block_table

    def handle(self, layer_idx: int) -> LayerCacheHandle:
        return on_meta(self._cache.handle(layer_idx))


def _drafter(
    copied: Transformer, schedule: tuple[LayerSpec, ...], cache: KVCacheManager, block_table: Tensor
) -> Drafter:
    """Of the stand-in, with a schedule of all layers: draft layers are counted on from the main ones."""
    model = copy.copy(copied)
    model.schedule = schedule
    drafter = make_drafter(model, _StandInCache(cache, block_table))
    assert drafter is not None, "a model that drafts has a drafter"
    return drafter


def on_meta(tree: Any) -> Any:
    """The same structure of "meta" tensors, each as far off a multiple of `ALIGNMENT` as the one it stands for."""
    return map_tensors(tree, _like)


def _like(tensor: Tensor) -> Tensor:
    offset = tensor.data_ptr() % ALIGNMENT // tensor.element_size()
    reach = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    storage = torch.empty(offset + max(reach, 0) + 1, dtype=tensor.dtype, device=META)
    return storage.as_strided(tensor.shape, tensor.stride(), offset)


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def _with_drafter(params: ModelParams, is_drafting: bool, num_stacked: int | None) -> ModelParams:
    """The same with draft blocks as `_with_stack` makes them, or without any."""
    if not is_drafting:
        return replace(params, mtp=[], dspark=None)
    mtp = [replace(draft, block=_with_stack(draft.block, num_stacked)) for draft in params.mtp]
    head = params.dspark
    if head is not None:
        head = replace(head, blocks=[_with_stack(block, num_stacked) for block in head.blocks])
    return replace(params, mtp=mtp, dspark=head)


def _with_stack(block: BlockParams, num_stacked: int | None) -> BlockParams:
    experts: Any = block.ffn.experts
    if not isinstance(experts, LayerExperts):
        return block
    stack = experts.stack
    if num_stacked is not None:
        count = num_stacked
        stack = map_tensors(stack, lambda part: part.new_empty((count, *part.shape[1:]), device=META), (count,))
    return replace(block, ffn=replace(block.ffn, experts=ExpertParams(*stack)))
