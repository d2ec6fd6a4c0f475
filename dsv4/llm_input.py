"""What `LLM` is given, checked before anything is loaded: limits, device, numerics, prompts. Mistakes are
`RequestError`s that say what to change."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import torch

from dsv4.cache.schema import build_cache_schema
from dsv4.config import EngineConfig, ModelConfig, shown
from dsv4.config.layers import build_schedule
from dsv4.formats.tensors import ACTIVATION_GROUP, QuantTensor
from dsv4.model.parameters import ModelParams
from dsv4.request import RequestError, SamplingParams

Numerics = Literal["official", "exact"]
Prompt = str | Sequence[int]

DEFAULT_CONTEXT_TOKENS = 16384


def limits_for(config: ModelConfig, engine: EngineConfig | None, plain_dtype: torch.dtype | None) -> EngineConfig:
    """The limits asked for, or the default ones; `ConfigError` if this model cannot have them."""
    limits = engine or EngineConfig(max_context_tokens=min(DEFAULT_CONTEXT_TOKENS, config.max_position_embeddings))
    itemsize = None if plain_dtype is None else plain_dtype.itemsize
    build_cache_schema(config, build_schedule(config), limits, plain_itemsize=itemsize)
    return limits


def planned_cache_bytes(config: ModelConfig, limits: EngineConfig, plain_dtype: torch.dtype | None) -> int:
    """What the cache will take."""
    schedule = build_schedule(config, with_mtp=limits.max_draft_tokens > 0)
    itemsize = None if plain_dtype is None else plain_dtype.itemsize
    return build_cache_schema(config, schedule, limits, plain_itemsize=itemsize).total_bytes


_WHAT_HELPS = {
    "limits": "lower the limits",
    "offload": "keep experts in host memory (offload_experts='auto', on the command line --offload-experts auto)",
    "fewer": "lower the limits or keep fewer experts on the device (a smaller offload_experts)",
}


@contextmanager
def naming_what_does_not_fit(what: str, limits: EngineConfig, helps: str = "limits") -> Iterator[None]:
    """A device without room for the weights or the cache is the caller's mistake, and is reported as one."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RequestError(
            f"the device has no room for the {what} (max_context_tokens {limits.max_context_tokens}, "
            f"max_concurrent_requests {limits.max_concurrent_requests}, num_blocks {limits.num_blocks}): "
            f"{_WHAT_HELPS[helps]}, or see what would fit with `dsv4 plan`. {str(error).splitlines()[0]}"
        ) from error


def check_widths(config: ModelConfig, params: ModelParams) -> None:
    """Inputs of quantised weights are quantised in groups of 128 channels, so their widths must be multiples of it."""
    if not isinstance(params.layers[0].attn.wq_a, QuantTensor):
        return
    widths = {
        "hidden_size": config.hidden_size,
        "q_lora_rank": config.q_lora_rank,
        "o_groups * o_lora_rank": config.o_groups * config.o_lora_rank,
        "moe_intermediate_size": config.moe_intermediate_size,
    }
    for name, width in widths.items():
        if width % ACTIVATION_GROUP:
            raise RequestError(
                f"official numerics quantise inputs in groups of {ACTIVATION_GROUP}, but {name} is {width}; "
                "use numerics='exact'"
            )


def check_chunks(chunks: Sequence[int] | None, total: int) -> list[int]:
    pieces = list(chunks) if chunks is not None else [total]
    if any(not isinstance(length, int) or length < 1 for length in pieces) or sum(pieces) != total:
        raise RequestError(f"chunks must be positive integers that sum to {total}, found {shown(pieces)}")
    return pieces


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (bytes, Mapping)) or not isinstance(prompts, Iterable):
        raise RequestError(f"prompts must be text, a list of token ids, or a list of those, found {shown(prompts)}")
    many = list(prompts)
    if many and all(_is_token_id(item) for item in many):
        return [many]  # type: ignore[list-item]
    for place, item in enumerate(many):
        if _is_token_id(item) or isinstance(item, (bytes, Mapping)) or not isinstance(item, Iterable):
            raise RequestError(f"prompt {place} must be text or a list of token ids, found {shown(item)}")
    return many  # type: ignore[return-value]


def _is_token_id(item: object) -> bool:
    """An integer: Python's, numpy's, or a torch scalar. (A torch vector of one element is a prompt.)"""
    return hasattr(item, "__index__") and getattr(item, "ndim", 0) == 0


def as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    shared = SamplingParams() if params is None else params
    if isinstance(shared, SamplingParams):
        return [shared] * count
    if not isinstance(shared, (list, tuple)) or not all(isinstance(one, SamplingParams) for one in shared):
        raise RequestError(f"params must be one SamplingParams, or a list of them, found {shown(params)}")
    if len(shared) != count:
        raise RequestError(f"{count} prompts, but {len(shared)} SamplingParams; give one, or one per prompt")
    return list(shared)


def check_device(device: str | torch.device) -> torch.device:
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise RequestError(f"device must be 'cpu' or 'cuda', found {shown(device)}") from None
    if chosen.type not in ("cpu", "cuda"):
        raise RequestError(f"device must be 'cpu' or 'cuda', found {str(chosen)!r}")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise RequestError(f"device {str(chosen)!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    return chosen


def check_numerics(numerics: str, dtype: torch.dtype | None) -> torch.dtype:
    if numerics == "official":
        if dtype not in (None, torch.bfloat16):
            raise RequestError(f"numerics='official' computes in bfloat16; dtype {dtype} needs numerics='exact'")
        return torch.bfloat16
    if numerics == "exact":
        chosen = dtype or torch.float32
        if chosen not in (torch.float64, torch.float32, torch.bfloat16):
            raise RequestError(f"dtype must be float64, float32 or bfloat16, found {chosen}")
        return chosen
    raise RequestError(f"numerics must be 'official' or 'exact', found {shown(numerics)}")
