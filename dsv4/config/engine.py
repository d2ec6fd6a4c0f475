"""`EngineConfig`: the limits of one running model."""

from dataclasses import dataclass
from typing import Literal

from dsv4.config.model import BLOCK_TOKENS, MAX_DRAFT_TOKENS, _require, is_positive_real, is_size, shown

IndexKeyFormat = Literal["fp4", "fp8"]
CPU_CHUNK_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits of one running model; they fix every allocation, and the memory plan is computed from them alone.

    max_chunk_tokens          prompt tokens of one step; None: by the device, when a model is loaded
                              (engine/schedule/chunk.py). No result depends on it
    prefix_cache_bytes        device memory for snapshots of prefixes, with which a prompt seen before is not read again
                              (the same bits either way); 0 turns the prefix cache off. Their blocks need no memory of
                              their own: they stay in `num_blocks` until a request needs them
    snapshot_interval_tokens  a long prompt leaves a snapshot at every multiple of this
    cache_host_bytes          host memory for prefixes that outlive the device's; pinned, taken at once
    cache_dir                 folder in which prefixes outlive the process. They pass through host memory, which
                              must have room for the longest of them
    cache_disk_bytes          most bytes of files there
    captures_late             serve before every size of a step has its graph: the others are captured in idle time, and
                              now and then beside requests; a larger one's graph, or none, serves until then
    verify_hits               share of hits that are read again without the cache in idle time, and compared bit by bit
    """

    max_context_tokens: int = 8192
    max_concurrent_requests: int = 8
    max_chunk_tokens: int | None = None
    max_draft_tokens: int = 0
    index_key_format: IndexKeyFormat = "fp4"
    num_blocks: int | None = None
    prefix_cache_bytes: int = 256 * 2**20
    snapshot_interval_tokens: int = 4096
    cache_host_bytes: int = 0
    cache_dir: str | None = None
    cache_disk_bytes: int = 16 * 2**30
    verify_hits: float = 0.0
    captures_late: bool = False

    def __post_init__(self) -> None:
        for name in ("max_context_tokens", "max_concurrent_requests"):
            value = getattr(self, name)
            _require(is_size(value), f"{name} must be a positive integer, found {shown(value)}")
        _require(
            self.max_chunk_tokens is None or is_size(self.max_chunk_tokens),
            f"max_chunk_tokens must be a positive integer or None, found {shown(self.max_chunk_tokens)}",
        )
        _require(
            is_size(self.max_draft_tokens, 0) and self.max_draft_tokens <= MAX_DRAFT_TOKENS,
            f"max_draft_tokens must be from 0 to {MAX_DRAFT_TOKENS}, found {shown(self.max_draft_tokens)}",
        )
        _require(
            self.index_key_format in ("fp4", "fp8"),
            f"index_key_format must be 'fp4' or 'fp8', found {shown(self.index_key_format)}",
        )
        _require(
            self.num_blocks is None or is_size(self.num_blocks),
            f"num_blocks must be a positive integer or None, found {shown(self.num_blocks)}",
        )
        _require(
            is_size(self.prefix_cache_bytes, 0),
            f"prefix_cache_bytes must be an integer >= 0 (0 is off), found {shown(self.prefix_cache_bytes)}",
        )
        interval = self.snapshot_interval_tokens
        _require(
            is_size(interval) and interval % BLOCK_TOKENS == 0,
            f"snapshot_interval_tokens must be a multiple of {BLOCK_TOKENS}, found {shown(interval)}",
        )
        _require(
            is_size(self.cache_host_bytes, 0),
            f"cache_host_bytes must be an integer >= 0 (0 is off), found {shown(self.cache_host_bytes)}",
        )
        _require(
            is_size(self.cache_disk_bytes),
            f"cache_disk_bytes must be a positive integer, found {shown(self.cache_disk_bytes)}",
        )
        _require(
            self.verify_hits == 0 or (is_positive_real(self.verify_hits) and self.verify_hits <= 1),
            f"verify_hits must be a share from 0 to 1, found {shown(self.verify_hits)}",
        )
        _require(
            self.cache_dir is None or (isinstance(self.cache_dir, str) and self.cache_dir != ""),
            f"cache_dir must be a folder's name or None, found {shown(self.cache_dir)}",
        )
        _require(
            self.cache_dir is None or self.cache_host_bytes > 0,
            "cache_dir needs cache_host_bytes, found 0: files pass through host memory",
        )
        _require(
            self.cache_host_bytes == 0 or self.prefix_cache_bytes > 0,
            "cache_host_bytes needs prefix_cache_bytes, found 0: a prefix passes through the device's snapshots",
        )

    @property
    def chunk_tokens(self) -> int:
        """`max_chunk_tokens`; a CPU's where nothing has chosen it."""
        return self.max_chunk_tokens or CPU_CHUNK_TOKENS
