"""What `dsv4 bench serve` sends: lengths, arrivals, and how callers saw their requests. No torch.

Closed loop: `streams` requests are always under way. Open loop: requests arrive at `rate` a second, at random (Poisson)
but the same moments for a seed, whether earlier ones have ended or not.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from dsv4.config import ConfigError
from dsv4.tools.bench.client_process import LAST_TOKEN_ID, prompt_ids

KINDS = ("completions", "chat", "responses", "messages")  # interfaces of a server
INTRUDER_OUTPUT = 4  # tokens: its first one is what counts


@dataclass(frozen=True)
class Lengths:
    """Numbers of tokens: `median`, evenly within its `spread` share either way, or log-normal with `sigma`, redrawn
    until they are from `least` to `most`."""

    median: int
    spread: float = 0.0
    sigma: float = 0.0
    least: int = 1
    most: int | None = None

    def __post_init__(self) -> None:
        if self.median < 1:
            raise ConfigError(f"lengths must be at least 1 token, found {self.median}")
        if not 0 <= self.spread < 1:
            raise ConfigError(f"spread must be from 0 to below 1, found {self.spread}")

    def draw(self, chance: random.Random) -> int:
        if not self.sigma:
            around = self.median * (1 + self.spread * (2 * chance.random() - 1)) if self.spread else self.median
            return max(1, round(around))
        while True:
            drawn = round(self.median * chance.lognormvariate(0.0, self.sigma))
            if drawn >= self.least and (self.most is None or drawn <= self.most):
                return drawn


@dataclass(frozen=True)
class Shape:
    prompt: Lengths
    output: Lengths
    about: str


SHAPES = {
    "fixed": Shape(Lengths(128), Lengths(32), "128 + 32 tokens"),
    "random": Shape(Lengths(1024), Lengths(128), "1,024 + 128, as vLLM's `random` data set"),
    "sharegpt": Shape(
        Lengths(70, sigma=1.5, least=4, most=1024), Lengths(120, sigma=1.0, least=4, most=1024),
        "lengths like ShareGPT's: log-normal, median 70 (sigma 1.5) + 120 (1.0), 4 to 1,024",
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Load:
    """`requests` random prompts with lengths of `prompt` and `output`; `intruder` is one long prompt that arrives
    `intruder_seconds` after the start."""

    prompt: Lengths = SHAPES["fixed"].prompt
    output: Lengths = SHAPES["fixed"].output
    requests: int = 32
    streams: int = 8
    rate: float | None = None
    kind: str = "completions"
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    intruder: int | None = None
    intruder_seconds: float = 2.0

    def __post_init__(self) -> None:
        for name in ("requests", "streams"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, found {getattr(self, name)}")
        if self.rate is not None and not self.rate > 0:
            raise ConfigError(f"rate must be a positive number of requests a second, found {self.rate}")
        if self.kind not in KINDS:
            raise ConfigError(f"kind must be one of {', '.join(KINDS)}, found {self.kind!r}")
        if self.intruder is not None and self.intruder < 1:
            raise ConfigError(f"intruder must be at least 1 token, found {self.intruder}")

    @classmethod
    def of(
        cls, shape: str, prompt: int | None = None, output: int | None = None, spread: float = 0.0, **fields: object
    ) -> Load:
        """Of a named shape, with other medians or a spread where they are given."""
        if shape not in SHAPES:
            raise ConfigError(f"shape must be one of {', '.join(SHAPES)}, found {shape!r}")
        made = SHAPES[shape]
        lengths = {
            name: replace(usual, median=usual.median if given is None else given, spread=spread)
            for name, usual, given in (("prompt", made.prompt, prompt), ("output", made.output, output))
        }
        return cls(**lengths, **fields)  # type: ignore[arg-type]

    def sizes(self) -> list[tuple[int, int]]:
        """Prompt and output tokens of each request."""
        chance = random.Random(self.seed)
        return [(self.prompt.draw(chance), self.output.draw(chance)) for _ in range(self.requests)]

    def arrivals(self) -> list[float] | None:
        """Seconds after the start at which each request comes; None in a closed loop."""
        if self.rate is None:
            return None
        chance = random.Random(self.seed + 1)
        return list(accumulate(chance.expovariate(self.rate) for _ in range(self.requests)))

    def prompts(self, last_id: int = LAST_TOKEN_ID) -> list[list[int]]:
        return [prompt_ids(self.seed, place, size, last_id) for place, (size, _) in enumerate(self.sizes())]

    @property
    def max_context(self) -> int:
        """Tokens of the longest request."""
        longest = max(prompt + output for prompt, output in self.sizes())
        return max(longest, 0 if self.intruder is None else self.intruder + INTRUDER_OUTPUT)


@dataclass
class Timeline:
    """One request as its caller saw it: clock at the start and at each event with text, or why it failed.

    num_output, num_prompt: tokens by the server's own count; None where it gives none.
    """

    started: float
    tokens: Sequence[float] = field(default_factory=list)
    error: str | None = None
    num_output: int | None = None
    num_prompt: int | None = None


@dataclass(frozen=True)
class Observed:
    """The result of a load. `host_share`: the part of the time in which an engine's host did something else than wait;
    `host`: its seconds of each step; `clients`: processes, their CPU seconds, and the busiest one's share of a core."""

    timelines: list[Timeline]
    intruder: Timeline | None = None
    host_share: float | None = None
    host: Sequence[float] = ()
    clients: dict[str, float] = field(default_factory=dict)
