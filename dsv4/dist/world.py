"""`World`: one rank's place among the others, and how the ranks of a model come together.

Under `torchrun` every process is a rank already. Otherwise the first one starts the others on its own machine, each as
`python -m dsv4.rank` with torchrun's variables set, so that both kinds of rank begin in the same way.
"""

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dsv4.config import ConfigError, EngineConfig, ModelConfig
from dsv4.dist.control import STALLED_SECONDS, Leader, Progress, check_started, end_processes
from dsv4.dist.exchange import CollectiveExchange, Exchange
from dsv4.dist.follower import Follower
from dsv4.dist.group import CheckedGroup, Group, gloo_group, nccl_group
from dsv4.dist.mesh import Mesh, meet
from dsv4.dist.shares import most_rows
from dsv4.dist.symmetric import symmetric_exchange

_LOOPBACK = "127.0.0.1"
_TOKEN = "token"
COMMAND = [sys.executable, "-m", "dsv4.rank"]
_SAID_BYTES = 1024
_STORE_TIMEOUT = timedelta(seconds=120)


@dataclass
class World:
    """A rank. `link` is a `Leader` on rank 0 and a `Follower` elsewhere."""

    rank: int
    size: int
    group: Group
    link: Leader | Follower
    progress: Progress
    mesh: Mesh = field(default_factory=Mesh)
    meeting: Any = None  # torch's default group, where GPUs meet that share memory
    closing: list[Any] = field(default_factory=list)  # what is over when the world is

    def exchange(self, config: ModelConfig, limits: EngineConfig, device: torch.device, dtype: torch.dtype) -> Exchange:
        """The way between experts: through one another's memory where GPUs can, else through collectives."""
        if self.meeting is None or dtype is not torch.bfloat16:
            return CollectiveExchange(self.group, config.n_routed_experts)
        self.least(0)  # all are still there
        # where memory is shared, a rank waits for others without looking; rank 0 ends if one of them does
        with self.link.working() if isinstance(self.link, Leader) else nullcontext():
            return symmetric_exchange(
                self.meeting, max_rows=most_rows(config, limits), num_experts=config.n_routed_experts,
                top_k=config.num_experts_per_tok, dim=config.hidden_size, device=device,
            )  # fmt: skip

    def least(self, number: int) -> int:
        """The smallest of the numbers that the ranks say here. All of them must ask."""
        mine = torch.tensor([number], dtype=torch.int64).view(torch.uint8).to(self.group.device)
        return int(self.group.all_gather(mine).view(torch.int64).min())

    def gather_texts(self, text: str) -> list[str]:
        """What every rank says here, at most `_SAID_BYTES` of it, by rank."""
        said = text.encode("utf-8")[:_SAID_BYTES].ljust(_SAID_BYTES, b"\0")
        mine = torch.frombuffer(bytearray(said), dtype=torch.uint8).to(self.group.device)
        return [bytes(one).rstrip(b"\0").decode("utf-8", "replace") for one in self.group.all_gather(mine).tolist()]

    @contextmanager
    def one_first(self) -> Iterator[bool]:
        """True inside for one rank of every machine; the others of it come out when that one has."""
        is_first = local_rank() == 0
        yield is_first
        self.least(0)

    def close(self) -> None:
        """End the other ranks, or leave them."""
        if isinstance(self.link, Leader):
            self.link.stop()
        for one in (*self.closing, self.mesh):
            one.close()

    @property
    def leader(self) -> Leader:
        assert isinstance(self.link, Leader), "only rank 0 leads"
        return self.link

    @property
    def follower(self) -> Follower:
        assert isinstance(self.link, Follower), "rank 0 follows no rank"
        return self.link


def is_started_by_torchrun() -> bool:
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(os.environ)


def local_rank() -> int:
    """Which of this machine's GPUs is this rank's."""
    return int(os.environ.get("LOCAL_RANK", "0")) if is_started_by_torchrun() else 0


def join_world(
    size: int, device: torch.device, settings: Mapping[str, Any], *, is_checked: bool = False,
    stalled_seconds: float = STALLED_SECONDS,
) -> World:  # fmt: skip
    """Become a rank of `size`. Started by torchrun: the one it says. Otherwise rank 0, and the others are started here
    with `settings` (what `LLM` takes, as JSON). `RankFailed` if one of them cannot start.
    """
    progress = Progress()
    if is_started_by_torchrun():
        found = int(os.environ["WORLD_SIZE"])
        if found != size:
            raise ConfigError(f"gpus is {size}, but torchrun started {found} processes; the two must agree")
        store, rank, _ = next(dist.rendezvous("env://"))
        host, processes = _own_address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), []
    else:
        store = dist.TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT)
        rank, host = 0, _LOOPBACK
        processes = [_start(one, size, store.port, settings) for one in range(1, size)]
    store = dist.PrefixStore(f"dsv4/{store.add(f'dsv4/joined/{rank}', 1)}", store)  # a second model of one torchrun
    try:
        is_gpu = device.type == "cuda"
        if rank == 0:
            store.set(_TOKEN, secrets.token_hex(16))
        mesh = meet(store, rank, size, host, store.get(_TOKEN), lambda: check_started(processes))
        link = Follower(mesh.watch[0], rank, progress) if rank else Leader(
            mesh.watch, progress, processes=processes, stalled_seconds=stalled_seconds, may_be_stuck=is_gpu
        )  # fmt: skip
        meeting = None
        if is_gpu and not is_checked and _can_share_memory(size):
            group: Group = gloo_group(store, rank, size, host, progress.tick, lambda: link.is_lost)
            meeting = _default_group(store, rank, size)
        elif is_gpu:
            group = nccl_group(store, rank, size, device, progress.tick)
        else:
            group = gloo_group(store, rank, size, host, progress.tick, lambda: link.is_lost)
    except BaseException:
        end_processes(processes)
        raise
    return World(rank, size, CheckedGroup(group) if is_checked else group, link, progress, mesh, meeting)


def _can_share_memory(size: int) -> bool:
    """Whether all ranks are on this machine, on GPUs that can write into one another's memory, and will meet there.

    Torch counts a process's meetings: rank 0 of a second model, whose other ranks are new, would wait for ever.
    """
    if is_started_by_torchrun():
        if int(os.environ.get("LOCAL_WORLD_SIZE", "0")) != size:
            return False
    elif dist.is_initialized():
        return False
    devices = range(min(size, torch.cuda.device_count()))
    return all(torch.cuda.can_device_access_peer(one, other) for one in devices for other in devices if one != other)


def _default_group(store: Any, rank: int, size: int) -> Any:
    """Symmetric memory meets through torch's default group, which must be ours."""
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, size):
            raise ConfigError("torch.distributed is already in use in this process, with other ranks than gpus asks for")
    else:
        dist.init_process_group("gloo", store=dist.PrefixStore("default", store), rank=rank, world_size=size)
    return dist.group.WORLD


def _start(rank: int, size: int, port: int, settings: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(size), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    process = subprocess.Popen(COMMAND, env=environment, stdin=subprocess.PIPE)
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it ended at once, which is noticed when it should connect
        process.stdin.write(json.dumps(dict(settings)).encode() + b"\n")
        process.stdin.flush()  # and stays open: its end tells the rank that this process has gone
    return process


def _own_address(host: str, port: int) -> str:
    """The address by which this machine reaches `host`, and is reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))  # sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return _LOOPBACK
