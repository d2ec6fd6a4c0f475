"""Sampling defaults that a checkpoint brings along in `generation_config.json`. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsv4.config import ConfigError
from dsv4.request import RequestError, SamplingParams

FILE_NAME = "generation_config.json"
FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_sampling_defaults(folder: Path) -> dict[str, float]:
    """What the file says of `FIELDS`; empty without a file. `ConfigError` for a file or a value that cannot be.

    Null means not given, and `top_k` -1 means 0, both as Hugging Face writes them. Everything else in the file (token
    ids, lengths, `do_sample`) is not a sampling default and is left alone.
    """
    file = folder / FILE_NAME
    if not file.is_file():
        return {}
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not a JSON file: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold an object, found {type(content).__name__}")
    given = {name: content[name] for name in FIELDS if content.get(name) is not None}
    if given.get("top_k") == -1:
        given["top_k"] = 0
    try:
        SamplingParams(**given)
    except RequestError as error:
        raise ConfigError(f"{file}: {error}; correct the file, or ignore it with --no-generation-config") from error
    return given


def describe(defaults: Mapping[str, float]) -> str:
    """`temperature 0.6, top_p 0.95`, for people."""
    return ", ".join(f"{name} {value:g}" for name, value in defaults.items())
