"""What fits on which GPU, before anything is loaded: searches over `Budget`. No torch, no GPU, no weights.

Several GPUs: routed experts are divided by number, everything else is on each GPU, and requests are divided among them.
"""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from dsv4.cache.schema import CacheSchema, blocks_for_tokens
from dsv4.config import BLOCK_TOKENS, CPU_CHUNK_TOKENS, ConfigError, EngineConfig, ModelConfig
from dsv4.dist.shares import check_ranks, rank_limits
from dsv4.engine.offload.placement import divide_slots
from dsv4.loader.write.config_file import ExpertFormat
from dsv4.tools.plan.budget import Budget, MemoryBudget, WeightBytes, largest
from dsv4.tools.plan.sizes import WeightSizes, count_weights
from dsv4.tools.plan.targets import GIB, Gpu, known_gpus, parse_gpu

# measured on an H200 (docs/kernels): what a layer's launches take beyond the bytes they read, at one token, and how
# long a layer with offloaded experts waits while the host reads its routing and orders copies
LAUNCH_SECONDS = 95e-6
BOUNDARY_SECONDS = 130e-6
HOST_BYTES_PER_SECOND = 50e9  # pinned host memory to the device: PCIe 5.0 x16 less its overhead
READ_BYTES_PER_SECOND = {"h200": 4.63e12}  # measured, docs/kernels/README.md
CONTEXTS = (8192, 32768, 131072, 524288, 1048576)
MAX_GPUS_TRIED = 64
GPU_COUNTS = (2, 4, 8)  # of the capacities


@dataclass(frozen=True)
class OffloadForecast:
    """Decode of one request with offloaded experts, every expert used alike, on one GPU whose spare memory is filled.

    num_slots of the experts of each layer are on the device, `num_fixed` of them for good (their host copy is not
    kept). tokens_per_second adds up copies from the host at `host_speed`, reads of the device's memory where its speed
    is known (`read_speed`), and for each layer `LAUNCH_SECONDS` and `BOUNDARY_SECONDS`; copies do not overlap with
    computing.
    """

    num_slots: int
    num_fixed: int
    bytes_per_token: int
    host_bytes: int
    host_speed: float
    read_speed: float | None
    tokens_per_second: float


@dataclass(frozen=True)
class GpuFit:
    """What `gpus` GPUs of one kind can hold. `max_requests` is at each context; 0 where not even one request fits."""

    gpu: Gpu
    gpus: int
    fits: bool
    spare_bytes: int
    min_gpus: int | None
    max_requests: tuple[tuple[int, int], ...]
    max_context_tokens: int


@dataclass(frozen=True)
class Capacity:
    """Tokens of KV cache over all GPUs, without what a request takes besides; 0 where the weights leave no room.

    dsv4 runs data-parallel attention beside expert parallelism: every GPU has all weights but the experts of others,
    and the cache of its own requests. Tensor parallelism divides all weights; but a layer has one K=V row a token for
    all heads, so every GPU of the group keeps the rows of all requests.
    """

    gpus: int
    tokens: int
    tensor_parallel_tokens: int


@dataclass(frozen=True)
class Plan:
    """The answer. Per-GPU figures are in `budget`; `fits` has the chosen GPU first, or every known one."""

    name: str
    config: ModelConfig
    engine: EngineConfig
    experts: ExpertFormat
    gpus: int
    offload_experts: bool
    weights: WeightSizes
    schema: CacheSchema
    budget: MemoryBudget
    fits: tuple[GpuFit, ...]
    summary: str
    forecast: OffloadForecast | None = None
    capacities: tuple[Capacity, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`; sizes are bytes."""
        weights, budget = self.weights, self.budget
        kv = {name: getattr(self.schema, name) for name in _KV}
        return {
            "model": self.name,
            "engine": {name: getattr(self.engine, name) for name in _ENGINE},
            "weights": {
                "experts": self.experts,
                **{name: getattr(weights, name) for name in _WEIGHTS},
                "bytes_by_part": weights.by_part(),
                "bytes_by_format": weights.by_format(),
            },
            # a token's bytes are a multiple of 1/128: exact
            "kv": {"bytes_per_token": float(self.schema.bytes_per_token), "block_tokens": BLOCK_TOKENS, **kv},
            "gpu": {
                "gpus": self.gpus,
                "offload_experts": self.offload_experts,
                **{f"{name}_bytes": getattr(budget, attribute) for name, attribute in _BUDGET.items()},
            },
            "fits": [_fit_to_dict(fit) for fit in self.fits],
            "capacities": [asdict(one) for one in self.capacities],
            "summary": self.summary,
        } | ({} if self.forecast is None else {"offload": asdict(self.forecast)})


# what `to_dict` says of each part
_ENGINE = (
    "max_context_tokens", "max_concurrent_requests", "max_chunk_tokens", "max_draft_tokens", "index_key_format",
)  # fmt: skip
_WEIGHTS = ("total_bytes", "num_tensors", "num_parameters", "num_draft_parameters")
_KV = (
    "bytes_per_block", "window_bytes_per_request", "position_bytes_per_request", "state_bytes_per_request",
    "num_blocks", "paged_bytes", "state_cache_bytes", "bytes_per_snapshot", "num_snapshots", "snapshot_cache_bytes",
    "table_bytes", "padding_bytes", "total_bytes",
)  # fmt: skip
_BUDGET = {name: name for name in ("weights", "cache", "workspace", "exchange", "context", "total", "host")}
_BUDGET["graph"] = "graphs"


def plan(
    config: ModelConfig,
    engine: EngineConfig,
    *,
    name: str = "model",
    experts: ExpertFormat = "mxfp4",
    gpu: str | None = None,
    gpus: int = 1,
    offload_experts: bool = False,
    with_draft: bool = True,
    host_speed: float = HOST_BYTES_PER_SECOND,
) -> Plan:
    """Plan `engine`'s workload for the whole of `gpus` GPUs of the kind `gpu` (None: every known kind).

    `host_speed`: bytes a second from pinned host memory to the device, for the forecast of offloaded experts.

    A chunk that `engine` leaves open is the one that `LLM` would choose on that GPU, an H200 where none is named.

    `with_draft` counts the weights of the draft blocks; their cache is counted when `engine.max_draft_tokens` > 0.
    """
    rank_limits(engine, check_ranks(gpus, config.n_routed_experts))
    if engine.max_draft_tokens and not (with_draft and config.num_draft_layers):
        raise ConfigError(f"max_draft_tokens {engine.max_draft_tokens} needs draft blocks, and they are not loaded")
    kinds = known_gpus() if gpu is None else (parse_gpu(gpu),)
    sizes = count_weights(config, experts, with_draft=with_draft)
    weights = WeightBytes.counted(sizes, config, with_draft=with_draft)
    place = next((place for place, kind in enumerate(kinds) if kind.name == "h200"), 0)
    if engine.max_chunk_tokens is None:
        budget = Budget(config, weights, gpus)
        chunk = CPU_CHUNK_TOKENS if offload_experts else budget.pick_chunk(engine, kinds[place].usable_bytes)[0]
        engine = replace(engine, max_chunk_tokens=chunk)
    planner = _Planner(config, engine, weights, offload_experts)
    fits = tuple(planner.fit(kind, gpus) for kind in kinds)
    requested = fits[place]
    needed = planner.budget(engine, gpus)
    is_forecast = offload_experts and requested.fits and gpus == 1
    return Plan(
        name=name, config=config, engine=engine, experts=experts, gpus=gpus, offload_experts=offload_experts,
        weights=sizes, schema=planner.of(1).schema(engine), budget=needed, fits=fits,
        summary=planner.advise(requested, needed),
        forecast=planner.forecast(requested, sizes, host_speed) if is_forecast else None,
        capacities=() if gpu is None else planner.capacities(requested.gpu),
    )  # fmt: skip


class _Planner:
    """One model in one format; answers what workloads cost and which fit."""

    def __init__(self, config: ModelConfig, engine: EngineConfig, weights: WeightBytes, offload_experts: bool) -> None:
        self.config = config
        self.engine = engine
        self.weights = weights
        self.offload_experts = offload_experts
        self._budgets: dict[int, Budget] = {}

    def of(self, gpus: int) -> Budget:
        return self._budgets.setdefault(gpus, Budget(self.config, self.weights, gpus))

    def budget(self, engine: EngineConfig, gpus: int, offload_experts: bool | None = None) -> MemoryBudget:
        """One GPU's share of the workload `engine`. Of offloaded experts it holds at least those that one token
        chooses."""
        everything = self.of(gpus).parts(engine)
        if not (self.offload_experts if offload_experts is None else offload_experts):
            return everything
        least = self.of(gpus).weight_bytes(self.config.num_experts_per_tok)
        return replace(everything, weights=min(everything.weights, least), host=self.weights.routed)

    def fit(self, gpu: Gpu, gpus: int) -> GpuFit:
        engine = self.engine
        budget = self.budget(engine, gpus)
        contexts = sorted(
            {c for c in CONTEXTS if c <= self.config.max_position_embeddings} | {engine.max_context_tokens}
        )
        return GpuFit(
            gpu=gpu,
            gpus=gpus,
            fits=budget.total <= gpu.usable_bytes,
            spare_bytes=gpu.usable_bytes - budget.total,
            min_gpus=self.min_gpus(gpu),
            max_requests=tuple((context, self.max_requests(gpu, gpus, context)) for context in contexts),
            max_context_tokens=self.max_context(gpu, gpus),
        )

    def max_requests(self, gpu: Gpu, gpus: int, context: int) -> int:
        """Most requests of `context` tokens at once, over all GPUs."""

        def fits(per_gpu: int) -> bool:
            engine = replace(
                self.engine, max_context_tokens=context, max_concurrent_requests=per_gpu * gpus, num_blocks=None
            )
            return self.budget(engine, gpus).total <= gpu.usable_bytes

        one = self.of(1).schema(
            replace(self.engine, max_context_tokens=context, max_concurrent_requests=1, num_blocks=None)
        )
        per_request = one.total_bytes - one.padding_bytes - one.snapshot_cache_bytes
        return gpus * largest(fits, gpu.usable_bytes // per_request)

    def max_context(self, gpu: Gpu, gpus: int) -> int:
        """Longest context for `max_concurrent_requests` requests at once: whole blocks, or the model's own limit."""
        limit = self.config.max_position_embeddings

        def fits(num_blocks: int) -> bool:
            context = min(num_blocks * BLOCK_TOKENS, limit)
            engine = replace(self.engine, max_context_tokens=context, num_blocks=None)
            return self.budget(engine, gpus).total <= gpu.usable_bytes

        return min(largest(fits, blocks_for_tokens(limit)) * BLOCK_TOKENS, limit)

    def capacities(self, gpu: Gpu) -> tuple[Capacity, ...]:
        """Tokens of cache on several GPUs of this kind, with all experts on them. A tensor-parallel GPU is taken to
        need as much besides weights."""
        per_token, found = self.of(1).schema(self.engine).bytes_per_token, []
        counts = [gpus for gpus in GPU_COUNTS if gpus <= self.config.n_routed_experts]
        for gpus in counts if per_token else ():  # a model of windows alone keeps nothing of old tokens
            budget = self.budget(self.engine, gpus, offload_experts=False)
            room = gpu.usable_bytes - budget.reserve
            tokens = max(0, int((room - budget.weights) / per_token))
            found.append(Capacity(gpus, gpus * tokens, max(0, int((room - self.weights.total // gpus) / per_token))))
        return tuple(found)

    def min_gpus(self, gpu: Gpu) -> int | None:
        """Fewest GPUs of this kind that hold the workload; None if `MAX_GPUS_TRIED` do not."""
        for gpus in range(1, min(MAX_GPUS_TRIED, self.config.n_routed_experts) + 1):
            if self.budget(self.engine, gpus).total <= gpu.usable_bytes:
                return gpus
        return None

    def forecast(self, fit: GpuFit, sizes: WeightSizes, host_speed: float) -> OffloadForecast:
        """What the spare memory of one GPU makes of offloaded experts."""
        if not host_speed > 0:
            raise ConfigError(f"host_speed must be a positive number of bytes a second, found {host_speed!r}")
        config, num_experts = self.config, self.config.n_routed_experts
        one_of_each = self.weights.slot(num_experts)
        expert_bytes = one_of_each // self.weights.num_moe_blocks
        least = config.num_experts_per_tok * one_of_each
        num_slots = self.weights.slots_in(fit.spare_bytes + least, num_experts)
        num_fixed = divide_slots(num_slots, config, self.engine).num_fixed
        uses = config.num_hidden_layers * config.num_experts_per_tok
        moved = round(uses * (1 - num_slots / num_experts) * expert_bytes)
        resident = sum(
            t.num_bytes for t in sizes.tensors if not t.is_draft and t.part not in ("routed experts", "embedding")
        )
        read_speed = READ_BYTES_PER_SECOND.get(fit.gpu.name)
        seconds = moved / host_speed + config.num_hidden_layers * (LAUNCH_SECONDS + BOUNDARY_SECONDS)
        if read_speed is not None:
            seconds += (resident + uses * expert_bytes) / read_speed
        return OffloadForecast(
            num_slots=num_slots,
            num_fixed=num_fixed,
            bytes_per_token=moved,
            host_bytes=(num_experts - num_fixed) * one_of_each,
            host_speed=host_speed,
            read_speed=read_speed,
            tokens_per_second=1 / seconds,
        )

    def advise(self, fit: GpuFit, budget: MemoryBudget) -> str:
        """One line: what limits, and what would help."""
        engine, where = self.engine, f"{fit.gpus} x {fit.gpu.name}"
        max_requests = dict(fit.max_requests)[engine.max_context_tokens]
        own_limit = " (the model's own limit)" if fit.max_context_tokens == self.config.max_position_embeddings else ""
        capacity = (
            f"{max_requests} requests of {engine.max_context_tokens} tokens fit, "
            f"or {fit.max_context_tokens} tokens{own_limit} for {engine.max_concurrent_requests} requests"
        )
        if fit.fits:
            return f"Fits on {where} with {_gib(fit.spare_bytes)} to spare; the KV cache limits: {capacity}."
        more = [] if fit.min_gpus is None else [f"--gpus {fit.min_gpus}"]
        without_cache = budget.weights + budget.reserve
        if without_cache > fit.gpu.usable_bytes:
            offloaded = self.budget(engine, fit.gpus, offload_experts=True)
            if fit.gpus == 1 and not self.offload_experts and offloaded.total <= fit.gpu.usable_bytes:
                more.append(f"--offload-experts ({_gib(offloaded.host)} of host memory)")
            problem = f"weights and reserves limit: {_gib(without_cache)} a GPU, {_gib(fit.gpu.usable_bytes)} usable"
        else:
            free = fit.gpu.usable_bytes - without_cache
            problem = f"the KV cache limits: {_gib(budget.cache)} a GPU, {_gib(free)} free; {capacity}"
        advice = f"what helps: {' or '.join(more)}" if more else "a larger GPU or smaller experts would help"
        return f"Does not fit on {where}: {problem}; {advice}."


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def _fit_to_dict(fit: GpuFit) -> dict[str, Any]:
    counts = {str(context): requests for context, requests in fit.max_requests}
    found = {field.name: getattr(fit, field.name) for field in fields(fit)}
    return found | {"gpu": fit.gpu.name, "usable_bytes": fit.gpu.usable_bytes, "max_requests": counts}
