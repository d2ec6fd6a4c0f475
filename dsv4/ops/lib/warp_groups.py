"""Products of warp groups (wgmma) as Gluon does not have them: with any multiple of 8 columns, whose accumulators are
tensors of 16. And barriers in shared memory that warps wait for and arrive at one by one, where Gluon's operations
first wait for all warps of a partition.

Addresses are offsets in a CTA's shared memory: Triton lays allocations out in the order in which they are made, if
all live as long and none is larger than one before. Kernels that rely on this check it at start and trap.
All of it is PTX, for Hopper.
"""

from __future__ import annotations

from dsv4.ops.lib.arch import known_at_compile_time
from dsv4.ops.lib.guard import gl, gluon_jit


@known_at_compile_time
def _products_ptx(num_cols: int, num_planes: int) -> tuple[str, str]:
    """PTX and constraints. Operands: sums, out and in; planes of weights, two products each two; an address."""
    num_sums = -(-num_cols // 16) * 8
    planes, address = 2 * num_sums, 2 * num_sums + 4 * num_planes
    outs = ", ".join(f"${i}" for i in range(num_cols // 2))
    # the second operand: rows of 128 bytes, swizzled over 8 of them
    lines = [f"{{ .reg .b32 at; .reg .b64 x; mov.u32 at, global_smem; add.u32 at, at, ${address};"]
    lines += ["shr.u32 at, at, 4; or.b32 at, at, 0x10000;", "wgmma.fence.sync.aligned;"]
    for product in range(num_planes):
        # columns of two planes: those of which bit 1 is clear, then the others (`in_product_order`)
        first = planes + product // 2 * 8 + product % 2 * 2
        lines += [
            "mov.b64 x, {at, 0x40000040};",
            f"wgmma.mma_async.sync.aligned.m64n{num_cols}k16.f32.bf16.bf16 {{{outs}}}, "
            f"{{${first}, ${first + 1}, ${first + 4}, ${first + 5}}}, x, 1, 1, 1, 0;",
            "add.u32 at, at, 2;",
        ]
    lines += ["wgmma.commit_group.sync.aligned; }"]
    tied = [str(i) for i in range(num_sums)]
    return "\n".join(lines), ",".join(["=f"] * num_sums + tied + ["r"] * (4 * num_planes + 8))


@gluon_jit
def wgmma_issue(sums, planes, address, N: gl.constexpr):
    """sums += weights [64, 16 p] x the N rows at `address`, transposed, in each warp group; not before `wgmma_wait`.

    sums: fp32 [R, 16] for each 16 of the N rows, in the layout of an MMA with 16 columns; planes: p bf16 [R, 16] in the
    same layout, of words of which bit 1 of the column is the highest. A product takes 8 columns of each of two planes.
    """
    PTX: gl.constexpr = _products_ptx(N, len(planes))
    return gl.inline_asm_elementwise(
        PTX[0], PTX[1], sums + planes + (address,), dtype=(gl.float32,) * len(sums), is_pure=False, pack=8
    )


@known_at_compile_time
def _end_constraints(num_sums: int, num_planes: int) -> str:
    tied = [str(i) for i in range(8 * num_sums)]
    return ",".join(["=f"] * 8 * num_sums + tied + ["r"] * 4 * num_planes)


@gluon_jit
def wgmma_wait(sums, planes):
    """Sums once all products have ended, whose `planes` are in registers until then."""
    return gl.inline_asm_elementwise(
        "wgmma.wait_group.sync.aligned 0;", _end_constraints(len(sums), len(planes)), sums + planes,
        dtype=(gl.float32,) * len(sums), is_pure=False, pack=8,
    )


@gluon_jit
def warp_wait(address, phase):
    """Until the barrier at `address` has completed its phase."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 at; mov.u32 at, global_smem; add.u32 at, at, $1;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 p, [at], $2;\n@!p bra again;\nmov.b32 $0, $1; }",
        "=r,r,r", [address, phase], dtype=gl.int32, is_pure=False, pack=1,
    )


@gluon_jit
def warp_arrive(address):
    """A warp's arrival at the barrier at `address`."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 at; mov.u32 at, %laneid; setp.eq.u32 p, at, 0; bar.warp.sync 0xffffffff;\n"
        "mov.u32 at, global_smem; add.u32 at, at, $1; @p mbarrier.arrive.shared::cta.b64 _, [at]; mov.b32 $0, $1; }",
        "=r,r", [address], dtype=gl.int32, is_pure=False, pack=1,
    )


@gluon_jit
def load_word(address):
    return gl.inline_asm_elementwise(
        "{ .reg .b32 at; mov.u32 at, global_smem; add.u32 at, at, $1; ld.shared.b32 $0, [at]; }",
        "=r,r", [address], dtype=gl.int32, is_pure=False, pack=1,
    )


@gluon_jit
def trap():
    """Ends the launch with an error."""
    gl.inline_asm_elementwise("trap; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
