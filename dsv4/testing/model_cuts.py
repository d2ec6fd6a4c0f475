"""A model's logits of a prompt in one go against the same prompt in pieces, row by row, bit for bit; and where they
differ, the first call of an op whose row differs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.cache.manager import KVCacheManager
from dsv4.config import EngineConfig
from dsv4.engine.run.precompile import stand_in
from dsv4.loader.synth import random_params
from dsv4.model.prepare import prepare_params
from dsv4.model.transformer import Transformer
from dsv4.ops import Backend, OpSet
from dsv4.ops.lib.compile_only import can_compile_in_parallel, compiled_in_parallel, launches_only_compile
from dsv4.testing.numeric import bits_of
from dsv4.testing.random_shapes import RandomModel


class OpResult(NamedTuple):
    """What one call of an op returned, tensor by tensor."""

    op: str
    tensors: list[Tensor]


class Cut(NamedTuple):
    """A prompt's calls: so many of its tokens each, behind so many of another request's in the same call."""

    lengths: Sequence[int]
    beside: Sequence[int] = ()


# one for each form of an op, and for each alignment of a batch's rows: what calls of any number of tokens launch
SIZES = (1, 6, 12, 17, 48, 65, 257, 400)
_LENGTHS = (1, 1, 2, 7, 15, 16, 17, 31, 33, 64, 65, 100, 130, 225, 300)


def random_cuts(num_tokens: int, seed: int) -> dict[str, Cut]:
    """Token by token at both ends, in chunks, and in chunks beside another request."""
    chance, some = random.Random(f"cuts {seed}"), min(16, num_tokens // 3)

    def chunks() -> list[int]:
        found: list[int] = []
        while sum(found) < num_tokens:
            found.append(min(chance.choice(_LENGTHS), num_tokens - sum(found)))
        return found

    single = [1] * some
    with_other = chunks()
    other = chunks()[: len(with_other)]
    return {
        "tokens": Cut([*single, num_tokens - 2 * some, *single]), "chunks": Cut(chunks()),
        "batch": Cut(with_other, [0, *other][: len(with_other)]),
    }  # fmt: skip


class CutModel:
    """A random model with a cache for two requests of `num_tokens`; calls are made directly, without graphs."""

    def __init__(self, shape: RandomModel, num_tokens: int, backend: Backend, device: torch.device) -> None:
        params = random_params(shape.config, experts=shape.experts, with_mtp=False, device=device)
        self.shape = shape
        self.model = Transformer(shape.config, prepare_params(params, backend), torch.bfloat16, backend=backend)
        limits = EngineConfig(max_context_tokens=num_tokens, max_concurrent_requests=2, max_chunk_tokens=2 * num_tokens)
        self.cache = KVCacheManager(shape.config, self.model.schedule, limits, device=device, plain_dtype=None)
        generator = torch.Generator().manual_seed(num_tokens)
        drawn = torch.randint(shape.config.vocab_size, (2, num_tokens), generator=generator)
        self.token_ids, self.other_ids = drawn.tolist()

    @torch.no_grad()
    def logits(self, cut: Cut, begin: Callable[[int, int, int], None] = lambda start, stop, beside: None) -> Tensor:
        """Of all tokens, on the CPU; `begin` hears which tokens the next call has, and behind how many others."""
        num_tokens = len(self.token_ids)
        assert sum(cut.lengths) == num_tokens, cut
        slots = [self.cache.admit(num_tokens) for _ in range(2)]
        rows, start, before = [], 0, 0
        for length, beside in zip_longest(cut.lengths, cut.beside, fillvalue=0):
            begin(start, start + length, beside)
            others = self.other_ids[before : before + beside]
            batch = self.cache.make_batch(
                slots[not beside :], [others, self.token_ids[start : start + length]][not beside :]
            )
            rows.append(self.model.logits(self.model.forward(batch, self.cache.handle))[beside:].cpu())
            start, before = start + length, before + beside
        for slot in slots:
            self.cache.release(slot)
        return torch.cat(rows)

    @property
    def one_go(self) -> Cut:
        return Cut([len(self.token_ids)])

    def differing_rows(self, cut: Cut) -> list[int]:
        """Tokens whose logits are not those of one go."""
        whole, pieces = self.logits(self.one_go), self.logits(cut)
        return (bits_of(whole) != bits_of(pieces)).any(-1).nonzero().flatten().tolist()

    def first_difference(self, cut: Cut) -> str:
        """Which call of which op first gives some row of a piece other bits than in one go."""
        context, calls = self.model.context, dict[tuple[int, int, int], list[OpResult]]()
        backend = context.backend
        names = [field.name for field in fields(OpSet)]
        results: list[OpResult] = []

        def begin(*place: int) -> None:
            nonlocal results
            results = calls.setdefault(place, [])  # type: ignore[arg-type]

        def watched(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                result = op(*arguments, **options)
                results.append(OpResult(name, [tensor.detach().clone() for tensor in _tensors(result)]))
                return result

            return call

        ops = {name: watched(name, getattr(backend.ops, name)) for name in names}
        self.model.context = replace(context, backend=backend.with_ops(**ops))
        try:
            self.logits(self.one_go, begin)
            whole = results
            self.logits(cut, begin)
        finally:
            self.model.context = context
        for place, pieces in calls.items():
            found = next(_differences(whole, pieces, place, len(self.token_ids)), None)
            if found is not None:
                return found
        return "no op's rows differ; what is left are rows in the cache"


def compile_models(models: Sequence[CutModel], progress: Callable[[int, int], None] = lambda done, total: None) -> None:
    """What calls of any number of tokens launch, on all cores."""
    if not can_compile_in_parallel():
        return
    with launches_only_compile(), compiled_in_parallel(progress):
        for one in models:
            resident = stand_in(one.model, one.cache)
            for size in sorted(SIZES, reverse=True):  # the kernels of many rows take longest
                resident.launch(size, size)


def _differences(
    whole: list[OpResult], pieces: list[OpResult], place: tuple[int, int, int], num_tokens: int
) -> Iterator[str]:
    start, stop, beside = place
    for index, (one, other) in enumerate(zip(whole, pieces, strict=True)):
        for output, (expected, found) in enumerate(zip(one.tensors, other.tensors, strict=True)):
            if expected.shape[:1] != (num_tokens,) or found.shape[:1] != (beside + stop - start,):
                continue
            differs = bits_of(expected[start:stop].contiguous()) != bits_of(found[beside:].contiguous())
            if differs.any():
                row = int(differs.flatten(1).any(-1).nonzero()[0]) if differs.dim() > 1 else int(differs.nonzero()[0])
                yield (
                    f"{one.op}, call {index}, output {output} {tuple(expected.shape)}: token {start + row} of "
                    f"{num_tokens} differs in a call of {beside + stop - start}"
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
