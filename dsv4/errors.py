"""`Dsv4Error`, the base of every exception that dsv4 defines, and the names that callers catch. No torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING


class Dsv4Error(Exception):
    """Base of all errors that dsv4 defines. Most are also a `ValueError` (the caller can correct the call) or a
    `RuntimeError` (something failed while it ran)."""


# each is defined beside the code that raises it, and imported from there when it is first asked for
DEFINED_IN = {
    "CheckpointError": "dsv4.loader.header",
    "ConfigError": "dsv4.config.model",
    "DeadlinePassed": "dsv4.engine.request",
    "EngineBusy": "dsv4.engine.link.messages",
    "HubError": "dsv4.hub",
    "KernelRefused": "dsv4.engine.run.kernel_record",
    "OffloadError": "dsv4.engine.offload.placement",
    "OutOfBlocks": "dsv4.cache.errors",
    "RankFailed": "dsv4.dist.errors",
    "RequestAborted": "dsv4.engine.request",
    "RequestError": "dsv4.request",
    "RequestFailed": "dsv4.engine.request",
    "TokenizerError": "dsv4.text.tokenizer",
    "WeightsIncomplete": "dsv4.engine.request",
}

if TYPE_CHECKING:
    from dsv4.cache.errors import OutOfBlocks
    from dsv4.config.model import ConfigError
    from dsv4.dist.errors import RankFailed
    from dsv4.engine.link.messages import EngineBusy
    from dsv4.engine.offload.placement import OffloadError
    from dsv4.engine.request import DeadlinePassed, RequestAborted, RequestFailed, WeightsIncomplete
    from dsv4.engine.run.kernel_record import KernelRefused
    from dsv4.hub import HubError
    from dsv4.loader.header import CheckpointError
    from dsv4.request import RequestError
    from dsv4.text.tokenizer import TokenizerError

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DeadlinePassed",
    "Dsv4Error",
    "EngineBusy",
    "HubError",
    "KernelRefused",
    "OffloadError",
    "OutOfBlocks",
    "RankFailed",
    "RequestAborted",
    "RequestError",
    "RequestFailed",
    "TokenizerError",
    "WeightsIncomplete",
]


def __getattr__(name: str) -> object:
    if name in DEFINED_IN:
        return getattr(importlib.import_module(DEFINED_IN[name]), name)
    raise AttributeError(f"module 'dsv4.errors' has no attribute {name!r}")
