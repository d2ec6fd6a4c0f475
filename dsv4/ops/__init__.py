"""Every operation of the model, a folder for each family: contract and oracle, launcher, tiles, kernels.

The model never calls an op by name; it is handed a `Backend` (backend.py), whose `OpSet` (contracts.py) holds one
implementation of every op: the oracles in `TORCH`, the kernels in `TRITON`.
"""

from dsv4.ops.backend import TORCH, TRITON, Backend, backend_for
from dsv4.ops.contracts import OpSet

__all__ = ["TORCH", "TRITON", "Backend", "OpSet", "backend_for"]
