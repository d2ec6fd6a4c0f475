"""Clients of a storm: those that behave, those that leave, dawdle, send half of something or nonsense.

Every answer that comes whole must equal the same question asked alone, always. While a server is being restarted, or
one of its processes has died, clients may besides be refused, lost, or told why (`EXCUSED`).
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import httpx

CHAT = "/v1/chat/completions"
NONSENSE = [b"{", b"\xff\xfe", b"[]", b'{"model": "model"}', b'{"model": "model", "messages": [{"role": "x"}]}']
HALVES = [
    b"",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 4000\r\n\r\n" + b'{"model": "model", "messages": [',
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n20\r\n{",
]
EXCUSED = ("LOST", "ERROR", "STATUS", "CUT OFF")  # what may happen while a process is missing; wrong text never may
BEHAVIOUR = {"stream": 50, "whole": 10, "leave": 15, "dawdle": 10, "half": 7, "nonsense": 8}


class Storm:
    """`run` the clients until `seconds` have passed; `outcomes` counts what became of their requests.

    questions  the bodies that are sent, streams and whole answers alike
    expected   each one's answer alone
    """

    def __init__(
        self, url: str, questions: list[dict[str, Any]], expected: list[str], seconds: float,
        behaviour: Mapping[str, int] = BEHAVIOUR,
    ) -> None:  # fmt: skip
        self.url = url
        self._questions = questions
        self._expected = expected
        self._behaviour = behaviour
        self._end = time.monotonic() + seconds
        self.is_restarting = False
        self.num_restarts = 0  # begun so far, kills too
        self.killed: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []  # what must never happen, in words

    def begin_restart(self) -> None:
        self.is_restarting = True
        self.num_restarts += 1

    async def run(self, num_workers: int) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=num_workers)
        async with httpx.AsyncClient(base_url=self.url, timeout=300, limits=limits) as client:
            await asyncio.gather(*(self._worker(client, random.Random(place)) for place in range(num_workers)))

    async def _worker(self, client: httpx.AsyncClient, chance: random.Random) -> None:
        kinds, weights = zip(*self._behaviour.items(), strict=True)
        while time.monotonic() < self._end:
            kind = chance.choices(kinds, weights)[0]
            was_restarting, num_before = self.is_restarting, self.num_restarts
            try:
                outcome = await getattr(self, f"_{kind}")(client, chance)
            except (httpx.TransportError, OSError) as error:
                outcome = f"LOST: {type(error).__name__}"
            if outcome.startswith("told"):
                await asyncio.sleep(0.2)
            if outcome.isupper() or outcome.startswith("LOST"):
                # a slow client may begin before a restart and hear of its loss after it
                is_excused = was_restarting or self.num_restarts > num_before
                if is_excused and outcome.startswith(EXCUSED):
                    outcome = "lost or refused while restarting"
                    await asyncio.sleep(0.2)
                else:
                    self.wrong.append(f"{kind}: {outcome}")
            self.outcomes[outcome] += 1

    # ---- what clients do; each says what happened, in capitals if it must not ----

    async def _stream(self, client: httpx.AsyncClient, chance: random.Random) -> str:
        return await self._read(client, chance)

    async def _leave(self, client: httpx.AsyncClient, chance: random.Random) -> str:
        return await self._read(client, chance, leaves_after=chance.randrange(8))

    async def _dawdle(self, client: httpx.AsyncClient, chance: random.Random) -> str:
        return await self._read(client, chance, pause=chance.uniform(0.05, 0.3))

    async def _read(
        self, client: httpx.AsyncClient, chance: random.Random, *, leaves_after: int | None = None, pause: float = 0.0
    ) -> str:
        place = chance.randrange(len(self._questions))
        text, num_events = "", 0
        async with client.stream("POST", CHAT, json={**self._questions[place], "stream": True}) as response:
            if response.status_code != 200:
                await response.aread()
                return self._status(response)
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return "complete" if text == self._expected[place] else "DIFFERENT FROM SOLO"
                if not line.startswith("data: "):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return self._told(event["error"]["code"])
                text += event["choices"][0]["delta"].get("content", "")
                num_events += 1
                if leaves_after is not None and num_events > leaves_after:
                    return "left"
                if pause:
                    await asyncio.sleep(pause)
        return "CUT OFF"

    async def _whole(self, client: httpx.AsyncClient, chance: random.Random) -> str:
        place = chance.randrange(len(self._questions))
        response = await client.post(CHAT, json=self._questions[place])
        if response.status_code != 200:
            return self._status(response)
        text = response.json()["choices"][0]["message"]["content"]
        return "complete" if text == self._expected[place] else "DIFFERENT FROM SOLO"

    async def _nonsense(self, client: httpx.AsyncClient, chance: random.Random) -> str:
        headers = {"content-type": "application/json"}
        response = await client.post(CHAT, content=chance.choice(NONSENSE), headers=headers)
        return "refused" if response.status_code == 400 else self._status(response)

    async def _half(self, client: httpx.AsyncClient, chance: random.Random) -> str:
        """Half a request on a connection of its own, held for a while."""
        host, _, port = self.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(chance.choice(HALVES))
            answer = b""
            try:
                answer = await asyncio.wait_for(reader.read(65536), chance.choice([0.1, 1.0, 5.0, 20.0]))
            except TimeoutError:
                return "half sent, left"
            return "half sent, timed out" if b" 408 " in answer[:20] or not answer else "HALF A REQUEST WAS ANSWERED"
        finally:
            writer.close()

    def _status(self, response: httpx.Response) -> str:
        if response.status_code == 503:
            return self._told(response.json()["error"]["code"])
        return f"STATUS {response.status_code}"

    def _told(self, code: str) -> str:
        """The two reasons a server may have for not answering."""
        return {"shutting_down": "told: shutting down", "queue_full": "told: busy"}.get(code, f"ERROR {code.upper()}")
