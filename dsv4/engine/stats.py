"""`EngineStats`: one moment of an engine in numbers. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """What waits, what runs, what is held, and totals since the engine was made."""

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
