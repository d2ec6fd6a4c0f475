"""A model's streams and logits of a prompt in one go against the same prompt in pieces, row by row, bit for bit; and
where they differ, the first call of an op whose row differs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.cache.manager import KVCacheManager
from dsv4.config import EngineConfig
from dsv4.engine.run.precompile import stand_in
from dsv4.loader.write.synth import random_params
from dsv4.model.prepare import prepare_params
from dsv4.model.transformer import Transformer
from dsv4.ops import Backend, OpSet
from dsv4.ops.compile_only import can_compile_in_parallel, compiled_in_parallel, launches_only_compile
from dsv4.testing.numeric import bits_of
from dsv4.testing.random_shapes import RandomModel


class OpResult(NamedTuple):
    """What one call of an op returned, tensor by tensor."""

    op: str
    tensors: list[Tensor]


class Cut(NamedTuple):
    """A prompt's calls: tokens of its own in each, behind tokens of another request in the same call."""

    lengths: Sequence[int]
    beside: Sequence[int] = ()


# one for each form of an op, and for each alignment of a batch's rows: what calls of any number of tokens launch
SIZES = (1, 6, 12, 17, 48, 65, 257, 400, 512, 1100)
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
    """A model with a cache of its own for two requests of `num_tokens` (or `max_context_tokens`, if it is to have room
    for more); calls are made directly, without graphs. Logits are made for at most `head_rows` rows at once."""

    def __init__(
        self, model: Transformer, num_tokens: int, shape: RandomModel | None = None, head_rows: int | None = None,
        max_context_tokens: int | None = None,
    ) -> None:  # fmt: skip
        self.model, self.shape, self.head_rows = model, shape, head_rows or num_tokens
        limits = EngineConfig(
            max_context_tokens=max_context_tokens or num_tokens, max_concurrent_requests=2,
            max_chunk_tokens=2 * num_tokens, prefix_cache_bytes=0,
        )  # fmt: skip
        schedule = model.schedule[: model.config.num_hidden_layers]
        self.cache = KVCacheManager(
            model.config, schedule, limits, device=model.weights.embed.device, plain_dtype=None
        )  # fmt: skip
        generator = torch.Generator().manual_seed(num_tokens)
        drawn = torch.randint(model.config.vocab_size, (2, num_tokens), generator=generator)
        self.token_ids, self.other_ids = drawn.tolist()

    @classmethod
    def random(cls, shape: RandomModel, num_tokens: int, backend: Backend, device: torch.device) -> CutModel:
        params = random_params(shape.config, experts=shape.experts, with_mtp=False, device=device)
        params = prepare_params(params, backend)
        return cls(Transformer(shape.config, params, torch.bfloat16, backend=backend), num_tokens, shape)

    @torch.no_grad()
    def rows(self, cut: Cut, begin: Callable[[int, int, int], None] = lambda start, stop, beside: None) -> Tensor:
        """Streams and logits of all tokens, on the CPU; `begin` hears which tokens the next call has, and behind how
        many others."""
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
            streams = self.model.forward(batch, self.cache.handle)[beside:]
            logits = torch.cat([self.model.logits(part) for part in streams.split(self.head_rows)])
            rows.append(torch.cat([streams.flatten(1).float(), logits.float()], 1).cpu())
            start, before = start + length, before + beside
        for slot in slots:
            self.cache.release(slot)
        return torch.cat(rows)

    @property
    def one_go(self) -> Cut:
        return Cut([len(self.token_ids)])

    def differing_rows(self, cut: Cut) -> list[int]:
        """Tokens whose streams or logits are not those of one go."""
        whole, pieces = self.rows(self.one_go), self.rows(cut)
        return (bits_of(whole) != bits_of(pieces)).any(-1).nonzero().flatten().tolist()

    def first_difference(self, cut: Cut) -> str:
        """Which call of which op first gives some row of a piece other bits than in one go."""
        calls = dict[tuple[int, int, int], list[OpResult]]()
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

        with self.watching(watched):
            self.rows(self.one_go, begin)
            whole = results
            self.rows(cut, begin)
        for place, pieces in calls.items():
            found = next(_differences(whole, pieces, place, len(self.token_ids)), None)
            if found is not None:
                return found
        return "no op's rows differ; what is left are rows in the cache"

    @contextmanager
    def watching(self, watched: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
        """Inside, every op is what `watched` makes of its name and it."""
        context = self.model.context
        ops = {field.name: watched(field.name, getattr(context.ops, field.name)) for field in fields(OpSet)}
        self.model.context = replace(context, backend=context.backend.with_ops(**ops))
        try:
            yield
        finally:
            self.model.context = context


def compile_models(models: Sequence[CutModel], progress: Callable[[int, int], None] = lambda done, total: None) -> None:
    """What calls of any number of tokens launch, on all cores."""
    if not can_compile_in_parallel():
        return
    with launches_only_compile(), compiled_in_parallel(progress):
        for one in models:
            resident = stand_in(one.model, one.cache)
            sizes = [size for size in SIZES if size <= len(one.token_ids)]
            for size in sorted(sizes, reverse=True):  # the kernels of many rows take longest
                resident.launch(size, min(size, one.head_rows))


def _differences(
    whole: list[OpResult], pieces: list[OpResult], place: tuple[int, int, int], num_tokens: int
) -> Iterator[str]:
    start, stop, beside = place
    for index, (one, other) in enumerate(zip(whole, pieces, strict=False)):
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
