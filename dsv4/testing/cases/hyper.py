"""Cases of ops/hyper at the shapes of Flash (hidden 4096) and Pro (7168)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.ops.hyper import HyperSettings
from dsv4.testing.bench import BenchCase, Work, nbytes
from dsv4.testing.op_call import op_call

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
    def streams_arguments(self) -> dict[str, Tensor]:
        return {"out": self.out, "streams": self.streams, "post": self.post, "comb": self.comb}

    @property
    def mixing_arguments(self) -> dict[str, Tensor]:
        return dict(zip(("fn", "base", "scale"), self.mixing, strict=True))

    @property
    def weights_bytes(self) -> int:
        return nbytes(*self.mixing)

    @property
    def flops(self) -> int:
        """Of the fp32 product alone; on tensor cores it is three bf16 products."""
        return 3 * 2 * self.streams.shape[0] * self.mixing[0].numel()


def make_inputs(rows: int, width: int, device: torch.device, num_mixes: int = 24) -> Inputs:
    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    fn = normal(num_mixes, 4 * width, dtype=torch.float32) * width**-0.5
    base = normal(num_mixes, dtype=torch.float32)
    return Inputs(
        normal(rows, width), normal(rows, 4, width), torch.rand(rows, 4, device=device),
        torch.rand(rows, 4, 4, device=device), normal(width),
        (fn, base, torch.rand(3 if num_mixes > 4 else 1, device=device)),
    )  # fmt: skip


def _boundary(rows: int, width: int, has_codes: bool, has_rounded: bool = False) -> BenchCase:
    def build(device: torch.device) -> Work:
        x = make_inputs(rows, width, device)
        rounded = rows * width * 129 // 128 if has_codes else 2 * rows * width * has_rounded
        return Work(
            op_call(
                "hc_boundary", **x.streams_arguments, **x.mixing_arguments, norm_weight=x.norm, settings=SETTINGS,
                has_codes=has_codes, has_rounded=has_rounded,
            ),
            nbytes(x.out, x.streams, x.post, x.comb, x.norm) + x.weights_bytes,
            nbytes(x.streams, x.out, x.post, x.comb) + rounded,
            x.flops,
        )  # fmt: skip

    name = f"{'codes-' if has_codes else 'rounded-' if has_rounded else ''}{rows}x{width}"
    return BenchCase("hc_boundary", name, {"rows": rows, "width": width, "codes": str(has_codes)}, build)


def _enter(rows: int, width: int) -> BenchCase:
    """Layer 0: from the embedding."""

    def build(device: torch.device) -> Work:
        x = make_inputs(rows, width, device)
        return Work(
            op_call(
                "hc_enter", source=x.out, **x.mixing_arguments, norm_weight=x.norm, settings=SETTINGS, has_codes=False
            ),
            nbytes(x.out, x.norm) + x.weights_bytes,
            nbytes(x.streams, x.out, x.post, x.comb),
            x.flops,
        )

    return BenchCase("hc_enter", f"{rows}x{width}", {"rows": rows, "width": width}, build)


def _pre(rows: int, width: int) -> BenchCase:
    def build(device: torch.device) -> Work:
        x = make_inputs(rows, width, device)
        return Work(
            op_call("hc_pre", streams=x.streams, **x.mixing_arguments, num_iters=SETTINGS.num_iters, **EPS),
            nbytes(x.streams) + x.weights_bytes,
            nbytes(x.out, x.post, x.comb),
            x.flops,
        )

    return BenchCase("hc_pre", f"{rows}x{width}", {"rows": rows, "width": width}, build)


def _post(rows: int, width: int) -> BenchCase:
    def build(device: torch.device) -> Work:
        x = make_inputs(rows, width, device)
        read = nbytes(x.out, x.streams, x.post, x.comb)
        return Work(op_call("hc_post", **x.streams_arguments), read, nbytes(x.streams))

    return BenchCase("hc_post", f"{rows}x{width}", {"rows": rows, "width": width}, build)


def _head(rows: int, width: int, has_norm: bool) -> BenchCase:
    def build(device: torch.device) -> Work:
        x = make_inputs(rows, width, device, num_mixes=4)

        norm = {"norm_weight": x.norm} if has_norm else {}
        call = op_call(op, streams=x.streams, **x.mixing_arguments, **norm, **EPS)
        return Work(call, nbytes(x.streams, *norm.values()) + x.weights_bytes, nbytes(x.out), x.flops)

    op = "hc_head_norm" if has_norm else "hc_head"
    return BenchCase(op, f"{rows}x{width}", {"rows": rows, "width": width}, build)


CASES = [
    *(_boundary(rows, width, False) for width in (4096, 7168) for rows in (1, 4, 16, 64, 256, 1024, 4096)),
    _boundary(1, 4096, True),
    *(_boundary(1, width, False, True) for width in (4096, 7168)),
    _boundary(4096, 7168, True),
    _enter(1, 4096),
    *(_pre(rows, 4096) for rows in (1, 4096)),
    *(_post(rows, width) for width in (4096, 7168) for rows in (1, 16, 4096)),
    _head(1, 4096, True),
    _head(64, 7168, True),
    _head(1, 4096, False),
]
SMALL = [
    _boundary(3, 256, True),
    _boundary(70, 128, False),  # the form for many rows
    _boundary(3, 256, False, True),
    _enter(3, 256),
    _pre(3, 256),
    _post(3, 256),
    _head(3, 256, True),
    _head(3, 256, False),
]
