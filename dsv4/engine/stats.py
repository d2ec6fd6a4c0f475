"""`EngineStats`: one moment of an engine in numbers. No torch."""

from dataclasses import dataclass, fields
from typing import Any, Self

SCHEDULER_COUNTS = (  # numbers that the scheduler keeps
    "num_running", "num_steps", "num_prompt_tokens", "num_finished", "num_aborted", "num_failed", "num_preemptions",
    "num_recomputed_tokens",
)  # fmt: skip


@dataclass(frozen=True)
class DraftStats:
    """Totals of drafting. `num_steps` counts every request's steps in which drafts of it were verified; the drafts, and
    those that came true, are counted by their place behind the newest token."""

    num_steps: int
    verified_by_place: tuple[int, ...]
    accepted_by_place: tuple[int, ...]

    def __add__(self, other: Self) -> Self:
        places = zip(self.verified_by_place, other.verified_by_place, strict=True)
        accepted = zip(self.accepted_by_place, other.accepted_by_place, strict=True)
        return type(self)(self.num_steps + other.num_steps, tuple(map(sum, places)), tuple(map(sum, accepted)))

    @property
    def num_verified(self) -> int:
        return sum(self.verified_by_place)

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted_by_place)

    @property
    def tokens_per_step(self) -> float:
        """Mean accepted length: the drafts that came true and the token behind them."""
        return 1 + self.num_accepted / max(self.num_steps, 1)

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Of the drafts verified at each place, first to last, the share that came true (with all before them)."""
        pairs = zip(self.accepted_by_place, self.verified_by_place, strict=True)
        return tuple(accepted / verified for accepted, verified in pairs if verified)


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """What waits, what runs, what is held, and totals since the engine was made.

    A prompt token counts once in `num_prompt_tokens`; tokens that went through the model again after a preemption are
    `num_recomputed_tokens`. Requests past their deadline are among the failed.

    With offloaded experts, a forward call counts each expert a layer chose once: a hit if the device had it, a miss if
    it came from the host. `num_expert_bytes` also holds what was copied ahead of a choice. All 0 without.

    `seconds_waiting` is how long the host has waited for the device's results.
    `num_cached_tokens` were not fed because the prefix cache had them; of its hits, some came from host memory and some
    from disk. `num_*_bytes` are what it holds of snapshots, in host memory and on disk, `num_idle_blocks` the blocks
    that it keeps and any request may take.
    `drafts` is None where the engine does not draft.
    """

    num_waiting: int
    num_running: int
    num_slots: int
    num_blocks_used: int
    num_blocks: int
    num_steps: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_finished: int
    num_aborted: int
    num_failed: int
    num_preemptions: int
    num_recomputed_tokens: int
    num_expert_hits: int = 0
    num_expert_misses: int = 0
    num_expert_bytes: int = 0
    seconds_waiting: float = 0.0
    num_prefix_hits: int = 0
    num_prefix_host_hits: int = 0
    num_prefix_disk_hits: int = 0
    num_prefix_misses: int = 0
    num_cached_tokens: int = 0
    num_prefix_evictions: int = 0
    num_snapshot_bytes: int = 0
    num_idle_blocks: int = 0
    num_prefix_host_bytes: int = 0
    num_prefix_disk_bytes: int = 0
    num_prefix_bad_files: int = 0
    num_verified_hits: int = 0
    num_wrong_hits: int = 0
    drafts: DraftStats | None = None

    def __add__(self, other: Self) -> Self:
        """Of two engines together, which both draft or both do not."""
        both = [(one.name, getattr(self, one.name), getattr(other, one.name)) for one in fields(self)]
        total: dict[str, Any] = {name: None if mine is None else mine + theirs for name, mine, theirs in both}
        return type(self)(**total)
