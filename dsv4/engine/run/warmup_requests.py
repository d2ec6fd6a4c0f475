"""Requests of every kind through an engine, before the first real one: whatever is compiled or loaded late is now.

Kernels are compiled by `Runner.warm_up`. What remains are torch's own kernels around them (writing a slot's settings,
counting a prompt, copying a mask), which a GPU loads when they are first used.
"""

import numpy as np
from torch import Tensor

from dsv4.engine.engine import Engine
from dsv4.engine.step.constraint import Words, num_words
from dsv4.request import SamplingParams

_NUM_TOKENS = 3


class _Anything:
    """A rule that allows every token."""

    def __init__(self, vocab_size: int) -> None:
        self._allowed = np.full(num_words(vocab_size), -1, dtype=np.int32)

    def allowed(self) -> Words:
        return self._allowed

    def accept(self, token_id: int) -> None:
        pass

    def rollback(self, count: int) -> None:
        pass


def rehearse_requests(engine: Engine) -> None:
    """One request of each kind alone, then as many as fit together. The engine and its cache must be idle."""
    vocab_size, limits = engine.model.config.vocab_size, engine.cache.limits
    num_tokens = min(_NUM_TOKENS, limits.max_context_tokens - 1)
    if num_tokens < 1:
        return
    kinds: list[SamplingParams] = [
        SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=0, **kind)
        for kind in (
            {"temperature": 0.0},
            {"top_p": 0.9, "top_k": 40},
            {"presence_penalty": 0.5, "repetition_penalty": 1.1},
            {"logprobs": 20},
            {"logprobs": 100},
            {"logit_bias": {0: 1.0}, "allowed_token_ids": (0,), "bad_words_ids": ((vocab_size - 1,),)},
            {"min_tokens": num_tokens},
            {"prompt_logprobs": 20},
        )
    ]
    rule = _Anything(vocab_size)
    engine.observers.append(_ignore)
    try:
        for params in kinds:
            _run(engine, [params], None)
        _run(engine, [kinds[0]], rule)
        _run(engine, (kinds * limits.max_concurrent_requests)[: limits.max_concurrent_requests], rule)
    finally:
        engine.observers.remove(_ignore)


def _ignore(chosen: Tensor) -> None:
    """An observer: experts are copied to the host as for a real one."""


def _run(engine: Engine, many: list[SamplingParams], rule: _Anything | None) -> None:
    for params in many:
        engine.submit(engine.prepare([0], params, rule))
    while engine.has_work:
        engine.step()
