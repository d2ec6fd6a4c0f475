"""Cases of ops/hyper.py at the shapes of Flash (hidden 4096) and Pro (7168).

`hc_boundary_variant` times other ways to cut the same launch up; what wins belongs into FEW_ROWS and MANY_ROWS of ops/hyper.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.ops.hyper import (
    FEW_ROWS,
    MANY_ROWS,
    HyperCall,
    HyperSettings,
    HyperVariant,
    hc_boundary,
    hc_enter,
    hc_head,
    hc_head_norm,
    hc_post,
    hc_pre,
    launch_hyper,
)
from dsv4.testing.bench import BenchCase, Work, nbytes

SETTINGS = HyperSettings(num_iters=20, hc_eps=1e-6, norm_eps=1e-6)
EPS = {"hc_eps": SETTINGS.hc_eps, "norm_eps": SETTINGS.norm_eps}


@dataclass(frozen=True)
class Inputs:
    """Everything an op of this family may be given."""

    out: Tensor
    streams: Tensor
    post: Tensor
    comb: Tensor
    norm: Tensor
    mixing: tuple[Tensor, Tensor, Tensor]  # fn, base, scale

    @property
    def weights_bytes(self) -> int:
        return nbytes(*self.mixing)

    @property
    def flops(self) -> int:
        """Of the fp32 product alone; on tensor cores it is three bf16 products."""
        return 3 * 2 * self.streams.shape[0] * self.mixing[0].numel()


def _inputs(rows: int, width: int, device: torch.device, num_mixes: int = 24) -> Inputs:
    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    fn = normal(num_mixes, 4 * width, dtype=torch.float32) * width**-0.5
    base = normal(num_mixes, dtype=torch.float32)
    return Inputs(
        normal(rows, width), normal(rows, 4, width), torch.rand(rows, 4, device=device),
        torch.rand(rows, 4, 4, device=device), normal(width), (fn, base, torch.rand(3 if num_mixes > 4 else 1, device=device)),
    )  # fmt: skip


def _boundary(rows: int, width: int, has_codes: bool) -> BenchCase:
    def build(device: torch.device) -> Work:
        x = _inputs(rows, width, device)
        return Work(
            lambda: hc_boundary(x.out, x.streams, x.post, x.comb, *x.mixing, x.norm, SETTINGS, has_codes),
            nbytes(x.out, x.streams, x.post, x.comb, x.norm) + x.weights_bytes,
            nbytes(x.streams, x.out, x.post, x.comb) + (rows * width * 129 // 128 if has_codes else 0),
            x.flops,
        )

    name = f"{'codes-' if has_codes else ''}{rows}x{width}"
    return BenchCase("hc_boundary", name, {"rows": rows, "width": width, "codes": str(has_codes)}, build)


def _variant(name: str, variant: HyperVariant, rows: int, width: int) -> BenchCase:
    def build(device: torch.device) -> Work:
        x = _inputs(rows, width, device)
        call = HyperCall(x.streams, *x.mixing, SETTINGS, x.norm, False, x.out, x.post, x.comb)
        return Work(
            lambda: launch_hyper(call, variant),
            nbytes(x.out, x.streams, x.post, x.comb, x.norm) + x.weights_bytes,
            nbytes(x.streams, x.out, x.post, x.comb),
            x.flops,
        )

    return BenchCase(
        "hc_boundary_variant", f"{name}-{rows}x{width}", {"rows": rows, "width": width, "cut": name}, build
    )


def _enter(rows: int, width: int) -> BenchCase:
    """Layer 0: from the embedding."""

    def build(device: torch.device) -> Work:
        x = _inputs(rows, width, device)
        return Work(
            lambda: hc_enter(x.out, *x.mixing, x.norm, SETTINGS, False),
            nbytes(x.out, x.norm) + x.weights_bytes,
            nbytes(x.streams, x.out, x.post, x.comb),
            x.flops,
        )

    return BenchCase("hc_enter", f"{rows}x{width}", {"rows": rows, "width": width}, build)


def _pre(rows: int, width: int) -> BenchCase:
    def build(device: torch.device) -> Work:
        x = _inputs(rows, width, device)
        return Work(
            lambda: hc_pre(x.streams, *x.mixing, num_iters=SETTINGS.num_iters, **EPS),
            nbytes(x.streams) + x.weights_bytes,
            nbytes(x.out, x.post, x.comb),
            x.flops,
        )

    return BenchCase("hc_pre", f"{rows}x{width}", {"rows": rows, "width": width}, build)


def _post(rows: int, width: int) -> BenchCase:
    def build(device: torch.device) -> Work:
        x = _inputs(rows, width, device)
        read = nbytes(x.out, x.streams, x.post, x.comb)
        return Work(lambda: hc_post(x.out, x.streams, x.post, x.comb), read, nbytes(x.streams))

    return BenchCase("hc_post", f"{rows}x{width}", {"rows": rows, "width": width}, build)


def _head(rows: int, width: int, has_norm: bool) -> BenchCase:
    def build(device: torch.device) -> Work:
        x = _inputs(rows, width, device, num_mixes=4)

        def call() -> Tensor:
            if has_norm:
                return hc_head_norm(x.streams, *x.mixing, x.norm, **EPS)
            return hc_head(x.streams, *x.mixing, **EPS)

        return Work(call, nbytes(x.streams, *([x.norm] if has_norm else [])) + x.weights_bytes, nbytes(x.out), x.flops)

    op = "hc_head_norm" if has_norm else "hc_head"
    return BenchCase(op, f"{rows}x{width}", {"rows": rows, "width": width}, build)


# one launch decides: does it pay to give Sinkhorn a program of its own, to cut the columns finer, to let nobody wait?
FEW_VARIANTS = {
    "one-role": replace(FEW_ROWS, num_workers=16, num_roles=1),
    "last-only": replace(FEW_ROWS, num_workers=1, num_roles=1),
    "split-32": replace(FEW_ROWS, split_cols=32),
}
MANY_VARIANTS = {
    "tile-16": replace(MANY_ROWS, tile_rows=16, worker_tokens=1),
    "last-only": replace(MANY_ROWS, tile_rows=16, num_workers=1),
    "tile-32": replace(MANY_ROWS, tile_rows=32, worker_tokens=2),
}

CASES = [
    *(_boundary(rows, width, False) for width in (4096, 7168) for rows in (1, 4, 16, 64, 256, 4096)),
    *(_boundary(rows, width, True) for width in (4096, 7168) for rows in (1, 4096)),
    *(_variant(name, cut, rows, 4096) for name, cut in FEW_VARIANTS.items() for rows in (1, 16, 64)),
    *(_variant(name, cut, rows, 4096) for name, cut in MANY_VARIANTS.items() for rows in (256, 4096)),
    *(_enter(rows, 4096) for rows in (1, 4096)),
    *(_pre(rows, width) for width in (4096, 7168) for rows in (1, 4096)),
    *(_post(rows, width) for width in (4096, 7168) for rows in (1, 16, 4096)),
    *(_head(rows, width, True) for width in (4096, 7168) for rows in (1, 64)),
    _head(1, 4096, False),
]
