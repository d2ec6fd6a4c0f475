"""What the supervisor tells its children at their start. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

from dsv4.config import EngineConfig
from dsv4.engine.draft.options import Drafts
from dsv4.http.settings import ServerConfig
from dsv4.tools.model_loading import load_llm

if TYPE_CHECKING:
    from dsv4.llm import LLM

_PULSE, _SOCKET = "pulse", "engine"


class RecordSettings(msgspec.Struct, kw_only=True):
    """`RecordFile`'s arguments, and whether its lines hold digests alone."""

    path: str
    max_bytes: int
    num_files: int
    hashes_only: bool


class ModelSettings(msgspec.Struct, kw_only=True):
    """`load_llm`'s arguments."""

    folder: str
    numerics: str
    dtype: str | None
    device: str
    limits: EngineConfig
    offload_experts: str | int | None
    drafts: Drafts
    gpus: int
    threads: int | None
    ignore_selftest: bool


def load_model(model: ModelSettings, console: Console) -> LLM:
    """Takes minutes, and loads torch."""
    return load_llm(
        Path(model.folder), numerics=model.numerics, dtype=model.dtype, device=model.device, limits=model.limits,
        console=console, offload_experts=model.offload_experts, drafts=model.drafts, gpus=model.gpus,
        threads=model.threads, ignore_selftest=model.ignore_selftest,
    )  # fmt: skip


class Room(msgspec.Struct):
    """The private folder of one server: the engine's socket, the processes' signs of life, the front ends' metrics."""

    folder: str

    @property
    def path(self) -> Path:
        return Path(self.folder)

    @property
    def socket(self) -> str:
        return str(self.path / _SOCKET)

    @property
    def pulse(self) -> Path:
        return self.path / _PULSE


class EngineSettings(msgspec.Struct, kw_only=True):
    """listener: descriptor of the socket that front ends connect to."""

    model: ModelSettings
    record: RecordSettings | None
    max_waiting: int
    log_format: str
    room: Room
    listener: int = -1


class FrontEndSettings(msgspec.Struct, kw_only=True):
    """pulse: the file of its signs of life. listener: descriptor of the socket that clients connect to."""

    server: ServerConfig
    tokenizer: str
    room: Room
    pulse: str
    listener: int = -1
