"""Decoding and chains of products for kernel.py: nibbles become E4M3 bytes in registers, and four wgmma from zero
multiply them by token rows in shared memory, of which there are any multiple of 8.
"""

from __future__ import annotations

from dsv4.ops.lib.arch import known_at_compile_time
from dsv4.ops.lib.guard import gl, gluon_jit

TWO_CHAINS = 80  # token rows up to which registers hold the sums of two chains
_TWO_CHAINS = gl.constexpr(TWO_CHAINS)

# Operands: bytes of nibbles 0 .. 3 and 4 .. 7, out; a word; the bytes of the sizes 0 .. 3 and 4 .. 7
DECODE = gl.constexpr(
    "{ .reg .b32 m, p, n; and.b32 m, $2, 0x77777777; prmt.b32 p, $3, $4, m; lop3.b32 $0, $2, 0x80808080, p, 0xEA;"
    " shr.u32 m, m, 16; prmt.b32 p, $3, $4, m; shl.b32 n, $2, 4; lop3.b32 $1, n, 0x80808080, p, 0xEA; }"
)


@gluon_jit
def byte_tables(exponents):
    """8 e -> E4M3 bytes of 2^(e - 5) times 0, 0.5, 1, 1.5 and times 2, 3, 4, 6. Zero stays zero."""
    return exponents * 0x01010100 + 0x14100800, exponents * 0x01010101 + 0x24201C18


@gluon_jit
def decoded(words, low, high):
    """The bytes of a word's nibbles, by the tables of its group: 0 .. 3 and 4 .. 7."""
    return gl.inline_asm_elementwise(
        DECODE, "=&r,=&r,r,r,r", [words, low, high], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )


@known_at_compile_time
def _chain_ptx(num_cols: int, has_registers: bool) -> tuple[str, str]:
    """PTX and constraints of a chain, with `has_registers` into those of an earlier one. Operands: sums, out (then in
    too); weights; address; (then whether the first product adds to what was there)."""
    num_sums = -(-num_cols // 16) * 8
    low = num_sums * (2 if has_registers else 1)
    high, address, is_sum = low + 8, low + 16, low + 24
    outs = ", ".join(f"${i}" for i in range(num_cols // 2))
    head = "{ .reg .pred p; .reg .b32 at;" if has_registers else "{ .reg .b32 at;"
    lines = [f"{head} .reg .b64 x; mov.u32 at, global_smem; add.u32 at, at, ${address};"]
    if has_registers:
        lines += [f"setp.ne.b32 p, ${is_sum}, 0;"]
    lines += ["shr.u32 at, at, 4; or.b32 at, at, 0x10000;"]
    if not has_registers:
        lines += [f"mov.b32 ${i}, 0f00000000;" for i in range(num_cols // 2, num_sums)]
    lines += ["wgmma.fence.sync.aligned;"]
    for product in range(4):
        first = product % 2 + 4 * (product // 2)
        adds = "1" if product else "p" if has_registers else "0"
        lines += [
            "mov.b64 x, {at, 0x40000040};",
            f"wgmma.mma_async.sync.aligned.m64n{num_cols}k32.f32.e4m3.e4m3 {{{outs}}}, "
            f"{{${low + first}, ${low + first + 2}, ${high + first}, ${high + first + 2}}}, x, {adds}, 1, 1;",
            "add.u32 at, at, 2;",
        ]
    lines += ["wgmma.commit_group.sync.aligned; }"]
    if has_registers:
        return "\n".join(lines), ",".join(["=f"] * num_sums + [str(i) for i in range(num_sums)] + ["r"] * 32)
    return "\n".join(lines), ",".join(["=&f"] * num_sums + ["r"] * 24)


@gluon_jit
def begin_chain(parts, low, high, address, never, N: gl.constexpr):
    """A chain from zero over the N token rows at `address`. Where registers are few it takes those of `parts`, an
    earlier chain's. The assembler must not know that nothing is added to them (`never` is 0): it would take others."""
    TYPES: gl.constexpr = (gl.float32,) * ((N + 15) // 16)
    PTX: gl.constexpr = _chain_ptx(N, N > _TWO_CHAINS)
    operands = parts + (low, high, address, never) if N > _TWO_CHAINS else (low, high, address)  # noqa: RUF005
    return gl.inline_asm_elementwise(PTX[0], PTX[1], operands, dtype=TYPES, is_pure=False, pack=8)


@known_at_compile_time
def _tied(num_sums: int, num_operands: int) -> str:
    return ",".join(["=f"] * 8 * num_sums + [str(i) for i in range(8 * num_sums)] + ["r"] * num_operands)


@gluon_jit
def end_chain(sums, low, high):
    """Sums of a chain when it has ended. Its weights are in registers until then."""
    operands = sums + (low, high)  # noqa: RUF005
    return gl.inline_asm_elementwise(
        "wgmma.wait_group.sync.aligned 0;", _tied(len(sums), 16), operands,
        dtype=(gl.float32,) * len(sums), is_pure=False, pack=8,
    )  # fmt: skip


@gluon_jit
def here(sums):
    """The same, which are there before the next chain begins."""
    return gl.inline_asm_elementwise(
        "", _tied(len(sums), 0), sums, dtype=(gl.float32,) * len(sums), is_pure=False, pack=8
    )
