"""Whether an op's forms add up in one order at a model's shape: every call of a step, compiled for several numbers of
tokens and compared by `sum_orders`. Needs no GPU, and no memory for a cache: stand-ins are launched.

    python -m tools.compiled.form_orders ['{"hidden_size": 384, ...}' ...]     changes of `ModelConfig.tiny`
    python -m tools.compiled.form_orders 0 8 16                               random models, by number

One line for each function whose sums differ from one number of tokens to another, or "equal". Functions that only some
forms call are not compared: tests/ops/test_kernels_compile.py has those that must agree by name. It runs in a process
of its own, because TRITON_INTERPRET must not be set, and because Triton stops at TTGIR there.
"""

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch

from dsv4.cache.manager import KVCacheManager
from dsv4.config import EngineConfig, ModelConfig
from dsv4.engine.run.precompile import stand_in
from dsv4.loader.write.synth import random_params
from dsv4.model.prepare import prepare_params
from dsv4.model.transformer import Transformer
from dsv4.ops import TRITON, Backend, OpSet
from dsv4.testing.random_shapes import random_model
from tools.compiled.compile_check import offline
from tools.compiled.sum_orders import orders_of

ARCHITECTURE = 90
# numbers of tokens on both sides of every change of form (plan.py of each op)
SIZES = (1, 4, 8, 16, 17, 40, 100, 200, 300, 513, 600)
FEW_SIZES = (16, 40, 600)  # of a random model: one for each side of the changes at 16 and at 512


class Found(NamedTuple):
    """Of one call of an op in a step: the orders of every function's sums, by the number of tokens."""

    op: str
    orders: dict[str, dict[int, frozenset[str]]]

    def differences(self) -> dict[str, dict[frozenset[str], list[int]]]:
        """Functions with more than one order, and the numbers of tokens that have each."""
        found = {}
        for where, by_size in self.orders.items():
            sizes: dict[frozenset[str], list[int]] = defaultdict(list)
            for size, orders in by_size.items():
                sizes[orders].append(size)
            if len(sizes) > 1:
                found[where] = dict(sizes)
        return found


def find_orders(config: ModelConfig, sizes: Sequence[int] = SIZES) -> list[Found]:
    """The calls of a step, one layer of each kind, in the order in which a model makes them."""
    recorder = _Recorder()
    backend = recorder.watching(TRITON)
    params = prepare_params(random_params(config, with_mtp=False), TRITON)
    model = Transformer(config, params, torch.bfloat16, backend=backend)
    limits = EngineConfig(max_context_tokens=1024, max_concurrent_requests=2, max_chunk_tokens=128)
    cache = KVCacheManager(config, model.schedule, limits, device="cpu", plain_dtype=None)
    resident = stand_in(model, cache)
    for size in sizes:
        with offline(ARCHITECTURE) as recorder.kernels:
            recorder.begin(size)
            resident.launch(size, 1)
    return recorder.found()


class _Recorder:
    """Wraps ops: what a call compiles is its own."""

    def __init__(self) -> None:
        self.kernels: list[Any] = []
        self.size, self.calls = 0, 0
        self.orders: dict[tuple[int, str], dict[str, dict[int, frozenset[str]]]] = {}

    def watching(self, backend: Backend) -> Backend:
        ops = {field.name: getattr(backend.ops, field.name) for field in fields(OpSet)}
        return backend.with_ops(**{name: self._watched(name, op) for name, op in ops.items()})

    def begin(self, size: int) -> None:
        self.size, self.calls = size, 0

    def _watched(self, name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            num_before = len(self.kernels)
            result = op(*arguments, **options)
            found: dict[str, set[str]] = defaultdict(set)
            for kernel in self.kernels[num_before:]:
                for order in orders_of(kernel.asm["ttgir"]):
                    if order.kind != "product":
                        found[order.where].add(order.order)
            by_where = self.orders.setdefault((self.calls, name), {})
            for where, orders in found.items():
                by_where.setdefault(where, {})[self.size] = frozenset(orders)
            self.calls += 1
            return result

        return call

    def found(self) -> list[Found]:
        return [Found(op, orders) for (_, op), orders in sorted(self.orders.items(), key=lambda item: item[0])]


@contextmanager
def only_layouts() -> Iterator[None]:
    """Triton stops at TTGIR, with a cache of its own; for a process that ends behind it."""
    from triton import knobs
    from triton.backends.nvidia.compiler import CUDABackend

    def make_llir(self: Any, source: Any, metadata: dict[str, Any], *arguments: Any) -> str:
        sizes = ("shared", "tmem_size", "global_scratch_size", "profile_scratch_size")
        metadata.update(dict.fromkeys(sizes, 0), global_scratch_align=1, profile_scratch_align=1)
        return ""

    def make_ptx(self: Any, source: Any, metadata: dict[str, Any], *arguments: Any) -> str:
        metadata["name"] = "kernel"
        return ""

    with tempfile.TemporaryDirectory() as folder:
        knobs.cache.dir = folder
        CUDABackend.make_llir, CUDABackend.make_ptx = make_llir, make_ptx
        CUDABackend.make_cubin = lambda self, *arguments: b""
        yield


BASE = ModelConfig.tiny(num_nextn_predict_layers=0, num_hidden_layers=3, compress_ratios=(0, 4, 128))


def lines_of(config: ModelConfig, sizes: Sequence[int] = SIZES) -> list[str]:
    """One for each function that adds in another order at some numbers of tokens; none where all is equal."""
    lines = set()
    for found in find_orders(config, sizes):
        for where, orders in found.differences().items():
            by_order = "; ".join(f"{sorted(one)} at {sizes} tokens" for one, sizes in orders.items())
            lines.add(f"{found.op}: {where}: {by_order}")
    return sorted(lines)


def main(changes: list[str]) -> None:
    with only_layouts(), torch.no_grad():
        for change in changes or ["{}"]:
            raw = json.loads(change)
            is_random = isinstance(raw, int)
            config = random_model(raw).config if is_random else replace(BASE, **raw)
            found = lines_of(config, FEW_SIZES if is_random else SIZES)
            print(change, *(found or ["equal"]), sep="\n  ", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
