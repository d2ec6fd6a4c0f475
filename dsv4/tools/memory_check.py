"""Whether a model will fit, asked before its weights are read; and giving back what a large request took. No torch."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dsv4.cache.schema import build_cache_schema
from dsv4.config import EngineConfig, ModelConfig
from dsv4.config.layers import build_schedule
from dsv4.loader.files import weight_files
from dsv4.request import RequestError

_GIB = 1024**3
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}


def check_host_memory(
    folder: Path, config: ModelConfig, limits: EngineConfig, *, numerics: str, dtype: str | None
) -> None:  # fmt: skip
    """Weights and cache against the memory of this machine. `RequestError` says what to change."""
    free = free_host_bytes()
    if free is not None:
        cache = _cache_bytes(config, limits, numerics=numerics, dtype=dtype)
        _check_room(cache, _weight_bytes(folder), free, limits, "this machine", _LOWER)


def check_gpu_memory(
    folder: Path, config: ModelConfig, limits: EngineConfig, free: int, *, numerics: str, dtype: str | None,
    keeps_experts: bool,
) -> None:  # fmt: skip
    """Cache and weights (without offloading) against the free bytes of a GPU. `RequestError` says what to change.

    In exact numerics weights grow when they are dequantised: what fits here may still not. `LLM` says so then.
    """
    cache = _cache_bytes(config, limits, numerics=numerics, dtype=dtype)
    helps = "keep experts in host memory with --offload-experts auto" if keeps_experts and cache < free else _LOWER
    _check_room(cache, _weight_bytes(folder) if keeps_experts else 0, free, limits, "the GPU", helps)


@contextmanager
def naming_host_memory(limits: EngineConfig) -> Iterator[None]:
    """Running out of host memory all the same is a sentence too: torch says it with a RuntimeError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
            raise
        raise RequestError(f"this machine has no room for the model and {_the_cache(limits)}: {_LOWER}") from error


_LOWER = "lower --requests or --context, or see what would fit with `dsv4 plan`"


def _the_cache(limits: EngineConfig) -> str:
    return f"the cache of {limits.max_concurrent_requests} requests of {limits.max_context_tokens} tokens"


def _cache_bytes(config: ModelConfig, limits: EngineConfig, *, numerics: str, dtype: str | None) -> int:
    itemsize = ITEM_BYTES[dtype or "float32"] if numerics == "exact" else None
    return build_cache_schema(config, build_schedule(config), limits, plain_itemsize=itemsize).total_bytes


def _weight_bytes(folder: Path) -> int:
    """What the weights take as they are stored."""
    return sum(file.stat().st_size for file in weight_files(folder))


def _check_room(cache: int, weights: int, free: int, limits: EngineConfig, where: str, helps: str) -> None:
    if cache + weights > free:
        raise RequestError(
            f"{_the_cache(limits)} takes {cache / _GIB:,.1f} GiB and the weights {weights / _GIB:,.1f} GiB, but "
            f"{where} has {free / _GIB:,.1f} GiB free: {helps}"
        )


def free_host_bytes() -> int | None:
    """Memory this process can still take: the machine's, or what its control group leaves. None if unknown."""
    found = []
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        if limit != "max":
            # the page cache counts as used, but is given back when the memory is needed
            stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
            used = int((group / "memory.current").read_text(encoding="ascii")) - int(stat.get("inactive_file", 0))
            found.append(max(int(limit) - used, 0))
    except (OSError, ValueError):
        pass  # another system, or another version of control groups: what was found so far counts
    return min(found, default=None)


def give_back_memory() -> None:
    """Hand freed memory back to the system. glibc keeps what many small objects leave; others need no telling."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
