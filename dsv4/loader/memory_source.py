"""`TensorSource`: tensors of this process, read as a checkpoint is: same names, same checks, no file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from dsv4.loader.checkpoint import Checkpoint
from dsv4.loader.header import CheckpointError, TensorInfo

TENSOR_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32",
    torch.int32: "I32", torch.int64: "I64",
    torch.float64: "F64",
}  # fmt: skip


class TensorSource(Checkpoint):
    """Named tensors, on any device. They are read, never changed, and may be let go after the update."""

    def __init__(self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        pairs = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
        self.values = dict(pairs)
        label = Path("the given tensors")
        infos: dict[str, TensorInfo] = {}
        for name, tensor in pairs:
            if name in infos:
                raise CheckpointError(f"{name} is given twice")
            if not isinstance(tensor, Tensor) or tensor.dtype not in TENSOR_DTYPES:
                kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
                known = ", ".join(str(dtype).removeprefix("torch.") for dtype in TENSOR_DTYPES)
                raise CheckpointError(f"{name} is {kind}, expected a tensor of one of: {known}")
            num_bytes = tensor.numel() * tensor.element_size()
            infos[name] = TensorInfo(name, TENSOR_DTYPES[tensor.dtype], tuple(tensor.shape), label, 0, num_bytes)
        super().__init__(label, infos)

    def read(self, name: str) -> Tensor:
        tensor = self.values[name].detach()
        return tensor.view(torch.uint8) if tensor.dtype is torch.float8_e8m0fnu else tensor

    def close(self) -> None:
        """Nothing is open."""
