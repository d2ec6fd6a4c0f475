"""How many parameters and bytes a checkpoint has, tensor by tensor, from the config alone. No torch, no files.

The official list reproduces the published index exactly: bytes are those of the tensors, without safetensors headers.

| experts | routed experts | other matrices | block scales |
|---|---|---|---|
| mxfp4 | E2M1, one E8M0 per 32 | E4M3 | E8M0 | DeepSeek's release |
| nvfp4 | E2M1, one E4M3 per 16, two FP32 per matrix (draft experts stay MXFP4) | E4M3 | E8M0 | ModelOpt |
| fp8 | E4M3 | E4M3 | FP32 | the Base release |
| bf16 | BF16 | BF16 | none | dequantised |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from dsv4.config import ConfigError, ModelConfig
from dsv4.formats.rows import ENTRY_GROUP  # noqa: F401
from dsv4.schedule import AttentionKind, LayerSpec, RouterKind, build_schedule
