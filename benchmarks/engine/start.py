"""`dsv4 serve FOLDER` and nothing else: what it chooses, what it takes, and how long until the first token.

    python -m benchmarks start                            as many Flash layers as the disk holds, written first
    python -m benchmarks start --model FOLDER             a checkpoint that is there
    python -m benchmarks start --small --device cpu       the shipped miniature: a try

Records: `start`, once cold (no compiled kernels; files dropped from the system's cache) and once warm: the table, the
phases, seconds from the command to the first token, memory used against the plan. Then `chats`: a closed loop of as
many chats as --chats says, and how many requests ran at once.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.runner import Record, Session
from benchmarks.server import whole_tokenizer
from benchmarks.serving import ServerProcess
from dsv4.loader.shipped import find_checkpoint
from dsv4.loader.write.synth import write_checkpoint
from dsv4.tools.auto.machine import read_machine
from dsv4.tools.bench.context import cut_config
from dsv4.tools.bench.serve import measure_load
from dsv4.tools.bench.server_target import UrlTarget
from dsv4.tools.bench.workload import Load
from dsv4.tools.plan.sizes import count_weights
from dsv4.tools.plan.targets import PRESETS

SMALL_CHATS = 8
DISK_SHARE = 0.8  # of what is free, for the checkpoint
_POLL_SECONDS = 0.05


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a checkpoint instead")
    parser.add_argument("--layers", type=int, help="of the preset; default: as many as the disk holds")
    parser.add_argument("--chats", type=int, default=256, help="at once, in the closed loop")
    parser.add_argument("--small", action="store_true", help="the shipped miniature and few chats: a try")
    parser.add_argument("--warm", action="store_true", help="not cold: with the kernels that Triton's cache has now")


def run(session: Session) -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        folder = _checkpoint(session, place)
        if not session.options.warm:
            os.environ["TRITON_CACHE_DIR"] = str(place / "kernels")
        for state in ("warm",) if session.options.warm else ("cold", "warm"):
            session.attempt(state, _start, session, folder, place, state)


def line(record: Record) -> str:
    if record["kind"] == "chats":
        return (
            f"{record['streams']} chats: {record['tokens_per_second']:,.0f} tokens/s, "
            f"{record['most_running']} ran at once of {record['num_slots']}, {record['failed']} failed"
        )
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in record["start_seconds"].items())
    memory = f"{record['used_bytes'] / 2**30:,.2f} GiB used, {record['planned_bytes']['total'] / 2**30:,.2f} planned"
    return (
        f"{record['state']}: first token after {record['first_token_seconds']:.1f} s ({phases}; "
        f"ready after {record['ready_seconds']:.1f}); {memory}\n{record['table']}"
    )


class _Bare(ServerProcess):
    def __init__(self, folder: Path, log: Path) -> None:
        super().__init__(folder, log, [])
        self._command = [sys.executable, "-m", "dsv4", "serve", str(folder)]


def _start(session: Session, folder: Path, place: Path, state: str) -> Iterator[Record]:
    if state == "cold":
        for file in folder.resolve().glob("*.safetensors"):
            _drop_from_cache(file)
    log, before = place / f"{state}.log", _used_bytes(session)
    server = _Bare(folder, log)
    begun = time.monotonic()
    url = server.start()
    try:
        ready = time.monotonic() - begun
        with httpx.Client(base_url=url, timeout=600) as client:
            client.post("/v1/completions", json=_first_request(client)).raise_for_status()
            first = time.monotonic() - begun
            info = client.get("/server_info").json()
        server.look()
        on_host = server.samples[-1].memory_bytes
        yield {
            "kind": "start", "state": state, "model": folder.name, "ready_seconds": round(ready, 2),
            "first_token_seconds": round(first, 2),
            "start_seconds": {name: round(seconds, 2) for name, seconds in info["start_seconds"].items()},
            "settings": {name: one["value"] for name, one in info["settings"].items()},
            "table": _table(log, info["settings"]), "planned_bytes": info["planned_bytes"], "host_bytes": on_host,
            "used_bytes": _used_bytes(session) - before if session.is_cuda else on_host,
            "weight_bytes": sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        }  # fmt: skip
        if state == "warm":
            yield _chats(session, url, info)
    finally:
        server.stop()


def _first_request(client: httpx.Client) -> dict[str, Any]:
    model = client.get("/v1/models").json()["data"][0]["id"]
    return {"model": model, "prompt": [5, 6, 7], "max_tokens": 1}


def _chats(session: Session, url: str, info: dict[str, Any]) -> Record:
    streams = SMALL_CHATS if session.options.small else session.options.chats
    sizes = {"prompt": 24, "output": 6} if session.options.small else {"prompt": 512, "output": 128}
    load = Load.of("fixed", streams=streams, requests=2 * streams, temperature=0.8, kind="chat", seed=5, **sizes)
    with _most_running(url) as most:
        report, _ = measure_load(UrlTarget(url, processes=min(8, streams)), load)
    return {
        **report.to_dict(), "kind": "chats", "streams": streams, "most_running": most[0],
        "num_slots": info["max_running_requests"],
    }  # fmt: skip


@contextmanager
def _most_running(url: str) -> Iterator[list[int]]:
    """The most requests that the server's metrics showed in a batch."""
    most, is_over = [0], threading.Event()

    def watch() -> None:
        with httpx.Client(base_url=url, timeout=60) as client:
            while not is_over.wait(_POLL_SECONDS):
                for text in client.get("/metrics").text.splitlines():
                    if text.startswith("dsv4_num_requests_running"):
                        most[0] = max(most[0], int(float(text.split()[-1])))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield most
    finally:
        is_over.set()
        thread.join()


def _table(log: Path, settings: dict[str, Any]) -> str:
    wanted = tuple(f"{name} " for name in settings)
    return "\n".join(text for text in log.read_text().splitlines() if text.startswith(wanted))


def _used_bytes(session: Session) -> int:
    """Of all GPUs, by everybody; asked of the driver, so that no context is made here."""
    return sum(gpu.total_bytes - gpu.free_bytes for gpu in read_machine().gpus) if session.is_cuda else 0


def _drop_from_cache(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _checkpoint(session: Session, place: Path) -> Path:
    options = session.options
    if options.small or options.model is not None:
        return find_checkpoint(options.model)
    preset, room = PRESETS[options.preset](), DISK_SHARE * shutil.disk_usage(place).free
    layers = options.layers or next(
        (
            count
            for count in range(preset.num_hidden_layers, 1, -1)
            if count_weights(cut_config(preset, count, None, None), "mxfp4", with_draft=False).total_bytes <= room
        ),
        1,
    )
    config = cut_config(preset, layers, None, None)
    extra = {"tokenizer.json": json.dumps(whole_tokenizer(config.vocab_size))}
    return write_checkpoint(place / "model", config, with_mtp=False, extra_files=extra, device=session.device)
