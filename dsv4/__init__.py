"""dsv4: DeepSeek-V4 inference people can trust. `LLM` is the way in; `python -m dsv4 --help` is the other one."""

from dsv4.config import EngineConfig, ModelConfig
from dsv4.llm import LLM
from dsv4.request import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "ModelConfig", "SamplingParams", "__version__"]
