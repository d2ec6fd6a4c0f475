"""Launches that overlap, and data fetched ahead into L2.

A launch with `launch_pdl` begins as soon as every program of the launch before it has called `pdl_trigger` or ended.
`pdl_wait` returns when that launch has ended and all it wrote can be read. The rule: every program of such a launch
waits, and before its wait it writes nothing and reads only what no launch of a step writes: weights, and the batch's
positions and slots. So the end of a launch is the end of all launches before it, and it does not matter whether a
kernel calls `pdl_trigger` before or after its own wait. A kernel that is launched without `launch_pdl` needs no wait;
its `pdl_trigger` is for the launch after it. In the interpreter, and on GPUs that cannot, all of this is nothing.
"""

from __future__ import annotations

import importlib

from dsv4.ops.lib.arch import launches_overlap
from dsv4.ops.lib.guard import HAS_TRITON, INTERPRET, IS_INTERPRETED, jit, tl

if not IS_INTERPRETED and HAS_TRITON:
    _gdc = importlib.import_module("triton.language.extra.cuda")
    _gdc_wait, _gdc_launch_dependents = _gdc.gdc_wait, _gdc.gdc_launch_dependents
else:
    _gdc_wait = _gdc_launch_dependents = None
_PREFETCH_PTX = tl.constexpr("prefetch.global.L2 [$1]; mov.u32 $0, 0;")


@jit
def pdl_wait():
    """Until the launch before this one has ended."""
    if launches_overlap():
        _gdc_wait()


@jit
def pdl_trigger():
    """The next launch may begin, as far as this program is concerned."""
    if launches_overlap():
        _gdc_launch_dependents()


@jit
def prefetch_l2(ptr):
    """The lines at `ptr` (a tensor of pointers, one a line of 128 bytes) into L2. Every one must be a valid address."""
    if not INTERPRET:
        tl.inline_asm_elementwise(_PREFETCH_PTX, "=r,l", [ptr], dtype=tl.int32, is_pure=False, pack=1)
