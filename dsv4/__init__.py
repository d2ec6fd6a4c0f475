"""dsv4: DeepSeek-V4 inference people can trust. `LLM` is the way in; `python -m dsv4 --help` is the other one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsv4.config import EngineConfig, ModelConfig
from dsv4.request import SamplingParams

if TYPE_CHECKING:
    from dsv4.async_llm import AsyncLLM
    from dsv4.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "EngineConfig", "ModelConfig", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    """`LLM` and `AsyncLLM` are imported when first asked for: planning memory or rendering must not load torch."""
    if name == "LLM":
        from dsv4.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from dsv4.async_llm import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module 'dsv4' has no attribute {name!r}")
