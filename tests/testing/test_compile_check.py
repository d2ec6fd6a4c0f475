"""The compile check refuses what compiles to nothing."""

from __future__ import annotations

from dsv4.testing.compile_check import is_only_a_trap

KERNEL = ".visible .entry _kernel()\n.reqntid 256\n{{\n{body}\n}}\n"


def test_a_bare_trap_is_no_kernel():
    assert is_only_a_trap(KERNEL.format(body="\ttrap;"))


def test_a_kernel_may_hold_a_trap():
    assert not is_only_a_trap(KERNEL.format(body="\t@%p1 trap;\n\tst.global.b32 [%rd1], %r1;\n\tret;"))
    assert not is_only_a_trap(KERNEL.format(body="\tret;"))
