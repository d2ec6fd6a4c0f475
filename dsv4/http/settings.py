"""`ServerConfig`: what a server allows and how it behaves. Frozen and checked; no web framework here."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from dsv4.config import ConfigError, is_positive_real, is_size, shown
from dsv4.tools.auto.settings import Choice

MIB = 1024 * 1024
LOG_FORMATS = ("text", "json")


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """PEM files of a server that speaks HTTPS, as uvicorn takes them."""

    certfile: str
    keyfile: str | None = None
    keyfile_password: str | None = None


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """
    name               the model's name in requests and answers
    root               what its checkpoint is called, where it is a shipped one; None: the same
    host, port         where to listen; the default host is loopback. Port 0 takes a free port
    allowed_hosts      further names in the Host header that are answered (a reverse proxy's); "*" answers to any.
                       Without them, a server on loopback answers to this machine's names, any other to all
    tls                certificate and key; None speaks plain HTTP
    api_key            required as `Authorization: Bearer KEY` on /v1 and /live when set
    default_thinking   whether the model thinks when a request does not say
    effort_profile     which reasoning efforts there are (`dsv4.text.chat.effort_profile`)
    sampling_defaults  temperature, top_p, ... of requests that do not give them (`dsv4.loader.generation_defaults`)
    max_connections    connections at once; further ones are answered with 503 and closed
    max_body_bytes     larger requests are refused (413)
    max_json_depth     deeper JSON is refused (400)
    max_messages       longer conversations are refused (400)
    max_answer_bytes   memory that the answers to one request may take, by their longest
    max_output_tokens  most tokens one answer may ask for; None: the context
    max_waiting        requests that may wait for a slot before others are refused (503)
    header_seconds     how long the head of a request may take to arrive
    body_seconds       and its body; both before anything else of it is looked at. Then 408
    stall_seconds      a client that takes nothing for so long is dropped
    drain_seconds      how long a shutdown waits for what runs
    log_format         "text", or "json": one object a line
    rl                 whether trainers may drive the engine (`dsv4.http.apis.rl`)
    rl_roots           folders that they may have weights read from
    profile_dir        folder of profiles; None: there are no routes for them. Needs `api_key`
    choices            what the server chose by itself, for `/server_info`
    planned_bytes      of one device: weights, cache, ...
    """

    name: str
    root: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    allowed_hosts: tuple[str, ...] = ()
    tls: TlsFiles | None = None
    api_key: str | None = None
    default_thinking: bool = False
    effort_profile: str = "preview"
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    max_connections: int = 1024
    max_body_bytes: int = 8 * MIB
    max_json_depth: int = 64
    max_messages: int = 16384
    max_answer_bytes: int = 1024 * MIB
    max_output_tokens: int | None = None
    max_waiting: int = 256
    header_seconds: float = 15.0
    body_seconds: float = 60.0
    stall_seconds: float = 60.0
    drain_seconds: float = 60.0
    log_format: str = "text"
    rl: bool = False
    rl_roots: tuple[str, ...] = ()
    profile_dir: str | None = None
    choices: tuple[Choice, ...] = ()
    planned_bytes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name or not self.name.isprintable():
            raise ConfigError(f"name must be printable text, found {shown(self.name)}")
        if not is_size(self.port, 0) or self.port > 65535:
            raise ConfigError(f"port must be from 0 to 65535, found {shown(self.port)}")
        if self.api_key is not None and (not self.api_key.isascii() or not self.api_key.strip()):
            raise ConfigError("api_key must be ASCII text and not empty")
        for host in self.allowed_hosts:
            if not host or not host.isascii() or any(sign in host for sign in " /@"):
                raise ConfigError(f"allowed_hosts must be names such as api.example.org, or *, found {shown(host)}")
        for name in ("max_connections", "max_body_bytes", "max_json_depth", "max_messages", "max_answer_bytes",
                     "max_waiting"):  # fmt: skip
            if not is_size(getattr(self, name)):
                raise ConfigError(f"{name} must be a positive integer, found {shown(getattr(self, name))}")
        if self.max_output_tokens is not None and not is_size(self.max_output_tokens):
            raise ConfigError(f"max_output_tokens must be a positive integer, found {shown(self.max_output_tokens)}")
        for name in ("header_seconds", "body_seconds", "stall_seconds", "drain_seconds"):
            if not is_positive_real(getattr(self, name)):
                raise ConfigError(f"{name} must be a positive number, found {shown(getattr(self, name))}")
        if self.profile_dir is not None and self.api_key is None:
            raise ConfigError("profile_dir needs api_key: a profile costs time and disk, and shows what runs")
        if self.log_format not in LOG_FORMATS:
            raise ConfigError(f"log_format must be one of {', '.join(LOG_FORMATS)}, found {shown(self.log_format)}")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback_name(self.host)


@lru_cache(maxsize=64)  # asked for every request
def is_loopback_name(host: str) -> bool:
    """`localhost`, or an address of the loopback interface (127.0.0.0/8, ::1)."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
