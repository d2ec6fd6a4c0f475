"""E4M3 products of Hopper's tensor cores against their model, bit by bit. On an H200, some seconds:

    python -m tools.fp8.products

Prints for eight kinds of numbers how many sums differ: wgmma from `chain_sums`, and wgmma of 8, 16 and 32 columns from
that of 128. Decision record: docs/decisions/mxfp4-on-fp8.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.ops.lib.guard import gl, gluon_jit, hopper
from tools.fp8.study import SMALLEST_NORMAL, chain_sums

BATCH = 4


@gluon_jit
def _wgmma_kernel(a_ptr, b_ptr, out_ptr, N: gl.constexpr, K: gl.constexpr):
    LOAD: gl.constexpr = gl.BlockedLayout([1, 16], [16, 2], [4, 1], [1, 0])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(K, 8, 2)
    program = gl.program_id(0)
    col = gl.arange(0, K, gl.SliceLayout(0, LOAD))[None, :]
    a = gl.load(a_ptr + program * 64 * K + gl.arange(0, 64, gl.SliceLayout(1, LOAD))[:, None] * K + col)
    b = gl.load(b_ptr + program * N * K + gl.arange(0, N, gl.SliceLayout(1, LOAD))[:, None] * K + col)
    a_shared = gl.allocate_shared_memory(gl.float8e4nv, [64, K], SHARED, a)
    b_shared = gl.allocate_shared_memory(gl.float8e4nv, [N, K], SHARED, b)
    hopper.fence_async_shared()
    gl.barrier()
    none = gl.zeros([64, N], gl.float32, MMA)
    sums = hopper.warpgroup_mma(a_shared, b_shared.permute((1, 0)), none, use_acc=False, is_async=True)
    sums = hopper.warpgroup_mma_wait(0, deps=(sums,))
    row, out = gl.arange(0, 64, gl.SliceLayout(1, MMA)), gl.arange(0, N, gl.SliceLayout(0, MMA))
    gl.store(out_ptr + program * 64 * N + row[:, None] * N + out[None, :], sums)


def wgmma(a: Tensor, b: Tensor) -> Tensor:
    """E4M3 numbers [batch, 64, K], [batch, N, K] -> fp32 [batch, 64, N], a chain of products from zero."""
    out = torch.empty(len(a), 64, b.shape[1], device=a.device)
    left, right = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    _wgmma_kernel[(len(a),)](left, right, out, N=b.shape[1], K=a.shape[2], num_warps=4)
    return out


def e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def datasets(device: str) -> dict[str, tuple[Tensor, Tensor]]:
    """E4M3 numbers in fp32: [batch, 64, 128] and [batch, 128, 128]."""

    def normal(rows: int) -> Tensor:
        return torch.randn(BATCH, rows, 128, device=device)

    def any_bytes(rows: int) -> Tensor:
        codes = torch.randint(0, 256, (BATCH, rows, 128), device=device, dtype=torch.int32)
        return torch.where(codes & 127 == 127, 0, codes).to(torch.uint8).view(torch.float8_e4m3fn).float()

    falling = torch.exp2(-torch.arange(128, device=device).float() / 8)
    pairs = normal(64) * torch.tensor([1.0, 1.0, 2.0**-6, 2.0**-6], device=device).repeat(32)
    other = normal(128)
    other[..., 1::4] = other[..., ::4]
    pairs[..., 1::4] = -pairs[..., ::4]
    weights = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=device)
    codes = weights[torch.randint(0, 8, (BATCH, 64, 128), device=device)]
    codes = codes * torch.exp2(torch.randint(-2, 3, (BATCH, 64, 4), device=device).float()).repeat_interleave(32, -1)
    codes = codes * torch.randint(0, 2, codes.shape, device=device).mul(2).sub(1)
    return {
        "weights and x": (codes, e4m3(normal(128) * 100)),
        "normal": (e4m3(normal(64) * 8), e4m3(normal(128) * 8)),
        "any bytes": (any_bytes(64), any_bytes(128)),
        "falling": (e4m3(normal(64) * 100 * falling), e4m3(normal(128) * 100)),
        "rising": (e4m3(normal(64) * 100 * falling.flip(0)), e4m3(normal(128) * 100)),
        "cancelling": (e4m3(pairs * 64), e4m3(other * 64)),
        "small": (e4m3(normal(64) * 2.0**-8), e4m3(normal(128) * 2.0**-7)),
        "positive": (e4m3(normal(64).abs() * 8), e4m3(normal(128).abs() * 8)),
    }


def model(a: Tensor, b: Tensor) -> Tensor:
    """As `wgmma`, by `chain_sums`."""
    pairs = zip(a.double(), b.double(), strict=True)
    return torch.stack([chain_sums(*pair, smallest=SMALLEST_NORMAL).float() for pair in pairs])


def main() -> None:
    torch.manual_seed(0)
    for name, (a, b) in datasets("cuda").items():
        for cols in (32, 128):
            left, right = a[..., :cols].contiguous(), b[..., :cols].contiguous()
            found, exact = wgmma(left, right), left.double() @ right.double().mT
            few = [int((wgmma(left, right[:, :n].contiguous()) != found[..., :n]).sum()) for n in (8, 16, 32)]
            error = float(((found - exact).abs() / exact.abs().amax(-1, keepdim=True)).max())
            print(
                f"{name + ',':14} {cols:3} columns: of {found.numel()} sums {int((model(left, right) != found).sum())} "
                f"differ from the model, N = 8, 16 and 32 {few} from 128; off by at most {error:.1e}", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    with torch.no_grad():
        main()
