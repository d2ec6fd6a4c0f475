"""Models to measure, and contexts made up for them. See `tools/bench.py`.

A context is not prefilled: its cache is made up. Requests are moved to their positions, which gives them their blocks,
and every row they can read gets the encoding of random values; rings carry the right positions. Requests of a batch
stand at different places of a block, as real ones do.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.schema import build_cache_schema
from dsv4.config import BLOCK_TOKENS, CSA_RATIO, HCA_RATIO, ConfigError, EngineConfig, ModelConfig
from dsv4.config.layers import build_schedule
from dsv4.dist.exchange import Exchange
from dsv4.engine.offload.load import choose_placement, load_offloaded, usable_bytes
from dsv4.engine.offload.placement import ModelBytes, Placement, place_experts
from dsv4.engine.offload.pool import ExpertPool, LayerExperts, with_experts
from dsv4.formats.row_store import RowStore, encode_rows
from dsv4.formats.rows import RowKind
from dsv4.formats.tensors import Weight
from dsv4.formats.trees import map_tensors, tensors_of
from dsv4.loader.assemble import ParameterStore
from dsv4.loader.checkpoint import Checkpoint
from dsv4.loader.names import Role, expected_tensors
from dsv4.loader.shipped import find_checkpoint
from dsv4.loader.weights import load_params
from dsv4.loader.write.config_file import ExpertFormat
from dsv4.loader.write.random_weights import Recipe, random_weight
from dsv4.loader.write.synth import random_params
from dsv4.model.parameters import ExpertParams, ModelParams
from dsv4.model.prepare import prepare_params
from dsv4.model.transformer import Transformer
from dsv4.ops import Backend, backend_for
from dsv4.tools.plan.sizes import count_weights
from dsv4.tools.plan.targets import PRESETS, resolve_target

SAMPLE_ROWS = 1 << 16  # different random rows a made-up context is filled from
_RATIO_OF = {"swa": 0, "csa": CSA_RATIO, "hca": HCA_RATIO}


@dataclass(frozen=True)
class BenchModel:
    """A model to measure: its name, weights, their format, and the backend they run with."""

    name: str
    config: ModelConfig
    params: ModelParams
    experts: ExpertFormat
    device: torch.device
    backend: Backend
    pool: ExpertPool | None = None
    exchange: Exchange | None = None  # where it is one rank's share: the way to the others

    def transformer(self) -> Transformer:
        return Transformer(self.config, self.params, torch.bfloat16, backend=self.backend, exchange=self.exchange)


def cut_config(
    config: ModelConfig, layers: int | None = None, schedule: Sequence[str] | None = None,
    hash_layers: int | None = None,
) -> ModelConfig:  # fmt: skip
    """The same model with only its first layers, or with layers of the named kinds; no draft blocks."""
    if schedule is not None:
        unknown = [kind for kind in schedule if kind not in _RATIO_OF]
        if unknown or not schedule:
            raise ConfigError(
                f"a schedule lists {', '.join(_RATIO_OF)}, found {', '.join(map(repr, unknown)) or 'none'}"
            )
        if layers not in (None, len(schedule)):
            raise ConfigError(f"the schedule has {len(schedule)} layers, but {layers} were asked for")
        ratios = tuple(_RATIO_OF[kind] for kind in schedule)
    else:
        count = config.num_hidden_layers if layers is None else layers
        if not 1 <= count <= config.num_hidden_layers:
            raise ConfigError(f"layers must be from 1 to {config.num_hidden_layers}, found {count}")
        ratios = config.layer_ratios[:count]
    hashed = config.num_hash_layers if hash_layers is None else hash_layers
    return replace(
        config, num_hidden_layers=len(ratios), compress_ratios=ratios, num_hash_layers=min(hashed, len(ratios)),
        num_nextn_predict_layers=0, dspark=None,
    )  # fmt: skip


def build_model(
    target: str | None = None, *, layers: int | None = None, schedule: Sequence[str] | None = None,
    hash_layers: int | None = None, experts: ExpertFormat = "mxfp4", device: str = "cpu",
) -> BenchModel:  # fmt: skip
    """A preset with random weights, or a checkpoint (whole: its layers cannot be cut)."""
    where = torch.device(device)
    backend = backend_for(where, "official")
    if target is None or target.lower() not in PRESETS:
        if layers is not None or schedule is not None:
            raise ConfigError("layers and schedule need a preset; a checkpoint runs as it is")
        folder = find_checkpoint(target)
        config = ModelConfig.from_pretrained(folder)
        params = load_params(Checkpoint.open(folder), config, device=where)
        resolved = resolve_target(str(folder))
        return BenchModel(resolved.name, config, prepare_params(params, backend), resolved.experts, where, backend)
    config = cut_config(PRESETS[target.lower()](), layers, schedule, hash_layers)
    _check_memory(count_weights(config, experts, with_draft=False).total_bytes, where)
    params = random_params(config, experts=experts, device=where, with_mtp=False)
    name = f"{target.lower()}-{config.num_hidden_layers}"
    return BenchModel(name, config, prepare_params(params, backend), experts, where, backend)


def build_offloaded(
    target: str | None = None, *, layers: int | None = None, experts: ExpertFormat = "nvfp4", device: str = "cpu",
    placement: Placement | None = None, context: int = 8192,
) -> BenchModel:  # fmt: skip
    """A preset with random weights, or a checkpoint, with offloaded experts, placed as the memory plan says.

    Of a preset, one expert of each matrix is drawn as `build_model` draws them. The others get random weights of their
    own but share its scales: quick, and activations stay of the same order.
    """
    where = torch.device(device)
    if target is None or target.lower() not in PRESETS:
        if layers is not None:
            raise ConfigError("layers need a preset; a checkpoint runs as it is")
        return _load_offloaded(find_checkpoint(target), where, placement, context)
    preset = target.lower()
    config = cut_config(PRESETS[preset](), layers)
    placement = placement or _place(config, experts, where, context)
    recipe = Recipe(config, experts)
    store = _StoreWithoutExperts(config, where)
    templates: dict[str, Weight] = {}
    for tensor in expected_tensors(config, with_mtp=False):
        if tensor.role is not Role.EXPERT:
            store.put(tensor, random_weight(tensor, recipe, where))
        elif tensor.name.startswith("layers.0.ffn.experts.0."):
            templates[tensor.base[-2:]] = random_weight(tensor, recipe, where)
    backend = backend_for(where, "official")
    one = ExpertParams(*(_stack_of_one(templates[part]) for part in ("w1", "w2", "w3")))
    blocks = store.build(0)
    first = replace(blocks.layers[0], ffn=replace(blocks.layers[0].ffn, experts=one))
    like = prepare_params(replace(blocks, layers=[first, *blocks.layers[1:]]), backend)
    single = map_tensors(like.layers[0].ffn.experts.matrices, lambda part: part[0], ())
    pool = ExpertPool(placement, config.n_routed_experts, config.num_experts_per_tok, backend, device=where)
    generator = torch.Generator(device=where).manual_seed(0)
    moved = []
    for block in like.layers:
        experts_of_layer = LayerExperts(pool, len(pool.layers), single)
        pool.adopt(experts_of_layer)
        _fill_experts(experts_of_layer, single, generator)
        moved.append(with_experts(block, experts_of_layer))
    name = f"{preset}-{config.num_hidden_layers} (offloaded experts)"
    return BenchModel(name, config, replace(like, layers=moved), experts, where, pool.backend, pool)


def _load_offloaded(folder: Path, device: torch.device, placement: Placement | None, context: int) -> BenchModel:
    """A checkpoint as `LLM` loads it, except that experts are pooled even where all of them fit."""
    config, checkpoint = ModelConfig.from_pretrained(folder), Checkpoint.open(folder)
    engine = _one_request(min(context, config.max_position_embeddings))
    backend = backend_for(device, "official")
    if placement is None:
        placement = choose_placement("auto", checkpoint, config, engine, _cache_bytes(config, engine), device=device)
    placement = placement or Placement(config.n_routed_experts, 0)
    params, pool = load_offloaded(checkpoint, config, placement, backend, device=device)
    resolved = resolve_target(str(folder))
    name = f"{resolved.name} (offloaded experts)"
    return BenchModel(name, config, prepare_params(params, backend), resolved.experts, device, pool.backend, pool)


def _one_request(context: int) -> EngineConfig:
    return EngineConfig(max_context_tokens=context, max_concurrent_requests=1, max_chunk_tokens=2048)


def _cache_bytes(config: ModelConfig, engine: EngineConfig) -> int:
    return build_cache_schema(config, build_schedule(config), engine, plain_itemsize=None).total_bytes


def _place(config: ModelConfig, experts: ExpertFormat, device: torch.device, context: int) -> Placement:
    """As `LLM` would, before anything is on the device."""
    engine, weights = _one_request(context), count_weights(config, experts, with_draft=False)
    routed = weights.routed_expert_bytes
    layers, cache = config.num_hidden_layers, _cache_bytes(config, engine)
    sizes = ModelBytes(weights.total_bytes - routed, routed, layers)
    return place_experts(config, engine, sizes, cache, usable_bytes(device)) or Placement(config.n_routed_experts, 0)


class _StoreWithoutExperts(ParameterStore):
    """Routed experts are put elsewhere."""

    def _experts(self, prefix: str) -> ExpertParams:
        return super()._experts(prefix) if "shared" in prefix else ExpertParams(*(torch.empty(0),) * 3)


def _stack_of_one(weight: Weight) -> Weight:
    return map_tensors(weight, lambda part: part.unsqueeze(0))


def _fill_experts(layer: LayerExperts, like: Any, generator: torch.Generator) -> None:
    """Random packed weights where a tensor is large (codes), the template's values where it is not (scales)."""
    templates = tensors_of(like)
    largest = max(part.numel() * part.element_size() for part in templates)
    for expert_idx in range(layer.num_experts):
        weights = []
        for part in templates:
            is_codes = 2 * part.numel() * part.element_size() > largest and not part.is_floating_point()
            drawn = torch.empty_like(part).random_(*_range_of(part.dtype), generator=generator) if is_codes else part
            weights.append(drawn)
        layer.put(expert_idx, weights)


def _range_of(dtype: torch.dtype) -> tuple[int, int]:
    limits = torch.iinfo(dtype)
    return limits.min, limits.max


def _check_memory(needed: int, device: torch.device) -> None:
    """Refuse what cannot be held before filling the memory with it."""
    if device.type == "cuda":
        available = torch.cuda.mem_get_info(device)[0]
    else:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if needed > 0.95 * available:
        raise ConfigError(
            f"the weights take {needed / 1e9:.1f} GB, {device} has {available / 1e9:.1f} GB free: ask for fewer layers"
        )


# ---- a made-up context ----


@dataclass(frozen=True)
class Context:
    """Requests at their positions, and the batch of their next tokens."""

    cache: KVCacheManager
    slots: list[int]
    batch: TokenBatch
    context: int

    @property
    def rows(self) -> Tensor:
        return torch.arange(self.batch.num_tokens, device=self.cache.device)


def make_context(model: BenchModel, batch_size: int, context: int, seed: int = 0, *, spare: int = 0) -> Context:
    """`batch_size` requests whose next token is at most their `context`-th, in a cache that just holds them and
    `spare` tokens more each."""
    if not 1 <= context <= model.config.max_position_embeddings:
        raise ConfigError(f"a context is from 1 to {model.config.max_position_embeddings} tokens, found {context}")
    limits = EngineConfig(
        max_context_tokens=min(context + spare, model.config.max_position_embeddings),
        max_concurrent_requests=batch_size,
        max_chunk_tokens=batch_size,
    )
    schedule = build_schedule(model.config, with_mtp=bool(model.params.draft_blocks))
    cache = KVCacheManager(model.config, schedule, limits, device=model.device, plain_dtype=None)
    fill_cache(cache, seed)
    slots = [cache.admit(limits.max_context_tokens) for _ in range(batch_size)]
    fill_cache(cache, seed, only_state=True)  # `admit` clears a slot
    before = [max(0, context - 1 - i % min(BLOCK_TOKENS, context)) for i in range(batch_size)]
    moving = [(slot, length) for slot, length in zip(slots, before, strict=True) if length]
    if moving:
        cache.prepare_forward([slot for slot, _ in moving], [0] * len(moving), [length for _, length in moving])
    _set_ring_positions(cache, slots, before)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, model.config.vocab_size, (batch_size, 1), generator=generator)
    return Context(cache, slots, cache.make_batch(slots, tokens.tolist()), context)


def fill_cache(cache: KVCacheManager, seed: int = 0, *, only_state: bool = False) -> None:
    """Random rows everywhere: valid encodings of normal values."""
    generator = torch.Generator(device=cache.device).manual_seed(seed)
    for layer in cache.schedule:
        handle = cache.handle(layer.layer_idx)
        stores = [handle.window.rows]
        if not only_state:
            stores += [pages.rows for pages in (handle.entries, handle.index_keys) if pages is not None]
        for rows in stores:
            _fill_rows(rows, generator)
        for state in (handle.compressor, handle.index_compressor):
            for tail in () if state is None else (state.own, state.following):
                if tail is not None:
                    tail.kv.normal_(generator=generator)
                    tail.score.normal_(generator=generator)


def _fill_rows(rows: RowStore, generator: torch.Generator) -> None:
    leading, device = rows.data.shape[:-1], rows.data.device
    total = leading.numel()
    count = min(total, SAMPLE_ROWS)
    values = torch.randn(count, rows.format.dim, generator=generator, device=device)
    sample = encode_rows(
        values.to(torch.bfloat16 if rows.format.kind is not RowKind.PLAIN else rows.data.dtype), rows.format
    )
    for start in range(0, leading[0], max(1, SAMPLE_ROWS // leading[1])):
        piece = slice(start, start + max(1, SAMPLE_ROWS // leading[1]))
        shape = rows.data[piece].shape[:-1]
        chosen = torch.randint(0, count, shape, generator=generator, device=device)
        rows.data[piece] = sample.data[chosen]
        if rows.scales is not None and sample.scales is not None:
            rows.scales[piece] = sample.scales[chosen]


def _set_ring_positions(cache: KVCacheManager, slots: list[int], before: list[int]) -> None:
    """Row r of a ring holds the last position below `before` that belongs there."""
    ring_len = cache.handle(0).window.ring_len
    rows = torch.arange(ring_len)
    ends = torch.tensor(before).unsqueeze(-1)
    held = ends - 1 - (ends - 1 - rows) % ring_len  # [R, ring_len]
    held = held.masked_fill(held < 0, -1).to(torch.int32).to(cache.device)
    for layer in cache.schedule:
        cache.handle(layer.layer_idx).window.positions[slots] = held
