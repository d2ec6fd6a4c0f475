"""Any server that speaks OpenAI's interface as the target of a load: client processes, and what they saw."""

import http.client
import json
import os
import pickle
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from dsv4.config import ConfigError
from dsv4.errors import Dsv4Error
from dsv4.tools.bench import client_process
from dsv4.tools.bench.workload import INTRUDER_OUTPUT, Load, Observed, Timeline

MAX_PROCESSES = 8  # more than enough for 60,000 tokens/s
_PATHS = {
    "completions": "/v1/completions", "chat": "/v1/chat/completions", "responses": "/v1/responses",
    "messages": "/v1/messages",
}  # fmt: skip
_START_SECONDS = 0.3  # from all processes being ready to the first request


class ServerFailed(Dsv4Error, RuntimeError):
    """The server or a client process ended in the middle of a load."""


class UrlTarget:
    """A base URL such as http://127.0.0.1:8000.

    only_standard  leave out what the interface does not have where it comes from
    extra          further fields of every request
    """

    def __init__(
        self, url: str, model: str | None = None, api_key: str | None = None, *, processes: int | None = None,
        timeout: float = 600.0, only_standard: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ConfigError(f"the URL must be like http://127.0.0.1:8000, found {url!r}")
        if processes is not None and processes < 1:
            raise ConfigError(f"processes must be at least 1, found {processes}")
        self.name = url
        self._host, self._tls = parts.hostname, parts.scheme == "https"
        self._netloc = parts.netloc.rpartition("@")[2]
        self._port = parts.port or (443 if self._tls else 80)
        self._base, self._key = parts.path.rstrip("/").removesuffix("/v1"), api_key
        self._processes, self._timeout, self._only_standard = processes, timeout, only_standard
        self._extra = dict(extra or {})
        self._model = model or self._first_model()

    def run(self, load: Load, on_done: Callable[[int], None] = lambda count: None) -> Observed:
        sizes, arrivals = load.sizes(), load.arrivals()
        words = (lambda tokens: tokens) if load.kind == "completions" else self._words_of(load)
        requests = [
            {"place": place, "size": words(prompt), "output": output} | ({} if arrivals is None else {"due": due})
            for place, ((prompt, output), due) in enumerate(zip(sizes, arrivals or [0.0] * len(sizes), strict=True))
        ]
        streams = min(load.streams, len(requests))
        at_once = streams if arrivals is None else len(requests)
        count = min(self._processes or min(MAX_PROCESSES, os.cpu_count() or 1), at_once)
        works = [
            self._work(load, requests[one::count], None if arrivals else len(range(one, streams, count)))
            for one in range(count)
        ]
        if load.intruder is not None:
            long = {"place": -1, "size": words(load.intruder), "output": INTRUDER_OUTPUT, "due": load.intruder_seconds}
            works.append(self._work(load, [long], None))
        return _observed(*_run_clients(works, on_done))

    def _work(self, load: Load, requests: list[dict[str, Any]], streams: int | None) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "model": self._model, "stream": True, "temperature": load.temperature, "top_p": load.top_p,
        }  # fmt: skip
        if load.kind in ("completions", "chat"):
            fields["stream_options"] = {"include_usage": True}
        if not self._only_standard and load.kind != "messages":
            fields["ignore_eos"] = True
        fields |= self._extra
        return {
            "host": self._host, "port": self._port, "tls": self._tls, "kind": load.kind, "seed": load.seed,
            "head": self._head(self._base + _PATHS[load.kind]), "fields": fields, "requests": requests,
            "streams": streams, "timeout": self._timeout,
        }  # fmt: skip

    def _head(self, path: str) -> bytes:
        lines = [f"POST {path} HTTP/1.1", f"Host: {self._netloc}"]
        lines += [f"{name}: {value}" for name, value in self._headers().items()]
        return ("\r\n".join(lines) + "\r\n").encode()

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Anthropic-Version": "2023-06-01"}
        return headers | ({"Authorization": f"Bearer {self._key}", "X-Api-Key": self._key} if self._key else {})

    def _words_of(self, load: Load) -> Callable[[int], int]:
        """Words that give a chat's prompt its tokens, by the server's count of two short ones."""
        counts: list[int | None] = []
        for num_words in (16, 80):
            body = client_process.request_body(
                {"seed": load.seed, "kind": load.kind, "fields": {"model": self._model}},
                {"place": -2, "size": num_words, "output": 1},
            )
            usage = self._json("POST", _PATHS[load.kind], body).get("usage", {})
            cached = sum(usage.get(f"cache_{what}_input_tokens") or 0 for what in ("read", "creation"))
            count = usage.get("prompt_tokens", usage.get("input_tokens"))
            counts.append(None if count is None else count + cached)
        short, long = counts
        if short is None or long is None:
            return lambda tokens: tokens
        each = max((long - short) / 64, 0.1)
        around = short - 16 * each
        return lambda tokens: max(1, round((tokens - around) / each))

    def _first_model(self) -> str:
        try:
            return str(self._json("GET", "/v1/models")["data"][0]["id"])
        except LookupError as error:
            raise ConfigError(f"{self.name} names no model; give one with --model") from error

    def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._timeout)
        try:
            connection.request(method, self._base + path, None if body is None else json.dumps(body), self._headers())
            answer = connection.getresponse()
            content = answer.read()
            if answer.status != 200:
                raise ConfigError(
                    f"{self.name}{path} answers {answer.status}: {content[:200].decode(errors='replace')}"
                )
            found: dict[str, Any] = json.loads(content)
            return found
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            raise ConfigError(f"{self.name} does not answer as an OpenAI server: {error}") from None
        finally:
            connection.close()


def _run_clients(
    works: list[dict[str, Any]], on_done: Callable[[int], None]
) -> tuple[list[tuple[list[Any], float]], float]:
    """What each client process returns, its answers and CPU seconds, and how long all of them took."""
    command = [sys.executable, "-I", str(Path(client_process.__file__))]
    clients = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in works]
    num_done, shown = [0] * len(works), 0
    with ThreadPoolExecutor(len(works)) as threads:
        try:
            for client, work in zip(clients, works, strict=True):
                pickle.dump(work, _in(client))
                _in(client).flush()
            if any(_out(client).readline() != b"ready\n" for client in clients):
                raise ServerFailed("a client process did not start")
            began = time.monotonic() + _START_SECONDS
            for client in clients:
                _in(client).write(b"%r\n" % began)
                _in(client).flush()
            reading = [threads.submit(_read, client, num_done, place) for place, client in enumerate(clients)]
            is_over = False
            while not is_over:
                is_over = not wait(reading, timeout=0.05).not_done
                on_done(sum(num_done) - shown)
                shown = sum(num_done)
            return [one.result() for one in reading], time.monotonic() - began
        finally:
            for client in clients:
                client.kill()
                client.communicate()


def _read(client: subprocess.Popen[bytes], num_done: list[int], place: int) -> tuple[list[Any], float]:
    for line in _out(client):
        if line == b"result\n":
            found: tuple[list[Any], float] = pickle.load(_out(client))
            num_done[place] = len(found[0])
            return found
        num_done[place] = int(line.split()[1])
    raise ServerFailed("a client process ended before its requests did")


def _in(client: subprocess.Popen[bytes]) -> IO[bytes]:
    assert client.stdin is not None
    return client.stdin


def _out(client: subprocess.Popen[bytes]) -> IO[bytes]:
    assert client.stdout is not None
    return client.stdout


def _observed(results: list[tuple[list[Any], float]], seconds: float) -> Observed:
    found = {
        place: Timeline(started, array("d", times), error, usage.get("completion"), usage.get("prompt"))
        for answers, _ in results
        for place, started, times, usage, error in answers
    }
    intruder, used = found.pop(-1, None), [cpu for _, cpu in results]
    busiest = round(max(used) / seconds, 3)
    clients = {"processes": len(results), "cpu_seconds": round(sum(used), 3), "busiest": busiest}
    return Observed([one for _, one in sorted(found.items())], intruder, clients=clients)
