"""What test_precompile.py needs a fresh process for: compiling, where the tests' own kernels are interpreted.

    python precompile_process.py NAME        prints one JSON line

`resident` and `offloaded` compile for the GPU that is there, the others for an sm_90 that need not be.
"""

import json
import logging
import os
import sys
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
import triton
import triton.compiler
from engine_cases import SMALL
from offload_cases import offload
from triton.runtime import driver

from dsv4.cache.manager import KVCacheManager
from dsv4.config import EngineConfig
from dsv4.engine.draft.round import make_drafter
from dsv4.engine.offload.placement import Placement
from dsv4.engine.run.bucket import Drafting
from dsv4.engine.run.bucket_sizes import decode_buckets
from dsv4.engine.run.compile_watch import CompileWatch
from dsv4.engine.run.precompile import precompile
from dsv4.engine.run.runner import Runner
from dsv4.llm_start import cache_schedule, stand_in_runner
from dsv4.llm_start import make_runner as make_loaded_runner
from dsv4.loader.checkpoint import Checkpoint
from dsv4.loader.weights import load_params
from dsv4.loader.write.synth import random_params, write_checkpoint
from dsv4.model.prepare import prepare_params
from dsv4.model.transformer import Transformer
from dsv4.ops import TRITON, compile_only, compile_workers
from dsv4.ops.compile_only import compiled_in_parallel, launches_only_compile
from dsv4.ops.lib import guard
from dsv4.ops.lib.guard import jit, tl
from dsv4.tools.selftest.own import short_checks
from tools.compiled.compile_check import OfflineDriver

# both routers; the attention with the most kernels
TWO_LAYERS = replace(SMALL, num_hidden_layers=2, compress_ratios=(4, 4), num_nextn_predict_layers=0)

DRAFTERS = {"mtp": SMALL, "dspark": SMALL.with_dspark(noise_token_id=3, markov_rank=128, block_size=3)}


@jit
def _copy_kernel(x_ptr, out_ptr, N: tl.constexpr):
    places = tl.arange(0, N)
    tl.store(out_ptr + places, tl.load(x_ptr + places))


@jit
def _broken_kernel(x_ptr, out_ptr, N: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, N), tl.load(x_ptr + tl.arange(0, 2 * N)))


@jit
def _slow_kernel(x_ptr, out_ptr, N: tl.constexpr):
    tl.store(out_ptr, N)


@jit
def _slowest_kernel(x_ptr, out_ptr, N: tl.constexpr):
    tl.store(out_ptr, N)


def toy():
    """A kernel of two sizes, at one of them twice, and one that does not compile; then each alone."""
    use_offline_driver()
    watch, seen, launchers, error, logged = CompileWatch(), [], [], "", logging.Handler()
    logged.emit = lambda record: warnings.append(record.getMessage())
    warnings = []
    logging.getLogger("dsv4.engine").addHandler(logged)
    driver.active.launcher_cls = lambda source, metadata: launchers.append((source.name, metadata.name))
    x = torch.empty(64, device="meta")
    with watch, launches_only_compile() as launched:
        with compiled_in_parallel(lambda done, total: seen.append((done, total))):
            for size in (16, 32, 16):
                _copy_kernel[(1,)](x, x, N=size)
            _broken_kernel[(1,)](x, x, N=16)
        in_parallel = list(watch.names)
        _copy_kernel[(1,)](x, x, N=16)
        after = watch.names[len(in_parallel) :]
        try:
            _broken_kernel[(1,)](x, x, N=16)
        except Exception as found:
            error = str(found)
    return {
        "names": in_parallel, "launchers": launchers, "after": after, "seen": seen, "num_launched": len(launched),
        "error": error, "warnings": warnings,
    }  # fmt: skip


def order():
    """On one core: the names of kernels in the order in which they are compiled; none where the block fails."""
    begun = []

    def compile_kernel(source, **options):
        begun.append(source.name)
        return source

    compile_nothing()
    triton.compiler.compile, compile_only.SLOWEST = compile_kernel, ("_slowest_kernel", "_slow_kernel")
    x = torch.empty(64, device="meta")
    with launches_only_compile(), compiled_in_parallel():
        for kernel in (_copy_kernel, _slow_kernel, _broken_kernel, _slowest_kernel):
            kernel[(1,)](x, x, N=16)
    with suppress(KeyError), launches_only_compile(), compiled_in_parallel():
        _copy_kernel[(1,)](x, x, N=32)
        raise KeyError
    return begun


def workers():
    """Kernels of the package on a cold cache: which this process compiles, and which it finds, when workers do their
    work and when they are killed at once."""
    use_offline_driver()
    os.sched_getaffinity = lambda process: {0, 1}
    found, listed = [], []
    triton.knobs.compilation.listener = lambda *, src, cache_hit, **facts: listed.append((src.name, cache_hit))
    start = compile_workers.Workers.__init__

    def start_and_kill(self, count):
        start(self, count)
        self._process.kill()
        self._process.wait()

    for starting in (start, start_and_kill):
        compile_workers.Workers.__init__ = starting
        with tempfile.TemporaryDirectory() as folder, launches_only_compile(), compiled_in_parallel():
            triton.knobs.cache.dir = folder
            for size in (128, 256) if starting is start else (512, 1024):
                x = torch.empty((4, size), dtype=torch.bfloat16, device="meta")
                TRITON.ops.rms_norm(x, None, 1e-6)
        found.append({"here": [name for name, is_hit in listed if not is_hit], "num_found": len(listed)})
        listed.clear()
    return found


def offline():
    """Two passes over a model, and a third over one with a norm that does not begin at a multiple of 16 bytes."""
    use_offline_driver()
    params = prepare_params(random_params(TWO_LAYERS), TRITON)
    model = Transformer(TWO_LAYERS, params, torch.bfloat16, backend=TRITON)
    cache = make_cache(model, "cpu")
    watch, seen = CompileWatch(), []
    with watch:
        precompile(model, cache, [1], progress=lambda done, total: seen.append((done, total)))
        first = take(watch.names)
        precompile(model, cache, [1])
        second = take(watch.names)
        attn = params.layers[0].attn
        shifted = replace(attn, q_norm=torch.cat([attn.q_norm[:1], attn.q_norm])[1:])
        params.layers[0] = replace(params.layers[0], attn=shifted)
        precompile(model, cache, [1])
    return {"first": first, "second": second, "shifted": watch.names, "seen": seen}


def keys():
    """Kernels that stand-ins launch, and those that the models themselves launch besides: with a compiler that takes no
    time, at all sizes, with experts on the device and off it."""
    compile_nothing()
    watch, found = CompileWatch(), []
    with watch:
        cases = [(None, None), (Placement(1, 2), None), (Placement(2, 2), None)]
        cases += [(None, "mtp"), (Placement(1, 2), "dspark")]
        for placement, kind in cases:
            runner = make_runner(placement, "cpu", kind)
            sizes = runner._direct_sizes()
            precompile_for(runner, sizes)
            ahead = take(watch.names)
            num_launches = sum(launch_without_running(runner, size) for size in sizes)
            found.append({"ahead": ahead, "late": take(watch.names), "num_launches": num_launches})
    return found


def headers():
    """Kernels that a stand-in made of a checkpoint's headers compiles, and those that the loaded model has besides."""
    compile_nothing()
    watch, found = CompileWatch(), []
    limits = EngineConfig(
        max_context_tokens=256, max_concurrent_requests=8, max_chunk_tokens=64, max_draft_tokens=2,
        cache_host_bytes=2**20,
    )  # fmt: skip
    cases = [(SMALL, "mxfp4", "off"), (SMALL, "nvfp4", 2), (DRAFTERS["dspark"], "mxfp4", 2)]
    for config, experts, drafts in cases:
        with tempfile.TemporaryDirectory() as place, watch:
            checkpoint = Checkpoint.open(write_checkpoint(Path(place) / "model", config, experts=experts))
            stand_in_runner(checkpoint, config, limits, TRITON, drafts, torch.bfloat16).precompile(raises=True)
            ahead, is_compiler_there = take(watch.names), "torch._dynamo" in sys.modules
            model = Transformer(
                config, prepare_params(load_params(checkpoint, config), TRITON), torch.bfloat16, backend=TRITON
            )
            schedule = cache_schedule(config, model.params, limits)
            cache = KVCacheManager(config, schedule, limits, device="cpu", plain_dtype=None)
            runner, _ = make_loaded_runner(model, cache, limits, drafts, use_graphs=False)
            runner.precompile(raises=True)
        found.append({"ahead": ahead, "late": take(watch.names), "is_compiler_there": is_compiler_there})
    return found


def first_check():
    """What the check before a model is served compiles, of a model whose steps are compiled."""
    compile_nothing()
    config = replace(SMALL, max_position_embeddings=4096)
    limits = EngineConfig(max_context_tokens=4096, max_concurrent_requests=32, max_chunk_tokens=512)
    model = Transformer(config, prepare_params(random_params(config), TRITON), torch.bfloat16, backend=TRITON)
    cache = KVCacheManager(config, model.schedule, limits, device="cpu", plain_dtype=None)
    runner, watch = Runner(model, cache, buckets=decode_buckets(8), use_graphs=False), CompileWatch()
    with watch:
        precompile_for(runner, runner._direct_sizes())
        ahead = take(watch.names)
        with nothing_runs() as launched:
            checks = short_checks(model, limits.max_context_tokens)
    return {"ahead": ahead, "late": watch.names, "num_launches": len(launched), "num_checks": len(checks)}


def launch_without_running(runner, size):
    """How many launches a call has as `warm_up` makes it."""
    with nothing_runs() as launched:
        runner._compile(size)
    return len(launched)


@contextmanager
def nothing_runs():
    """Launches on tensors in memory only compile. What they would have written, ids among it, is 0."""
    is_meta, compile_only._is_meta = compile_only._is_meta, lambda argument: True
    empty, empty_like = torch.empty, torch.empty_like
    torch.empty = torch.zeros
    torch.empty_like = lambda like, memory_format=None, **options: torch.zeros_like(like, **options)
    with launches_only_compile() as launched:
        guard.LAUNCH_DEVICES |= {"cpu"}
        yield launched
    torch.empty, torch.empty_like, compile_only._is_meta = empty, empty_like, is_meta


def resident():
    return on_gpu(None)


def offloaded():
    return on_gpu(Placement(1, 2))


def on_gpu(placement):
    """What is compiled ahead, and what the first calls then still compile."""
    runner = make_runner(placement, "cuda")
    sizes = runner._direct_sizes()
    before = torch.cuda.memory_allocated()
    with runner._compiles:
        precompile_for(runner, sizes)
        ahead, num_bytes = take(runner._compiles.names), torch.cuda.memory_allocated() - before
        for size in sizes:
            runner._compile(size)
    late = take(runner._compiles.names)
    runner.warm_up()
    return {"ahead": ahead, "late": late, "num_bytes": num_bytes, "captured": runner.captured}


def precompile_for(runner, sizes):
    drafting, max_draws = runner.drafting, runner.max_draws
    precompile(runner.model, runner.cache, sizes, runner.experts, max_draws=max_draws, drafting=drafting)


def make_runner(placement, device, kind=None):
    """With experts off the device as placed, if they are, and a drafter of a kind, if one is named."""
    config = SMALL if kind is None else DRAFTERS[kind]
    params, pool = prepare_params(random_params(config, device=device), TRITON), None
    if placement is not None:
        params, pool = offload(params, placement, TRITON, top_k=config.num_experts_per_tok, device=device)
    model = Transformer(config, params, torch.bfloat16, backend=TRITON if pool is None else pool.backend)
    cache, drafting = make_cache(model, device, 0 if kind is None else 3), None
    if kind is not None:
        drafting = Drafting(make_drafter(model, cache), 3, (1, 3))
    use_graphs = device == "cuda"
    return Runner(model, cache, buckets=decode_buckets(8), use_graphs=use_graphs, experts=pool, drafting=drafting)


def make_cache(model, device, max_drafts=0):
    limits = EngineConfig(
        max_context_tokens=256, max_concurrent_requests=8, max_chunk_tokens=64, max_draft_tokens=max_drafts
    )
    return KVCacheManager(model.config, model.schedule, limits, device=device, plain_dtype=None)


def take(names):
    taken = list(names)
    names.clear()
    return taken


def compile_nothing():
    """From now on a compiler that takes no time; without workers, who would have the real one."""
    use_offline_driver()
    triton.compiler.compile = lambda source, **options: source
    os.sched_getaffinity = lambda process: {0}


def use_offline_driver():
    driver.set_active(OfflineDriver(90))


if __name__ == "__main__":
    with torch.no_grad():
        functions = (toy, order, workers, first_check, keys, headers, offline, resident, offloaded)
        print(json.dumps({function.__name__: function for function in functions}[sys.argv[1]]()))
