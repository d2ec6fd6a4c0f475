"""What the hosts of several ranks do in a step, with a model that costs nothing (`free_model.py`): a process a rank on
this machine, with the sockets, engines and router of `dsv4 serve --gpus N`. Run by `python -m benchmarks host`.
"""

import json
import statistics
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.free_model import FREE_CONFIG, FreeRunner
from dsv4.cache.manager import KVCacheManager
from dsv4.config import EngineConfig
from dsv4.config.layers import build_schedule
from dsv4.dist.control import Leader, Progress, check_started
from dsv4.dist.follower import Follower
from dsv4.dist.mesh import Mesh, meet
from dsv4.engine.engine import Engine
from dsv4.engine.link.messages import EngineInfo
from dsv4.engine.ranks.agreement import Agreement
from dsv4.engine.ranks.engine import RanksEngine
from dsv4.engine.ranks.remote import RemoteRank
from dsv4.engine.ranks.start import serve_rank
from dsv4.loader.write.synth import random_params
from dsv4.model.transformer import Transformer
from dsv4.request import SamplingParams

HOST, TOKEN = "127.0.0.1", b"sixteen bytes ok"
NUM_TOKENS, NUM_SKIPPED = 600, 50  # of an answer; steps before measuring


class Timed(Agreement):
    """Keeps what agreeing took: seconds of this thread, and of the clock."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.took: list[tuple[float, float]] = []

    def _exchange(self, kind: int, *sizes: int) -> Any:
        thread, clock = time.thread_time(), time.perf_counter()
        said = super()._exchange(kind, *sizes)
        self.took.append((time.thread_time() - thread, time.perf_counter() - clock))
        return said


def make_engine(num_requests: int, link: Any, mesh: Mesh, progress: Progress) -> tuple[Engine, Timed]:
    limits = EngineConfig(max_context_tokens=1024, max_concurrent_requests=num_requests, max_chunk_tokens=8192)
    model = Transformer(FREE_CONFIG, random_params(FREE_CONFIG), torch.bfloat16)
    cache = KVCacheManager(FREE_CONFIG, build_schedule(FREE_CONFIG), limits, device="cpu", plain_dtype=None)
    agreement = Timed(mesh.steps, link, progress, lambda said: None)
    runner = FreeRunner(model, cache, buckets=(), use_graphs=False)
    return Engine(model, cache, runner=runner, overlap=True, sizes=agreement), agreement


def measure(size: int, num_requests: int, num_waiting: int = 0) -> list[dict[str, Any]]:
    """Medians over the steps of a decoding batch of so many requests on each rank, while `num_waiting` wait for one."""
    torch.set_num_threads(1)
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    progress = Progress()
    work = {"port": store.port, "size": size, "requests": num_requests}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.rank_host", json.dumps(work | {"rank": rank})], stdout=subprocess.PIPE
        )
        for rank in range(1, size)
    ]  # fmt: skip
    mesh = meet(store, 0, size, HOST, TOKEN, lambda: check_started(processes))
    link = Leader(mesh.watch, progress, processes=processes)
    own, agreement = make_engine(num_requests, link, mesh, progress)
    engine = RanksEngine(own, agreement, [RemoteRank(rank, mesh.requests[rank]) for rank in range(1, size)], link)
    for seed in range(size * num_requests):
        engine.add([7] * 20, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=seed))
    waiting = [engine.add([7] * 20, SamplingParams(max_tokens=1)) for _ in range(num_waiting)]
    steps: list[tuple[float, float]] = []
    while engine.has_work:
        if len(steps) == NUM_TOKENS - NUM_SKIPPED:
            for request in waiting:
                engine.abort(request)
        thread, clock = time.thread_time(), time.perf_counter()
        engine.step()
        steps.append((time.thread_time() - thread, time.perf_counter() - clock))
    link.stop()
    outputs = [json.loads(one.stdout.read()) for one in processes if one.stdout is not None]
    shapes = {"ranks": size, "requests": num_requests} | ({"waiting": num_waiting} if num_waiting else {})
    kept, agreed = steps[NUM_SKIPPED:-NUM_SKIPPED], agreement.took[NUM_SKIPPED:-NUM_SKIPPED]
    return [
        _record("rank_step", shapes | {"of": "rank 0, which routes"}, kept),
        _record("rank_agreement", shapes | {"of": "rank 0"}, agreed),
        *(
            {"kind": "host", "op": "rank_step", "shapes": shapes | {"of": f"rank {rank}, all of its process"},
             "mean_us": round(found["us"], 2), "repeats": found["steps"]}
            for rank, found in enumerate(outputs, 1)
        ),
    ]  # fmt: skip


def _record(op: str, shapes: dict[str, Any], took: list[tuple[float, float]]) -> dict[str, Any]:
    thread, clock = ([1e6 * one[place] for one in took] for place in (0, 1))
    tenths = statistics.quantiles(thread, n=10), statistics.quantiles(clock, n=10)
    return {
        "kind": "host", "op": op, "shapes": shapes, "median_us": round(statistics.median(thread), 2),
        "p10_us": round(tenths[0][0], 2), "p90_us": round(tenths[0][-1], 2),
        "clock_p10_us": round(tenths[1][0], 2), "clock_median_us": round(statistics.median(clock), 2),
        "repeats": len(took),
    }  # fmt: skip


def follow(work: dict[str, int]) -> None:
    """Another rank, until rank 0 ends it."""
    torch.set_num_threads(1)
    rank, size, progress = work["rank"], work["size"], Progress()
    store = dist.TCPStore(HOST, work["port"], is_master=False)
    mesh = meet(store, rank, size, HOST, TOKEN)
    link = Follower(mesh.watch[0], rank, progress)
    engine, agreement = make_engine(work["requests"], link, mesh, progress)
    control: Any = SimpleNamespace(weights=("", "0"), is_paused=False)
    info = EngineInfo("", FREE_CONFIG.vocab_size, 0, 1024, work["requests"], engine.cache.schema.num_blocks)
    times: list[float] = []
    agree = agreement.agree

    def timed(own: Any) -> Any:
        times.append(time.process_time())
        return agree(own)

    agreement.agree = timed  # type: ignore[method-assign]
    serve_rank(engine, control, info, mesh.requests[0], link, progress)
    kept = times[NUM_SKIPPED:-NUM_SKIPPED]
    print(json.dumps({"us": 1e6 * (kept[-1] - kept[0]) / (len(kept) - 1), "steps": len(kept) - 1}))


if __name__ == "__main__":
    follow(json.loads(sys.argv[1]))
