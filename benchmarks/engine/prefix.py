"""What the prefix cache costs and saves on one GPU: copies of all 43 layers, first tokens through a four-layer model.

    python -m benchmarks prefix --out benchmarks/results/nvidia-h200-prefix.jsonl

| section | what | records (`kind`) |
|---|---|---|
| copies | the whole of Flash's cache, no weights: save, restore, hits on device, host, disk | snapshot, hit, file |
| first token | SWA, CSA, HCA, CSA with NVFP4 experts, graphs on: a long prompt cold and from each tier | first_token |
| steps | decode steps that take a snapshot against those that do not | step |
| bits | every hit of the run read again without the cache, all rows and snapshots compared | bits |

The model of 43 layers (`modelled`): the copies as measured, the steps of four layers times 43 / 4, and what the host
does once for a long prompt: what a hit takes beyond a new prompt as short as the piece that a hit feeds. Files are
dropped from the page cache before they are read, where the system lets us. Hits are compared with the cold run, tokens
and log-probabilities. `--preset tiny --device cpu --tokens 1024` tries it without a GPU.
"""

import argparse
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch

from benchmarks.runner import NUM_LAYERS, Record, Session, free_memory, random_prompts, wait
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.tiers.payload import Payload
from dsv4.config import EngineConfig, ModelConfig
from dsv4.config.layers import build_schedule
from dsv4.llm import LLM
from dsv4.request import Completion, SamplingParams
from dsv4.tools.bench.context import cut_config, fill_cache
from dsv4.tools.bench.model import kernels_of, time_calls
from dsv4.tools.plan.targets import PRESETS

ANSWER = SamplingParams(max_tokens=8, seed=3, temperature=0.7, logprobs=2, ignore_eos=True)


SECTIONS = ("copies", "engine")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=32768, help="of the prompt; a multiple of 128")
    parser.add_argument("--host-mib", type=int, default=1024)
    parser.add_argument("--disk", help="folder for the files; by default the system's for temporary ones")


def run(session: Session) -> None:
    options = session.options
    with tempfile.TemporaryDirectory(dir=options.disk) as folder:
        for num_tokens in (options.tokens, 128) if session.wants("copies") else ():
            session.attempt(f"copies, {num_tokens} tokens", copies, options, folder, num_tokens)
    if not session.wants("engine"):
        return
    model = session.four_layers()
    with tempfile.TemporaryDirectory(dir=options.disk) as folder:
        limits = limits_of(options, folder, options.tokens + 1024, host_bytes=2**28, slots=4, verify=1.0)
        llm = LLM.from_params(
            model.config, model.params, engine=limits, backend=model.backend, fingerprint="bench"
        )  # fmt: skip
        session.attempt("first token", measure_first_token, llm, session)
        session.attempt("steps", lambda: [measure_steps(llm, batch) for batch in (1, 4)])
        session.attempt("bits", measure_bits, llm)
        llm.close()
    free_memory()


# ---- the copies of a whole model's cache ----


class Copies:
    """A cache of every layer, with made-up rows, and one prefix that passes through its tiers."""

    def __init__(self, options: argparse.Namespace, folder: str, num_tokens: int) -> None:
        self.device = torch.device(options.device)
        self.repeats = options.repeats
        config = cut_config(PRESETS[options.preset]())
        limits = limits_of(options, folder, num_tokens, host_bytes=options.host_mib * 2**20, slots=2)
        self.cache = KVCacheManager(
            config, build_schedule(config, with_mtp=False), limits, device=self.device, plain_dtype=None,
            fingerprint="copies",
        )  # fmt: skip
        fill_cache(self.cache)
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(1, config.vocab_size, (num_tokens + 1,), generator=generator).tolist()

    def pass_through(self) -> tuple[float, int, torch.Tensor]:
        """A request of these tokens, as the engine would run it: seconds until it has what the cache knows, how much
        that is, and the bytes of it."""
        cache = self.cache
        chain = cache.chain(self.tokens, None)
        wait(self.device)
        began = time.perf_counter()
        while cache.match(chain).is_loading:
            time.sleep(1e-4)
        slot = cache.admit(len(self.tokens), chain)
        wait(self.device)
        seconds, start = time.perf_counter() - began, cache.position(slot)
        position = start
        while position < len(self.tokens):
            end = min(len(self.tokens), cache.next_stop(slot), position + cache.limits.max_chunk_tokens)
            cache.make_batch([slot], [self.tokens[position:end]])
            cache.launched(slot)
            position = end
        node = cache.prefix.path_to(chain)[-1]
        flat = Payload(cache._paged, cache._snapshots).gather(cache._blocks[slot][: node.depth], node.snapshot)
        cache.release(slot)
        return seconds, start, flat.cpu()

    def run(self) -> list[Record]:
        records = [self.snapshot("save"), self.snapshot("restore")]
        _, _, expected = self.pass_through()
        self.cache.tiers.flush()
        size = {
            "bytes": expected.numel(),
            "tokens": len(self.tokens) - 1,
            "layers": self.cache.config.num_hidden_layers,
        }
        for tier in ("device", "host", "disk"):
            times, is_same = [], True
            for _ in range(3):
                forget_above(self.cache, tier)
                seconds, start, found = self.pass_through()
                assert start == len(self.tokens) - 1, f"{tier}: a hit of {start} tokens"
                times.append(seconds)
                is_same = is_same and torch.equal(found, expected)
            seconds = statistics.median(times)
            speed = {} if tier == "device" else {"gb_per_second": round(1e-9 * expected.numel() / seconds, 2)}
            records.append({"kind": "hit", "tier": tier, "ms": 1e3 * seconds, "same_bytes": is_same, **size, **speed})
        return [*records, self.file_speed()]

    def snapshot(self, what: str) -> Record:
        """Time on the device with the launches queued, and time the host takes to launch them."""
        call = partial(getattr(self.cache._snapshots, what), 0, len(self.tokens) - 1, 0)
        times = time_calls(call, self.device, self.repeats)
        wait(self.device)
        began = time.perf_counter()
        for _ in range(self.repeats):
            call()
        host = (time.perf_counter() - began) / self.repeats
        wait(self.device)
        launches = kernels_of(call, self.device)
        schema = self.cache.schema
        return {
            "kind": "snapshot", "what": what, "layers": self.cache.config.num_hidden_layers,
            "bytes": schema.bytes_per_snapshot, "bytes_per_token": float(schema.bytes_per_token),
            "us_between_events": 1e6 * statistics.median(times), "us_of_host": 1e6 * host,
            "us_of_kernels": None if launches is None else round(sum(us for _, us in launches), 2),
            "launches": None if launches is None else len(launches),
        }  # fmt: skip

    def file_speed(self) -> Record:
        """The same files, read once more into one buffer and thrown away: what the disk and the checksum allow."""
        files = sorted(self.cache.tiers.disk.folder.glob("*.safetensors"))
        drop_pages(files)
        size = sum(file.stat().st_size for file in files)
        buffer = bytearray(max(file.stat().st_size for file in files))
        began = time.perf_counter()
        for file in files:
            with file.open("rb") as stream:
                stream.readinto(buffer)
        read = time.perf_counter() - began
        began = time.perf_counter()
        hashlib.sha256(buffer).hexdigest()
        hashed = time.perf_counter() - began
        return {
            "kind": "file", "files": len(files), "bytes": size, "read_gb_per_second": round(1e-9 * size / read, 2),
            "checksum_gb_per_second": round(1e-9 * len(buffer) / hashed, 2),
        }  # fmt: skip


def copies(options: argparse.Namespace, folder: str, num_tokens: int) -> list[Record]:
    made = Copies(options, folder, num_tokens)
    try:
        return made.run()
    finally:
        made.cache.close()


# ---- through the engine ----


def measure_first_token(llm: LLM, session: Session) -> list[Record]:
    """A prompt that ends in the middle of a block, new each time; then the same one from each tier."""
    records = []
    times: dict[str, list[float]] = {"short": [], "cold": [], "device": [], "host": [], "disk": []}
    is_same = True
    for seed in range(3):
        short = random_prompt(llm.config, (session.options.tokens - 77) % 128, 50 + seed)
        times["short"].append(first_token(llm, short)[0])
        prompt = random_prompt(llm.config, session.options.tokens - 77, seed)
        seconds, cold = first_token(llm, prompt)
        times["cold"].append(seconds)
        assert cold.num_cached_tokens == 0, "the prompt is not new"
        llm.cache.tiers.flush()
        for tier in ("device", "host", "disk"):
            forget_above(llm.cache, tier)
            seconds, hit = first_token(llm, prompt)
            times[tier].append(seconds)
            is_same = is_same and hit == cold
            assert hit.num_cached_tokens == (len(prompt) - 1) // 128 * 128, (tier, hit.num_cached_tokens)
    for tier, found in times.items():
        num_tokens = len(short if tier == "short" else prompt)
        records.append({
            "kind": "first_token", "tier": tier, "tokens": num_tokens, "layers": llm.config.num_hidden_layers,
            "ms": 1e3 * statistics.median(found[1:] if tier == "cold" else found),
            "ms_all": [1e3 * one for one in found],
            "same_tokens_and_logprobs": is_same, "has_graphs": bool(llm.engine.runner._graphs),
        })  # fmt: skip
    return [*records, *model_whole(records, session)]


def model_whole(records: list[Record], session: Session) -> list[Record]:
    """Time to the first token of 43 layers, by the module's description."""
    ms = {one["tier"]: one["ms"] for one in records}
    copies = {one["tier"]: one["ms"] for one in session.records if one["kind"] == "hit" and one["tokens"] > 128}
    if not copies:
        return []
    scale = NUM_LAYERS / records[0]["layers"]
    once = ms["device"] - ms["short"]
    whole = {"cold": once + (ms["cold"] - once) * scale}
    whole |= {tier: once + ms["short"] * scale + copies[tier] - copies["device"] for tier in copies}
    return [{"kind": "modelled", "tier": tier, "layers": NUM_LAYERS, "ms": value} for tier, value in whole.items()]


def first_token(llm: LLM, prompt: list[int]) -> tuple[float, Completion]:
    wait(llm.cache.device)
    began = time.perf_counter()
    request = llm.engine.add(prompt, ANSWER)
    while request.num_output == 0:
        llm.engine.step()
    seconds = time.perf_counter() - began
    while llm.engine.has_work:
        llm.engine.step()
    return seconds, request.completion()


def measure_steps(llm: LLM, batch: int) -> Record:
    """Steps at which every request passes a multiple of 128, beside all others."""
    num_tokens = 3 * 128 + 8
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
    prompts = [random_prompt(llm.config, 70, 100 + seed) for seed in range(batch)]
    requests = [llm.engine.add(prompt, params) for prompt in prompts]
    while any(request.num_output < 8 for request in requests):
        llm.engine.step()
    plain, taking = [], []
    saved = llm.cache.prefix.stats.num_saved
    while all(request.num_output < num_tokens - 4 for request in requests):
        began = time.perf_counter()
        llm.engine.step()
        seconds = time.perf_counter() - began
        (taking if llm.cache.prefix.stats.num_saved > saved else plain).append(seconds)
        saved = llm.cache.prefix.stats.num_saved
    while llm.engine.has_work:
        llm.engine.step()
    llm.engine.check_integrity()
    return {
        "kind": "step", "batch": batch, "us_without": 1e6 * statistics.median(plain),
        "us_with": [round(1e6 * one, 1) for one in taking],
        "us_more": 1e6 * (statistics.median(taking) - statistics.median(plain)),
        "compiled_late": list(llm.engine.runner.compiled_late),
    }  # fmt: skip


def measure_bits(llm: LLM) -> Record:
    """Every hit of this run that is still on the device, read again without the cache."""
    while llm.engine.has_idle_work:
        llm.engine.idle_step()
    stats = llm.engine.stats()
    return {
        "kind": "bits", "verified": stats.num_verified_hits, "wrong": stats.num_wrong_hits,
        "hits": stats.num_prefix_hits, "host_hits": stats.num_prefix_host_hits, "disk_hits": stats.num_prefix_disk_hits,
        "bad_files": stats.num_prefix_bad_files,
    }  # fmt: skip


# ---- shared ----


def limits_of(
    options: argparse.Namespace, folder: str, num_tokens: int, *, host_bytes: int, slots: int, verify: float = 0.0
) -> EngineConfig:
    return EngineConfig(
        max_context_tokens=num_tokens + 128, max_concurrent_requests=slots, max_chunk_tokens=min(4096, num_tokens),
        cache_host_bytes=host_bytes, cache_dir=folder, verify_hits=verify,
    )  # fmt: skip


def random_prompt(config: ModelConfig, length: int, seed: int) -> list[int]:
    return random_prompts(config.vocab_size, 1, length, seed)[0]


def forget_above(cache: KVCacheManager, tier: str) -> None:
    """Nothing runs; what is known is forgotten everywhere above this tier."""
    if tier == "device":
        return
    cache.prefix.tree.make_room(cache.schema.num_blocks)
    assert cache.prefix.tree.num_snapshots == 0, "a snapshot is left"
    for pool in (*cache._paged.pools.values(), *cache._snapshots.pools.values()):
        pool.storage.fill_(255)  # what comes back has come from below
    if tier == "disk":
        cache.tiers.flush()
        host = cache.tiers.host
        units = host.reserve(host.tree.max_bytes, None)
        assert units is not None, "a segment is pinned"
        host.give_back(units)
        drop_pages(cache.tiers.disk.folder.glob("*.safetensors"))


def drop_pages(files: Iterable[Path]) -> None:
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)
