"""A model that costs nothing: an engine whose steps compute no layer, so that what the host does can be measured on a
CPU. Where a pace is given, steps take that long, as on a GPU: the host waits for the step before the one it launches.
"""

import time
from typing import Any

import torch
from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.config import EngineConfig, ModelConfig
from dsv4.engine.engine import Engine
from dsv4.engine.run.bucket import Draws, Forwarded
from dsv4.engine.run.runner import Runner
from dsv4.llm import LLM
from dsv4.loader.write.synth import random_params
from dsv4.ops.sampling import SamplingRows
from dsv4.text.tokenizer import Tokenizer

# the cost is the host's and does not depend on the model's size; sliding windows alone keep the cache small
FREE_CONFIG = ModelConfig.tiny(num_hidden_layers=1, compress_ratios=(0, 0), num_hash_layers=0)
FIRST_DRAWN, NUM_DRAWN = 400, 100  # token ids: words of `whole_tokenizer`, none of them a marker


class FreeRunner(Runner):
    """Computes nothing. A row's token is a function of its slot and position."""

    step_seconds = 0.0
    _is_ready = 0.0  # when the step launched last would be done

    def forward(self, batch: TokenBatch, draw_rows: Tensor) -> Forwarded:
        before, now = self._is_ready, time.perf_counter()
        self._is_ready = max(before, now) + self.step_seconds
        if before > now:
            time.sleep(before - now)
        nothing = torch.empty(0)
        return Forwarded(nothing, nothing, ())

    def draw(self, forwarded: Forwarded, rows: SamplingRows, num_top: int | None = None) -> Draws:
        token_ids = FIRST_DRAWN + (31 * rows.slots + rows.positions) % NUM_DRAWN
        if num_top is None:
            return Draws(token_ids)
        num_rows = len(token_ids)
        top = torch.full((num_rows, num_top), -2.5)
        return Draws(token_ids, (torch.full((num_rows,), -1.25), token_ids[:, None].expand(top.shape), top))


def free_llm(limits: EngineConfig, tokenizer: Tokenizer | None = None, *, step_seconds: float = 0.0) -> LLM:
    """An `LLM` over it, whose engine overlaps steps as on a GPU."""
    llm = LLM.from_params(FREE_CONFIG, random_params(FREE_CONFIG), engine=limits, tokenizer=tokenizer)
    llm.engine = free_engine(llm.model, llm.cache, step_seconds=step_seconds)
    return llm


def free_engine(model: Any, cache: Any, *, overlap: bool = True, step_seconds: float = 0.0) -> Engine:
    runner = FreeRunner(model, cache, buckets=(), use_graphs=False)
    runner.step_seconds = step_seconds
    return Engine(model, cache, runner=runner, overlap=overlap)
