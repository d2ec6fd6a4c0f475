"""Branches: a call beside a block may run first or last, or at any time between, and is joined where the block ends.

On a GPU the graph decides. Here both extremes run, with the oracles and with the kernels in the interpreter, and what
may overlap must take different counters.
"""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from test_reproducibility import CONFIG

from dsv4.cache.manager import KVCacheManager
from dsv4.config import EngineConfig
from dsv4.dist.exchange import Rows
from dsv4.loader.write.synth import random_params
from dsv4.model.branches import Branches
from dsv4.model.prepare import prepare_params
from dsv4.model.transformer import Transformer
from dsv4.ops import TORCH, TRITON
from dsv4.ops.lib.arrivals import arrival_counters
from dsv4.testing.inputs import kernel_device
from dsv4.testing.numeric import assert_bitwise
from dsv4.testing.op_call import op_modules

MAY_OVERLAP = (
    "rms_norm_quant", "linears", "attention_inputs", "compress", "compress_pair", "moe_parts", "moe_shared",
)  # fmt: skip
OP_MODULES = op_modules()
KERNELS = replace(TORCH, layout=TRITON.layout).with_ops(**{name: getattr(TRITON.ops, name) for name in MAY_OVERLAP})


class Alone:
    """The exchange of a rank that owns every expert."""

    size, can_capture = 1, False

    def dispatch(self, x, experts, weights, slots):
        return Rows(x, experts, weights, experts)

    def collect(self, parts, rows):
        return parts


class Last(Branches):
    """Runs each call as late as can be, at the join. `at` is where things are: "call", "block" or None."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.calls, self.at = [], None

    @contextmanager
    def beside(self, call, can_fork=True):
        assert self.at is None, "a branch within a branch"
        self.at = None if call is None else "block"
        yield
        if call is not None:
            self.at = "call"
            self.calls.append(call.func.__name__)
            call()
        self.at = None


def run(backend, branches, chunks, drafts=0, exchange=None):
    """Logits after each call and the rows of the rings. `chunks`: for each call the tokens of each of two requests."""
    params = prepare_params(random_params(CONFIG, seed=3, device=kernel_device(), with_mtp=False), backend)
    model = Transformer(CONFIG, params, torch.bfloat16, backend=backend, exchange=exchange)
    if branches is not None:
        model.context = replace(model.context, branches=branches)
    limits = EngineConfig(
        max_context_tokens=256, max_concurrent_requests=2, max_chunk_tokens=64, max_draft_tokens=drafts
    )
    cache = KVCacheManager(CONFIG, model.schedule, limits, device=kernel_device(), plain_dtype=None)
    slots, found = [cache.admit(200), cache.admit(200)], []
    for lengths in chunks:
        pieces = {
            slot: [(7 * i + slot) % 64 for i in range(num)] for slot, num in zip(slots, lengths, strict=True) if num
        }
        batch = cache.make_batch(list(pieces), list(pieces.values()))
        found.append(model.logits(model.forward(batch, cache.handle)))
        cache.check_integrity()
    rings = [cache.handle(layer).window for layer in range(len(model.schedule))]
    return torch.cat(found), torch.cat([ring.rows.data for ring in rings]), torch.cat([r.positions for r in rings])


def assert_same(found, expected):
    for left, right in zip(found, expected, strict=True):
        assert_bitwise(left, right)


@pytest.mark.parametrize("chunks", [[(9, 0), (1, 0), (1, 0)], [(130, 5), (1, 1), (2, 1)]], ids=["one", "two"])
def test_a_call_may_run_last(chunks):
    last = Last()
    assert_same(run(TORCH, last, chunks), run(TORCH, None, chunks))
    assert set(last.calls) == {"compress_ref", "compress_pair_ref"}
    assert_same(run(TORCH, last, chunks, exchange=Alone()), run(TORCH, None, chunks))
    assert set(last.calls) == {"compress_ref", "compress_pair_ref", "moe_shared_ref"}


def test_the_comparison_sees_a_call_that_is_too_late():
    """Entries written at the next layer: the first token to close one must see it."""

    class TooLate(Last):
        late = None

        @contextmanager
        def beside(self, call, can_fork=True):
            yield
            before, self.late = self.late, call
            if before is not None:
                before()

    chunks = [(8, 0), (1, 0)]
    assert not torch.equal(run(TORCH, TooLate(), chunks)[0], run(TORCH, None, chunks)[0])


def test_short_chunks_are_appended_with_their_rows():
    """One token, and as many drafts as the ring has room for: no call of its own writes the ring; the same bits."""
    chunks = [(9, 0), (1, 0), (3, 0), (1, 1), (3, 1)]
    sizes = []

    def append(rows, window, batch):
        sizes.append(batch.num_tokens)
        TORCH.ops.append_swa(rows, window, batch)

    backend, count = TORCH.with_ops(append_swa=append), len(CONFIG.compress_ratios)
    found = run(backend, None, chunks, drafts=2)
    assert sizes == [9] * count + [4] * count, "four tokens, of which three may be one chunk"
    sizes.clear()
    assert_bitwise(found[0], run(backend, None, chunks)[0])
    assert sizes == [9] * count + [3] * count + [2] * count + [4] * count


def test_counters_are_all_that_launches_share():
    """No other op module keeps a tensor from one launch to the next, but a constant that no launch writes."""
    values = [held for module in OP_MODULES for held in vars(module).values()]
    kept = {held.__name__ for held in values if hasattr(held, "cache_info") and "Tensor" in str(held.__annotations__)}
    assert kept == {"arrival_counters", "_kept_no_choices"}
    assert not any(isinstance(held, torch.Tensor) for held in values)


def test_what_may_overlap_takes_different_counters(monkeypatch):
    """Kernels: the same bits first and last, and counters of a call are never those of its block."""
    last = Last()
    taken = {"call": set(), "block": set()}

    def counters(purpose, device, *start):
        if last.at is not None:
            taken[last.at].add(purpose)
        return arrival_counters(purpose, device, *start)

    for module in OP_MODULES:
        if hasattr(module, "arrival_counters"):
            monkeypatch.setattr(module, "arrival_counters", counters)
    chunks = [(2, 0), (1, 0)]
    found = run(KERNELS, last, chunks, exchange=Alone())
    assert set(last.calls) == {"compress", "compress_pair", "moe_shared"}
    assert taken["call"] == {"compress", "shared expert", "shared expert gate and up"}
    assert taken["block"] == {"linear", "parts", "moe gate and up"}
    assert_same(found, run(KERNELS, None, chunks, exchange=Alone()))


@pytest.mark.gpu
def test_a_graph_forks_and_joins():
    """A call on the second stream: what it read and wrote is right after many replays, and its memory is its own."""
    device = torch.device("cuda")
    branches = Branches(device)
    source, kept = torch.zeros(1 << 20, device=device), torch.zeros(1 << 20, device=device)

    def accumulate(made):
        kept.add_((made * 3).cumsum(0) / (1 << 20))

    def step():
        with branches.beside(partial(accumulate, source + 1)):  # nobody else holds the sum
            other = source * 2
            for _ in range(20):
                other = other + torch.empty_like(source).fill_(1)
        return other + kept

    step()
    torch.cuda.synchronize()
    kept.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    expected = torch.zeros_like(kept)
    for replay in range(5):
        source.fill_(replay)
        graph.replay()
        expected += (torch.full_like(source, replay + 1) * 3).cumsum(0) / (1 << 20)
        assert_bitwise(out, source * 2 + 20 + expected)
