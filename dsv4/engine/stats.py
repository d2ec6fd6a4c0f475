"""`EngineStats`: one moment of an engine in numbers. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """What waits, what runs, what is held, and totals since the engine was made.

    A prompt token counts once in `num_prompt_tokens`; tokens that went through the model again after a preemption are
    `num_recomputed_tokens`. Requests past their deadline are among the failed.
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
