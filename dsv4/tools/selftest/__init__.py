"""`dsv4 selftest`: does this machine compute what it should? From the installed package alone.

On a GPU the kernels run compiled; without one they run in Triton's interpreter, which must be chosen before triton is
imported: call `choose_device` before importing another module of this package.
"""

import torch

from dsv4.testing import interpreter


def choose_device() -> torch.device:
    """The GPU, or the CPU with the interpreter made ready."""
    interpreter.without_gpu()
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
