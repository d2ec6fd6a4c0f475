"""Which assembler makes binaries of Triton's kernels: it is part of what decides bits, and not Triton's version."""

from __future__ import annotations

import importlib
import re
import subprocess
from functools import cache


@cache
def ptxas_version(arch: int) -> str:
    """Version of the ptxas that Triton runs for an architecture (90 is Hopper), as "12.8.93".

    Triton brings two, and the environment may name others (TRITON_PTXAS_PATH, TRITON_PTXAS_BLACKWELL_PATH). Which of
    them an architecture gets differs between Tritons; so Triton is asked. What is asked has already been chosen: a
    variable set after Triton was imported counts here as it does there.
    """
    path = importlib.import_module("triton.backends.nvidia.compiler").get_ptxas(arch).path
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"\bV(\d+\.\d+\.\d+)", said)
    if found is None:
        raise ValueError(f"expected a version such as V12.8.93 in what {path} --version prints, found {said!r}")
    return found[1]


def assembler_of(capability: tuple[int, int]) -> str:
    """The same for a GPU's capability, with its name: "ptxas 12.8.93"."""
    return f"ptxas {ptxas_version(10 * capability[0] + capability[1])}"
