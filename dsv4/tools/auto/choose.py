"""`choose`: the settings of a server, from what was asked for, what the model needs and what the machine has. No torch.

Explicit options are taken as they are; every other one is chosen so that it fits beside them. Nothing is measured while
choosing, so that the same machine chooses the same, on every rank, before the weights are read.
"""

from dataclasses import replace
from pathlib import Path

from dsv4.cache.schema import blocks_for_tokens
from dsv4.config import BLOCK_TOKENS, CPU_CHUNK_TOKENS, ConfigError, EngineConfig, ModelConfig
from dsv4.engine.draft.options import Drafts, draft_limits, why_off
from dsv4.engine.offload.placement import OffloadError, exchange_bytes, place_experts
from dsv4.engine.schedule.chunk import SHORT_CHUNK
from dsv4.errors import Dsv4Error
from dsv4.loader.files import find_tensors
from dsv4.tools.auto.machine import Machine
from dsv4.tools.auto.nearest import nearest
from dsv4.tools.auto.place import Place, choose_place
from dsv4.tools.auto.settings import GIVEN, Choice, DoesNotFit, Settings, Wishes, size
from dsv4.tools.memory_check import ITEM_BYTES
from dsv4.tools.plan.budget import Budget, WeightBytes, largest

TYPICAL_TOKENS = 8192  # of a request: a chat, or an agent's turn
MOST_REQUESTS = 512  # of one GPU: a step of half as many takes 50 ms already (docs/decisions/choices.md)
# without a GPU, or with experts in host memory
HOST_REQUESTS, HOST_CONTEXT, LEAST_HOST_CONTEXT = 8, 16384, 2048


def choose(config: ModelConfig, weights: WeightBytes, wishes: Wishes, machine: Machine) -> Settings:
    """`DoesNotFit` where an option, or the model, does not fit; `ConfigError` for what cannot be."""
    try:
        return _settings(config, weights, wishes, machine)
    except _NoRoom as problem:
        found = nearest(wishes, config, machine, lambda others, where: _fits(config, weights, others, where))
        raise DoesNotFit(f"{problem}. {found}") from None


def choose_for(folder: Path, config: ModelConfig, wishes: Wishes, machine: Machine, dtype: str | None) -> Settings:
    """`choose`, for the weights of a folder: reads their headers."""
    itemsize = ITEM_BYTES[dtype or "float32"] if wishes.numerics == "exact" else None
    return choose(config, WeightBytes.of(find_tensors(folder).values(), config, itemsize), wishes, machine)


def _settings(config: ModelConfig, weights: WeightBytes, wishes: Wishes, machine: Machine) -> Settings:
    place = choose_place(config, weights, wishes, machine)
    budget = Budget(config, weights, place.gpus, has_reserves=place.has_gpu)
    drafts, why_drafts = _choose_drafts(config, weights, wishes, place)
    return _Chooser(config, wishes, machine, place, budget, drafts, why_drafts).settings()


def _fits(config: ModelConfig, weights: WeightBytes, wishes: Wishes, machine: Machine) -> bool:
    try:
        _settings(config, weights, wishes, machine)
    except (_NoRoom, ConfigError):
        return False
    return True


class _NoRoom(Dsv4Error, ValueError):
    """These wishes do not fit; the text says what they take."""


def _choose_drafts(
    config: ModelConfig, weights: WeightBytes, wishes: Wishes, place: Place
) -> tuple[Drafts, str]:  # fmt: skip
    obstacle = why_off(config, numerics=wishes.numerics)
    if obstacle is None and not weights.has_drafter:
        obstacle = "this checkpoint has no drafter"
    if wishes.drafts == "auto" and obstacle is not None:
        return "off", obstacle
    if wishes.drafts is not None:
        return wishes.drafts, GIVEN
    if obstacle is not None:
        return "off", obstacle
    if not place.has_gpu:
        return "off", "on a CPU they can cost time"
    if config.dspark is None:  # docs/drafts.md: 2.6 % of a step of 64 requests that drafts nothing; a DSpark head 0.4 %
        return "off", "an MTP block costs 3 % where many requests run; auto pays with few"
    return "auto", "where measured times say that they pay"


# ---- how much ----


class _Chooser:
    """Limits that fit one place."""

    def __init__(
        self, config: ModelConfig, wishes: Wishes, machine: Machine, place: Place, budget: Budget, drafts: Drafts,
        why_drafts: str,
    ) -> None:  # fmt: skip
        self.config = config
        self.wishes = wishes
        self.machine = machine
        self.place = place
        self.budget = budget
        self.drafts = drafts
        self.why_drafts = why_drafts
        self.why: dict[str, str] = {}

    def settings(self) -> Settings:
        wishes = self.wishes
        offload = wishes.offload_experts if wishes.offload_experts != "off" else None
        if not self.place.has_gpu:
            return self._done(self._modest(), offload, GIVEN if offload is not None else "")
        if offload is None:
            limits = self._filled()
            if limits is not None:
                return self._done(limits, None, "they fit")
            if wishes.offload_experts == "off" or not self._can_offload(self._smallest()):
                raise self._no_room(self._smallest())
        return self._offloaded(offload)

    # ---- a cache that fills the device ----

    def _base(self, requests: int, context: int, chunk: int) -> EngineConfig:
        limits = replace(
            self.wishes.limits, max_concurrent_requests=requests, max_context_tokens=context, max_chunk_tokens=chunk
        )
        return draft_limits(limits, self.config, self.drafts)

    def _filled(self) -> EngineConfig | None:
        """Limits that use the whole device; None where the smallest that could be chosen do not fit."""
        usable, wishes, smallest = self._usable, self.wishes, self._smallest()
        if self.budget.total(self.budget.least(smallest)) > usable:
            return None
        chunk = wishes.chunk or self._chunk(self.budget.least(smallest))
        context = wishes.context or self._context(chunk)
        requests = wishes.requests or self._requests(context, chunk)
        return self.budget.filled(self._base(requests, context, chunk), usable)

    @property
    def _usable(self) -> int:
        assert self.place.usable is not None
        return self.place.usable

    @property
    def _least_context(self) -> int:
        return min(TYPICAL_TOKENS, self.config.max_position_embeddings)

    def _fits(self, limits: EngineConfig, share: float = 1.0) -> bool:
        """Whether the least cache takes at most that share of what is left beside weights and reserves."""
        room = self._usable - self.budget.weight_bytes() - self.budget.reserve_bytes(limits)
        return self.budget.cache_bytes(self.budget.least(limits)) <= share * room

    def _chunk(self, least: EngineConfig) -> int:
        has_kernels = self.wishes.numerics == "official"
        chunk, self.why["chunk"] = self.budget.pick_chunk(least, self._usable, has_kernels=has_kernels)
        return chunk

    def _context(self, chunk: int) -> int:
        """The model's own, if one request of it takes at most half of the cache; else the most that does."""
        own = self.config.max_position_embeddings
        requests = self.wishes.requests or self.place.gpus

        def fits(num_blocks: int) -> bool:
            return self._fits(self._base(requests, min(num_blocks * BLOCK_TOKENS, own), chunk), 0.5)

        found = min(largest(fits, blocks_for_tokens(own)) * BLOCK_TOKENS, own)
        self.why["context"] = "the model's own" if found == own else "half of the cache for one request"
        return max(found, self._least_context)

    def _requests(self, context: int, chunk: int) -> int:
        """As many as have room for `TYPICAL_TOKENS` each, on each GPU."""
        ranks, each = self.place.gpus, blocks_for_tokens(min(context, TYPICAL_TOKENS))
        share = 1 - self.budget.snapshot_share(self._base(ranks, context, chunk))

        def fits(per_rank: int) -> bool:
            limits = self.budget.least(self._base(per_rank * ranks, context, chunk))
            limits = replace(limits, num_blocks=max(limits.num_blocks or 0, per_rank * each))
            room = self._usable - self.budget.weight_bytes() - self.budget.reserve_bytes(limits)
            return self.budget.cache_bytes(limits) <= share * room

        per_rank = max(1, largest(fits, MOST_REQUESTS))
        is_most = per_rank == MOST_REQUESTS
        typical = f"room for {min(context, TYPICAL_TOKENS):,} tokens each"
        self.why["requests"] = "the most that are worth a step" if is_most else typical
        return per_rank * ranks

    # ---- modest limits: on a CPU, and beside experts that want the memory ----

    def _modest(self) -> EngineConfig:
        wishes, config = self.wishes, self.config
        requests, chunk = wishes.requests or HOST_REQUESTS * self.place.gpus, wishes.chunk or CPU_CHUNK_TOKENS
        context = wishes.context or min(HOST_CONTEXT, config.max_position_embeddings)
        self.why |= {"requests": "modest", "chunk": "modest"}
        self.why["context"] = "modest" if context == HOST_CONTEXT else "the model's own"
        first = limits = self._base(requests, context, chunk)
        while not (self.place.has_gpu or self._fits_host(limits)):
            self.why["requests"] = self.why["context"] = "what the memory holds"
            if wishes.requests is None and requests > self.place.gpus:
                requests = max(requests // 2, self.place.gpus)
            elif wishes.context is None and context > LEAST_HOST_CONTEXT:
                context = max(context // 2, LEAST_HOST_CONTEXT)
            else:
                raise self._no_room(first)
            limits = self._base(requests, context, chunk)
        return limits

    def _fits_host(self, limits: EngineConfig) -> bool:
        return self.place.usable is None or self.budget.total(limits) <= self.place.usable

    # ---- experts in host memory ----

    def _smallest(self) -> EngineConfig:
        wishes = self.wishes
        return self._base(
            wishes.requests or self.place.gpus, wishes.context or self._least_context, wishes.chunk or SHORT_CHUNK
        )

    def _can_offload(self, limits: EngineConfig) -> bool:
        config, ranks = self.config, self.place.gpus
        if config.n_routed_experts % ranks or self.budget.num_own < config.num_experts_per_tok:
            return False
        least = self.budget.total(self.budget.least(limits), config.num_experts_per_tok)
        host = self.machine.host_bytes
        return least <= self._usable and (host is None or self.budget.weights.routed <= host)

    def _offloaded(self, wanted: str | int | None) -> Settings:
        """`wanted`: None or "auto" keeps as many experts on the device as `--memory` allows."""
        limits = self._modest()
        if isinstance(wanted, int):
            return self._done(limits, wanted, GIVEN)
        config, ranks, budget = self.config, self.place.gpus, self.budget
        others = budget.cache_bytes(limits) + exchange_bytes(config, limits, ranks)
        share = replace(config, n_routed_experts=budget.num_own)
        try:
            placement = place_experts(share, limits, budget.own_weights, others, self._usable)
        except OffloadError:
            raise self._no_room(limits) from None
        if placement is None:
            return self._done(limits, None, "they fit")
        if not self._can_offload(limits):
            raise self._no_room(limits)
        why = GIVEN if wanted == "auto" else "they do not all fit: slower"
        return self._done(limits, placement.num_slots, why)

    # ---- what is said ----

    def _done(self, limits: EngineConfig, offload: str | int | None, why_experts: str) -> Settings:
        wishes, place, budget = self.wishes, self.place, self.budget

        def choice(name: str, value: str) -> Choice:
            return Choice(name, value, GIVEN if getattr(wishes, name) else self.why.get(name, ""), f"--{name}")

        num_experts = offload if isinstance(offload, int) else None
        parts = budget.parts(limits, num_experts)
        planned = {name: getattr(parts, name) for name in ("weights", "cache", "reserve", "total")}
        schema = budget.schema(limits)
        blocks = f"{schema.num_blocks * BLOCK_TOKENS:,} tokens, {schema.num_snapshots:,} snapshots"
        held = f"weights {size(planned['weights'])}, cache {size(planned['cache'])}"
        held += f", reserve {size(planned['reserve'])}" if place.has_gpu else ""
        limit = "" if place.usable is None else f" of {size(place.usable)}"
        names: dict[str | int | None, str] = {None: "on the device", "auto": "in host memory as needed"}
        shown = names.get(offload, f"{offload} of each layer on the device")
        choices = [
            place.choice, *place.notes,
            Choice("memory", f"{size(planned['total'])}{limit}: {held}", f"{wishes.memory:.0%} of it",
                   "--memory"),
            choice("requests", f"{limits.max_concurrent_requests:,} at once"),
            choice("context", f"{limits.max_context_tokens:,} tokens"),
            Choice("cache", blocks, "what is left" if limits.num_blocks else "every request's context", "--memory"),
            choice("chunk", f"{limits.chunk_tokens:,} tokens"),
            Choice("drafts", str(self.drafts), self.why_drafts, "--drafts"),
        ]  # fmt: skip
        if place.has_gpu or offload is not None:
            choices.append(Choice("experts", shown, why_experts, "--offload-experts"))
        return Settings(place.device, place.gpus, limits, self.drafts, offload, tuple(choices), planned, place.visible)

    def _no_room(self, limits: EngineConfig) -> _NoRoom:
        """What was asked for, and what it takes at least."""
        place, budget = self.place, self.budget
        least = budget.least(limits) if place.has_gpu else limits
        parts = [f"the weights take {size(budget.weight_bytes())}"]
        requests, context = limits.max_concurrent_requests, limits.max_context_tokens
        parts.append(f"the cache of {requests} requests of {context} tokens takes {size(budget.cache_bytes(least))}")
        if place.has_gpu:
            parts.append(f"the reserve {size(budget.reserve_bytes(limits))}")
        free = size(place.usable or 0)
        return _NoRoom(f"{', '.join(parts)}, but {place.where} has {free} free (--memory {self.wishes.memory:g})")
