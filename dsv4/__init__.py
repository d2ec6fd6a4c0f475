"""dsv4: a DeepSeek-V4 inference engine with bit-exact results. `LLM` is the entry in Python, `python -m dsv4` in a
shell."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsv4.async_llm import AsyncLLM
    from dsv4.config import EngineConfig, ModelConfig
    from dsv4.errors import Dsv4Error
    from dsv4.llm import LLM
    from dsv4.request import Completion, SamplingParams

__version__ = "0.2.0"

# public name: its module, imported when the name is first used, so that `import dsv4` needs no torch
DEFINED_IN = {
    "LLM": "dsv4.llm",
    "AsyncLLM": "dsv4.async_llm",
    "SamplingParams": "dsv4.request",
    "Completion": "dsv4.request",
    "EngineConfig": "dsv4.config",
    "ModelConfig": "dsv4.config",
    "Dsv4Error": "dsv4.errors",
}
__all__ = ["LLM", "AsyncLLM", "Completion", "Dsv4Error", "EngineConfig", "ModelConfig", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    if name in DEFINED_IN:
        return getattr(importlib.import_module(DEFINED_IN[name]), name)
    raise AttributeError(f"module 'dsv4' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
