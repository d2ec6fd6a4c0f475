"""A client process of `dsv4 bench serve`: opens streams to a server and notes when each event arrives.

It is run as a program and needs the standard library alone, so that it starts in a moment. stdin: a pickled dict
(`server_target.py` makes it), then a line with the moment to begin. stdout: lines `done N`, then `result` and a pickled
list. Moments are of `time.monotonic`, which all processes of a machine share.

An event is judged by its bytes, not as JSON: some microseconds a token decide whether clients keep up.
"""

import asyncio
import gc
import json
import pickle
import random
import re
import sys
import time
from array import array
from collections.abc import Iterator
from typing import Any

FIRST_TOKEN_ID, LAST_TOKEN_ID = 10, 255  # in every vocabulary, even one of bytes alone
# one token each for most tokenizers, and five bytes each with the space
WORDS = ["that", "with", "from", "have", "this", "will", "your", "what", "when", "good", "time", "year", "take", "know"]
_HAS_TEXT = re.compile(rb'"(?:content|text|reasoning_content|reasoning)": ?"[^"]').search
_IS_UNFINISHED = re.compile(rb'"finish_reason": ?null').search
_IS_NAMED = re.compile(rb"^event: ?(\S+)").match  # those of Responses and Messages
_HAS_DELTA = re.compile(rb'"(?:delta|text|thinking|partial_json)": ?"[^"]').search
_ENDS = (b"response.completed", b"response.incomplete", b"message_stop")
_USAGE = re.compile(rb'"(prompt|completion|input|output)_tokens": ?(\d+)').findall
_CACHED = re.compile(rb'"cache_(?:read|creation)_input_tokens": ?(\d+)').findall  # Messages counts them apart
_USAGE_NAMES = {b"input": "prompt", b"output": "completion"}
_IS_ERROR = re.compile(rb'(?:^|\n)data: ?\{"error"|^event: ?(?:error|response\.failed)').search
_PROGRESS_SECONDS = 0.2


def prompt_ids(seed: int, place: int, count: int, last: int = LAST_TOKEN_ID) -> list[int]:
    """The prompt of request `place`, as token ids."""
    chance = random.Random(f"{seed}/{place}")
    return chance.choices(range(FIRST_TOKEN_ID, last + 1), k=count)


def prompt_text(seed: int, place: int, num_words: int) -> str:
    return " ".join(random.Random(f"{seed}/{place}").choices(WORDS, k=num_words))


def request_body(work: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """The JSON of one request; `size` counts token ids, or words of a chat."""
    seed, place, size = work["seed"], request["place"], request["size"]
    body = {"seed": place, **work["fields"]}
    if work["kind"] == "completions":
        return body | {"max_tokens": request["output"], "prompt": prompt_ids(seed, place, size)}
    text = prompt_text(seed, place, size)
    if work["kind"] == "responses":
        return body | {"max_output_tokens": request["output"], "input": text}
    return body | {"max_tokens": request["output"], "messages": [{"role": "user", "content": text}]}


class Answer:
    """One request as its client saw it."""

    def __init__(self, started: float) -> None:
        self.started = started
        self.times = array("d")
        self.usage: dict[str, int] = {}
        self.error: str | None = None
        self.is_complete = False
        self.has_begun = False


class Events:
    """Server-sent events in a body that comes in pieces."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._rest = b""

    def feed(self, data: bytes, now: float) -> None:
        *events, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            if _IS_ERROR(event):
                self._answer.error = event.decode(errors="replace")[:300]
            elif named := _IS_NAMED(event):
                self._answer.is_complete |= named[1] in _ENDS
                if named[1].endswith((b".delta", b"block_delta")) and _HAS_DELTA(event):
                    self._answer.times.append(now)
            elif _HAS_TEXT(event) or (_IS_UNFINISHED(event) and b'"role"' not in event):
                self._answer.times.append(now)
            elif event.endswith(b"[DONE]"):
                self._answer.is_complete = True
            if b'"completion_tokens"' in event or b'"output_tokens"' in event:
                counts = {_USAGE_NAMES.get(name) or name.decode(): int(count) for name, count in _USAGE(event)}
                if "prompt" in counts:
                    counts["prompt"] += sum(map(int, _CACHED(event)))
                self._answer.usage |= counts


class Connection(asyncio.Protocol):
    """HTTP/1.1 with one request at a time; kept for the next one where the server allows it."""

    def __init__(self) -> None:
        self.is_open = True
        self.is_used = False
        self._answer: Answer | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def ask(self, request: bytes, answer: Answer) -> asyncio.Future[None]:
        self._answer, self._events = answer, Events(answer)
        self._raw, self._failure, self._status, self._left, self._is_chunked = b"", b"", 0, 0, False
        self._body_bytes: int | None = None
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._over

    def close(self) -> None:
        self.is_open = False
        self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._answer is not None:
            self._end(None if self._status and not self._is_chunked and self._body_bytes is None else "cut off")

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if self._answer is None:
            return  # what follows the last chunk
        self._answer.has_begun = True
        if not self._status:
            data = self._read_head(data)
            if not self._status:
                return
        body = self._unchunk(data) if self._is_chunked else data
        if self._body_bytes is not None and not self._is_chunked:
            self._body_bytes -= len(data)
        if self._status == 200:
            self._events.feed(body, now)
        else:
            self._failure += body
            self._answer.error = f"status {self._status}: {self._failure.decode(errors='replace')[:300]}"
        if self._body_bytes is not None and self._body_bytes <= 0:
            self._end(None)

    def _read_head(self, data: bytes) -> bytes:
        head, end, body = (self._raw + data).lstrip(b"\r\n").partition(b"\r\n\r\n")
        if not end:
            self._raw = head
            return b""
        self._raw = b""
        self._status = int(head.split(b" ", 2)[1])
        lower = head.lower()
        self._is_chunked = b"transfer-encoding: chunked" in lower
        if b"connection: close" in lower:
            self.is_open = False
        length = re.search(rb"content-length: *(\d+)", lower)
        self._body_bytes = int(length[1]) if length and not self._is_chunked else None
        return body

    def _unchunk(self, data: bytes) -> bytes:
        """The body's bytes; an unfinished size line waits in `_raw`. After the last chunk `_body_bytes` is 0."""
        buffer, place, parts = self._raw + data, 0, []
        self._raw = b""
        while place < len(buffer):
            if self._left:
                part = buffer[place : place + self._left]
                parts.append(part)
                place += len(part)
                self._left -= len(part)
                continue
            end = buffer.find(b"\r\n", place)
            if end < 0:
                self._raw = buffer[place:]
                break
            if end > place:  # an empty line ends the chunk before it
                self._left = int(buffer[place:end].split(b";")[0], 16)
                if not self._left:
                    self._body_bytes = 0
                    break
            place = end + 2
        return b"".join(parts)

    def _end(self, error: str | None) -> None:
        answer, self._answer = self._answer, None
        assert answer is not None
        if answer.error is None:
            answer.error = error or (None if answer.is_complete else "ended without its last event")
        if not self.is_open:
            self._transport.close()
        if not self._over.done():
            self._over.set_result(None)


class Client:
    """All streams of this process."""

    def __init__(self, work: dict[str, Any]) -> None:
        self._work = work
        self._idle: list[Connection] = []
        self._answers: dict[int, Answer] = {}
        self._next_report = 0.0

    async def run(self, begin: float) -> list[tuple[Any, ...]]:
        work = self._work
        await asyncio.sleep(max(0.0, begin - time.monotonic()))
        if work["streams"] is None:
            await asyncio.gather(*(self._at(begin + request["due"], request) for request in work["requests"]))
        else:
            requests = iter(work["requests"])
            await asyncio.gather(*(self._stream(requests) for _ in range(work["streams"])))
        self._report(is_last=True)
        return [
            (place, one.started, one.times.tobytes(), one.usage, one.error)
            for place, one in sorted(self._answers.items())
        ]

    async def _at(self, due: float, request: dict[str, Any]) -> None:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        await self._ask(request, due)

    async def _stream(self, requests: Iterator[dict[str, Any]]) -> None:
        for request in requests:
            await self._ask(request, time.monotonic())

    async def _ask(self, request: dict[str, Any], started: float) -> None:
        body = json.dumps(request_body(self._work, request)).encode()
        data = self._work["head"] + b"Content-Length: %d\r\n\r\n" % len(body) + body
        answer = Answer(started)
        try:
            async with asyncio.timeout(self._work["timeout"]):
                await self._send(data, answer)
        except TimeoutError:
            answer.error = f"no end after {self._work['timeout']:g} s"
        except OSError as error:
            answer.error = f"{type(error).__name__}: {error}"[:300]
        self._answers[request["place"]] = answer
        self._report()

    async def _send(self, data: bytes, answer: Answer) -> None:
        while True:
            connection = await self._connect()
            try:
                await connection.ask(data, answer)
            except asyncio.CancelledError:  # out of time
                connection.close()
                raise
            if connection.is_open:
                connection.is_used = True
                self._idle.append(connection)
            if not (connection.is_used and answer.error == "cut off" and not answer.has_begun):
                return
            answer.error = None  # the server had closed an idle connection: that is no failure

    async def _connect(self) -> Connection:
        while self._idle:
            if (connection := self._idle.pop()).is_open:
                return connection
        work = self._work
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(Connection, work["host"], work["port"], ssl=work["tls"] or None))[1]

    def _report(self, is_last: bool = False) -> None:
        if is_last or time.monotonic() >= self._next_report:
            self._next_report = time.monotonic() + _PROGRESS_SECONDS
            sys.stdout.buffer.write(b"done %d\n" % len(self._answers))
            sys.stdout.buffer.flush()


def main() -> None:
    work = pickle.load(sys.stdin.buffer)
    sys.stdout.buffer.write(b"ready\n")
    sys.stdout.buffer.flush()
    begin = float(sys.stdin.buffer.readline())
    gc.disable()
    answers = asyncio.run(Client(work).run(begin))
    sys.stdout.buffer.write(b"result\n" + pickle.dumps((answers, time.process_time())))


if __name__ == "__main__":
    main()
