"""Processes of a running `dsv4 serve`, as /proc shows them."""

import contextlib
import json
import os
import threading
import time
from pathlib import Path

import httpx
from server_cases import HEADERS

CHAT = "/v1/chat/completions"


def children(pid):
    """Process ids of a process's children by the module they run."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):  # one that starts or ends just now has no command
            words = stat.read_text().rpartition(")")[2].split()
            if int(words[1]) == pid and words[0] != "Z":
                module = (stat.parent / "cmdline").read_bytes().split(b"\0")[2].decode().rpartition(".")[2]
                found.setdefault(module, []).append(int(stat.parent.name))
    return found


def descendants(process):
    return [pid for pids in children(process.pid).values() for pid in pids]


def engine_of(process):
    return children(process.pid)["engine_process"][0]


def front_ends_of(process):
    return sorted(children(process.pid)["front_end"])


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(what, seconds=60):
    """Until `what()` is true; its value."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def num_files(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def holder(url, client_port, pids):
    """Which of these processes has accepted the connection from this port of a client."""
    port = int(url.rpartition(":")[2])
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        local, remote = (int(words[place].rpartition(":")[2], 16) for place in (1, 2))
        if (local, remote) == (port, client_port):
            wanted = f"socket:[{words[9]}]"
            for pid in pids:
                for file in Path(f"/proc/{pid}/fd").iterdir():
                    with contextlib.suppress(OSError):
                        if os.readlink(file) == wanted:
                            return pid
    return None


class Stream(threading.Thread):
    """A chat read from a thread, over a connection of its own: its text, or the error it ended with."""

    def __init__(self, url, **fields):
        super().__init__(daemon=True)
        self.url = url
        self.body = {
            "messages": [{"role": "user", "content": "x"}], "ignore_eos": True, "stream": True, "temperature": 0,
            "max_tokens": 100, **fields,
        }  # fmt: skip
        self.port, self.text, self.error, self.num_chunks = None, "", None, 0
        self.is_complete, self.end_time = False, None
        self.start()

    def run(self):
        try:
            with httpx.stream("POST", self.url + CHAT, json=self.body, headers=HEADERS, timeout=120) as response:
                self.port = response.extensions["network_stream"].get_extra_info("client_addr")[1]
                if response.status_code != 200:
                    response.read()
                    self.error = response.json()["error"]["code"]
                    return
                for line in response.iter_lines():
                    self._take(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            self.error = type(error).__name__
        finally:
            self.end_time = time.monotonic()

    def _take(self, data):
        if data == "[DONE]":
            self.is_complete = True
        elif data:
            found = json.loads(data)
            if "error" in found:
                self.error = found["error"]["code"]
                return
            self.num_chunks += 1
            self.text += found["choices"][0]["delta"].get("content") or ""

    def started(self):
        """Wait until it writes."""
        wait_for(lambda: self.num_chunks > 2 or not self.is_alive())
        return self
