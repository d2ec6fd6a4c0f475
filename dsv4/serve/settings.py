"""`ServerConfig`: what a server allows and how it behaves. Frozen and checked; no web framework here."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from dsv4.config import ConfigError, is_positive_real, is_size, shown

MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """
    name               the model's name in requests and answers
    host, port         where to listen; a loopback address unless told otherwise. Port 0 takes a free one
    api_key            required as `Authorization: Bearer KEY` on /v1 and /live when set
    default_thinking   whether the model thinks when a request does not say
    effort_profile     which reasoning efforts there are (`dsv4.text.chat.effort_profile`)
    max_body_bytes     larger requests are refused (413)
    max_json_depth     deeper JSON is refused (400)
    max_choices        prompts times `n` of one request
    max_output_tokens  most tokens one answer may ask for; None: the context
    max_waiting        requests that may wait for a slot before others are refused (503)
    stall_seconds      a client that takes nothing for so long is dropped
    drain_seconds      how long a shutdown waits for what runs
    """

    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    default_thinking: bool = False
    effort_profile: str = "preview"
    max_body_bytes: int = 8 * MIB
    max_json_depth: int = 64
    max_choices: int = 16
    max_output_tokens: int | None = None
    max_waiting: int = 256
    stall_seconds: float = 60.0
    drain_seconds: float = 60.0

    def __post_init__(self) -> None:
        if not self.name or not self.name.isprintable():
            raise ConfigError(f"name must be printable text, found {shown(self.name)}")
        if not is_size(self.port, 0) or self.port > 65535:
            raise ConfigError(f"port must be from 0 to 65535, found {shown(self.port)}")
        if self.api_key is not None and (not self.api_key.isascii() or not self.api_key.strip()):
            raise ConfigError("api_key must be ASCII text and not empty")
        for name in ("max_body_bytes", "max_json_depth", "max_choices", "max_waiting"):
            if not is_size(getattr(self, name)):
                raise ConfigError(f"{name} must be a positive integer, found {shown(getattr(self, name))}")
        if self.max_output_tokens is not None and not is_size(self.max_output_tokens):
            raise ConfigError(f"max_output_tokens must be a positive integer, found {shown(self.max_output_tokens)}")
        for name in ("stall_seconds", "drain_seconds"):
            if not is_positive_real(getattr(self, name)):
                raise ConfigError(f"{name} must be a positive number, found {shown(getattr(self, name))}")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
