"""dsv4: DeepSeek-V4 inference people can trust. `LLM` is the way in; `python -m dsv4 --help` is the other one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsv4.config import EngineConfig, ModelConfig
from dsv4.request import SamplingParams

if TYPE_CHECKING:
    from dsv4.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "ModelConfig", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    """`LLM` is imported when it is first asked for: planning memory or rendering a prompt must not load torch."""
    if name == "LLM":
        from dsv4.llm import LLM

        return LLM
    raise AttributeError(f"module 'dsv4' has no attribute {name!r}")
