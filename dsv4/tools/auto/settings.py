"""What a server is asked for (`Wishes`) and what it then has (`Settings`), each choice with its reason. No torch."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from dsv4.config import ConfigError, EngineConfig, is_size, shown
from dsv4.engine.draft.options import Drafts

GIB = 2**30
GIVEN = "given"  # why an option is as it is


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """Options as they were given; None chooses. `limits` has what is not chosen here (tiers, verification)."""

    device: str = "auto"
    gpus: int | None = None
    requests: int | None = None
    context: int | None = None
    chunk: int | None = None
    drafts: Drafts | None = None
    offload_experts: str | int | None = None  # "auto", "off", a number
    memory: float = 0.92
    numerics: str = "official"
    limits: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.memory) and 0 < self.memory <= 1):
            raise ConfigError(f"--memory must be a share of the memory, above 0 and at most 1, found {self.memory:g}")
        for name in ("gpus", "requests", "context", "chunk"):
            value = getattr(self, name)
            if value is not None and not is_size(value):
                least = "from 1 to the number of experts" if name == "gpus" else "a positive integer"
                raise ConfigError(f"--{name} must be {least}, found {shown(value)}")


@dataclass(frozen=True)
class Choice:
    """`what` is `value`, because of `why`; `option` changes it."""

    what: str
    value: str
    why: str
    option: str


@dataclass(frozen=True)
class Settings:
    """What is loaded: `load_llm`'s arguments, and the choices behind them. `planned` is bytes of one device;
    `visible` what CUDA_VISIBLE_DEVICES must be, where GPUs are left out."""

    device: str
    gpus: int
    limits: EngineConfig
    drafts: Drafts
    offload_experts: str | int | None
    choices: tuple[Choice, ...]
    planned: dict[str, int] = field(default_factory=dict)
    visible: str | None = None


class DoesNotFit(ConfigError):
    """The machine cannot hold what was asked for; the text has settings that it can hold."""


def table(choices: Iterable[Choice]) -> str:
    """A line for each choice: what, its value, the option that changes it, why."""
    rows = [(one.what, one.value, one.option, one.why) for one in choices]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    cells = [[text.ljust(width) for text, width in zip(row, widths, strict=False)] + [row[3]] for row in rows]
    return "\n".join("  ".join(row).rstrip() for row in cells)


def size(num_bytes: int) -> str:
    """For readers: in GiB, or MiB where that says more."""
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:,.1f} MiB"
