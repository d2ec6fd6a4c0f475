"""A model's logits of a prompt in one go against the same prompt in pieces, row by row, bit for bit; and where they
differ, the first call of an op whose row differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.cache.manager import KVCacheManager
from dsv4.config import EngineConfig
from dsv4.engine.run.precompile import precompile
from dsv4.loader.synth import random_params
from dsv4.model.prepare import prepare_params
from dsv4.model.transformer import Transformer
from dsv4.ops import Backend, OpSet
from dsv4.ops.lib.compile_only import can_compile_in_parallel
from dsv4.testing.numeric import bits_of
from dsv4.testing.random_shapes import RandomModel


class OpResult(NamedTuple):
    """What one call of an op returned, tensor by tensor."""

    op: str
    tensors: list[Tensor]


class CutModel:
    """A random model with a cache for one request of `num_tokens`; calls are made directly, without graphs."""

    def __init__(self, shape: RandomModel, num_tokens: int, backend: Backend, device: torch.device) -> None:
        params = random_params(shape.config, experts=shape.experts, with_mtp=False, device=device)
        self.model = Transformer(shape.config, prepare_params(params, backend), torch.bfloat16, backend=backend)
        limits = EngineConfig(max_context_tokens=512, max_concurrent_requests=1, max_chunk_tokens=512)
        self.cache = KVCacheManager(shape.config, self.model.schedule, limits, device=device, plain_dtype=None)
        generator = torch.Generator().manual_seed(num_tokens)
        self.token_ids = torch.randint(shape.config.vocab_size, (num_tokens,), generator=generator).tolist()

    def precompile(self, cuts: Sequence[Sequence[int]]) -> None:
        """What the cuts will launch, on all cores."""
        if self.cache.device.type == "cuda" and can_compile_in_parallel():
            sizes = {length for cut in cuts for length in cut} | {len(self.token_ids)}
            precompile(self.model, self.cache, sorted(sizes))

    @torch.no_grad()
    def logits(self, cut: Sequence[int], begin: Callable[[int, int], None] = lambda start, stop: None) -> Tensor:
        """Of all tokens, on the CPU, from calls of so many each; `begin` hears which tokens the next call has."""
        assert sum(cut) == len(self.token_ids), cut
        slot, rows, start = self.cache.admit(len(self.token_ids)), [], 0
        for length in cut:
            begin(start, start + length)
            batch = self.cache.make_batch([slot], [self.token_ids[start : start + length]])
            rows.append(self.model.logits(self.model.forward(batch, self.cache.handle)).cpu())
            start += length
        self.cache.release(slot)
        return torch.cat(rows)

    def differing_rows(self, cut: Sequence[int]) -> list[int]:
        """Tokens whose logits are not those of one go."""
        whole, pieces = self.logits([len(self.token_ids)]), self.logits(cut)
        return (bits_of(whole) != bits_of(pieces)).any(-1).nonzero().flatten().tolist()

    def first_difference(self, cut: Sequence[int]) -> str:
        """Which call of which op first gives some row of a piece other bits than in one go."""
        context, calls = self.model.context, dict[tuple[int, int], list[OpResult]]()
        backend = context.backend
        names = [field.name for field in fields(OpSet)]
        results: list[OpResult] = []

        def begin(start: int, stop: int) -> None:
            nonlocal results
            results = calls.setdefault((start, stop), [])

        def watched(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                result = op(*arguments, **options)
                results.append(OpResult(name, [tensor.detach().clone() for tensor in _tensors(result)]))
                return result

            return call

        ops = {name: watched(name, getattr(backend.ops, name)) for name in names}
        self.model.context = replace(context, backend=backend.with_ops(**ops))
        try:
            self.logits([len(self.token_ids)], begin)
            self.logits(cut, begin)
        finally:
            self.model.context = context
        whole = calls.pop((0, len(self.token_ids)))
        for (start, stop), pieces in calls.items():
            found = next(_differences(whole, pieces, start, stop, len(self.token_ids)), None)
            if found is not None:
                return found
        return "no op's rows differ; what is left are rows in the cache"


def _differences(
    whole: list[OpResult], pieces: list[OpResult], start: int, stop: int, num_tokens: int
) -> Iterator[str]:
    for index, (one, other) in enumerate(zip(whole, pieces, strict=True)):
        for place, (expected, found) in enumerate(zip(one.tensors, other.tensors, strict=True)):
            if expected.shape[:1] != (num_tokens,) or found.shape[:1] != (stop - start,):
                continue
            differs = bits_of(expected[start:stop].contiguous()) != bits_of(found.contiguous())
            if differs.any():
                row = int(differs.flatten(1).any(-1).nonzero()[0]) if differs.dim() > 1 else int(differs.nonzero()[0])
                yield (
                    f"{one.op}, call {index}, output {place} {tuple(expected.shape)}: token {start + row} of "
                    f"{num_tokens} differs in a call of {stop - start}"
                )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
