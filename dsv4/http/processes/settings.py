"""What the supervisor tells its children at their start. No torch."""

from pathlib import Path

import msgspec

from dsv4.http.settings import ServerConfig
from dsv4.tools.model_loading import ModelSettings

_PULSE, _SOCKET = "pulse", "engine"


class RecordSettings(msgspec.Struct, kw_only=True):
    """`RecordFile`'s arguments, and whether its lines hold digests alone."""

    path: str
    max_bytes: int
    num_files: int
    hashes_only: bool


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
