"""How an `LLM` comes up: kernels compiled while weights are read, the warm-up, and the runner that results."""

import logging
from dataclasses import replace

import torch

from dsv4.cache.manager import KVCacheManager
from dsv4.config import CPU_CHUNK_TOKENS, EngineConfig, ModelConfig
from dsv4.config.layers import LayerSpec, build_schedule
from dsv4.dist.shares import rank_limits
from dsv4.dist.world import World
from dsv4.engine.draft.counts import FixedDrafts
from dsv4.engine.draft.options import Drafts, make_choice
from dsv4.engine.draft.round import make_drafter
from dsv4.engine.engine import Engine
from dsv4.engine.offload.load import usable_bytes, weight_sizes
from dsv4.engine.offload.placement import reserve_bytes
from dsv4.engine.offload.pool import ExpertPool
from dsv4.engine.run.bucket import Drafting
from dsv4.engine.run.bucket_sizes import step_buckets
from dsv4.engine.run.runner import Runner
from dsv4.engine.run.start import Start, Tell
from dsv4.engine.run.warmup_requests import rehearse_requests
from dsv4.engine.schedule.chunk import pick_chunk
from dsv4.llm_input import naming_what_does_not_fit, planned_cache_bytes
from dsv4.loader.checkpoint import Checkpoint
from dsv4.loader.weights import meta_params
from dsv4.model.parameters import ModelParams
from dsv4.model.prepare import backend_for_weights, prepare_params
from dsv4.model.transformer import Transformer
from dsv4.ops import Backend
from dsv4.ops.compile_only import can_compile_in_parallel
from dsv4.request import RequestError

_FIRST_GRAPHS = 2  # of `EngineConfig.captures_late`: the largest, which serves every step, and that of one request
_LOG = logging.getLogger("dsv4.engine")


def with_chunk(
    limits: EngineConfig, config: ModelConfig, device: torch.device, backend: Backend,
    exact_dtype: torch.dtype | None, checkpoint: Checkpoint | None = None, *, offloads: bool, num_ranks: int = 1,
) -> EngineConfig:  # fmt: skip
    """The limits with a chunk, where they leave it open: on a GPU with all its experts by `pick_chunk`, else a CPU's.
    Without a checkpoint, weights are on the device already. Ranks choose alike: by what their GPUs have, not by what is
    free."""
    if limits.max_chunk_tokens is not None:
        return limits
    if device.type == "cpu" or offloads:
        return replace(limits, max_chunk_tokens=CPU_CHUNK_TOKENS)
    share = rank_limits(limits, num_ranks)
    usable = usable_bytes(device) if num_ranks == 1 else torch.cuda.get_device_properties(device).total_memory
    weights = 0 if checkpoint is None else weight_sizes(checkpoint, config, exact_dtype, num_ranks).total

    def reserve(chunk: int) -> int:
        return reserve_bytes(config, replace(share, max_chunk_tokens=chunk), num_ranks)

    cache_bytes = planned_cache_bytes(config, share, exact_dtype)
    chunk, why = pick_chunk(reserve, cache_bytes, usable - weights, has_kernels=backend.has_kernels)
    _LOG.info("chunks of %d tokens: %s", chunk, why)
    return replace(limits, max_chunk_tokens=chunk)


def cache_schedule(config: ModelConfig, params: ModelParams, limits: EngineConfig) -> tuple[LayerSpec, ...]:
    """With the draft blocks' rings only where the engine drafts, as the plan counts them."""
    return build_schedule(config, with_mtp=bool(params.draft_blocks) and limits.max_draft_tokens > 0)


def make_runner(
    model: Transformer, cache: KVCacheManager, limits: EngineConfig, drafts: Drafts, *, use_graphs: bool,
    experts: ExpertPool | None = None,
) -> tuple[Runner, FixedDrafts | None]:  # fmt: skip
    """The runner of a model, not warmed up, and who chooses its drafts."""
    config, params = model.config, model.weights
    if isinstance(drafts, int) and not params.draft_blocks:
        raise RequestError(f"drafts is {drafts}, but this checkpoint has no drafter (no mtp.* tensors)")
    choice, drafting = make_choice(config, drafts if params.draft_blocks else "off"), None
    if choice is not None:
        drafter = make_drafter(model, cache)
        assert drafter is not None
        drafting = Drafting(drafter, choice.max_drafts, choice.choices)
    buckets = step_buckets(limits, 0 if choice is None else choice.max_drafts)
    runner = Runner(model, cache, buckets=buckets, use_graphs=use_graphs, experts=experts, drafting=drafting)
    return runner, choice


def compile_ahead(
    start: Start, checkpoint: Checkpoint, config: ModelConfig, limits: EngineConfig, backend: Backend, drafts: Drafts,
    dtype: torch.dtype, exact_dtype: torch.dtype | None, device: torch.device,
) -> None:  # fmt: skip
    """Begin to compile what a model will launch, from the shapes in its headers alone."""
    if not (backend.can_capture(device) and can_compile_in_parallel()):
        return

    def compile_all(tell: Tell) -> None:
        if device.index is not None:
            torch.cuda.set_device(device)  # a thread begins with the first
        runner = stand_in_runner(checkpoint, config, limits, backend, drafts, dtype, exact_dtype)
        runner.precompile(tell, raises=True)

    start.beside("compile", compile_all)


@torch.no_grad()
def stand_in_runner(
    checkpoint: Checkpoint, config: ModelConfig, limits: EngineConfig, backend: Backend, drafts: Drafts,
    dtype: torch.dtype, exact_dtype: torch.dtype | None = None,
) -> Runner:  # fmt: skip
    """That of the same model and cache on "meta"."""
    params = prepare_params(meta_params(checkpoint, config, dequantize_to=exact_dtype), backend)
    backend = backend_for_weights(backend, params, has_drafts=limits.max_draft_tokens > 0)
    model = Transformer(config, params, dtype, backend=backend)
    cache = KVCacheManager(
        config, cache_schedule(config, params, limits), replace(limits, cache_dir=None, cache_host_bytes=0),
        device="meta", plain_dtype=exact_dtype,
    )  # fmt: skip
    return make_runner(model, cache, limits, drafts, use_graphs=False)[0]


def warm_up(
    start: Start, runner: Runner, choice: FixedDrafts | None, limits: EngineConfig, world: World | None = None
) -> None:  # fmt: skip
    """Compile what is left, run every size once, capture graphs, and let requests of every kind run."""
    with start.phase("compile") as tell:
        if world is not None:
            with world.one_first() as is_first:
                if is_first:
                    runner.precompile(tell)
            if not is_first:
                runner.precompile(tell)  # finds the kernels on disk
        elif not start.join(tell):
            runner.precompile(tell)
    is_late = limits.captures_late and world is None  # ranks capture a call together
    with naming_what_does_not_fit("largest forward call", limits, "limits" if runner.experts is None else "fewer"):
        with start.phase("warm-up") as tell:
            runner.warm_up(tell, is_compiled=True, num_graphs=0)
        with start.phase("capture") as tell:
            runner.capture_graphs(tell, _FIRST_GRAPHS if is_late else None)
        with start.phase("first requests"):
            # an engine of its own: nothing of it is counted
            uncounted = None if choice is None else FixedDrafts(choice.max_drafts)
            rehearse_requests(
                Engine(runner.model, runner.cache, runner=runner, experts=runner.experts, drafts=uncounted)
            )
    _LOG.info("%d of %d graphs captured", len(runner.captured), len(runner.captured) + len(runner.missing))
