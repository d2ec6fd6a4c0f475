"""Processes of ranks: who they are, and that they are gone."""

import socket
import time
from contextlib import suppress
from pathlib import Path


def children_of(pid):
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def descendants_of(pid):
    children = children_of(pid)
    return [*children, *(one for child in children for one in descendants_of(child))]


def ranks_under(pid):
    """Ranks besides the first of a server, whose engine is a child of its supervisor."""
    return [one for one in descendants_of(pid) if b"dsv4.rank" in command_of(one)]


def command_of(pid):
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def wait_until_gone(pids, seconds=10):
    until = time.monotonic() + seconds
    while alive := [pid for pid in pids if _is_alive(pid)]:
        assert time.monotonic() < until, f"processes {alive} are left"
        time.sleep(0.1)


def _is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
