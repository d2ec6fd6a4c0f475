"""Cases of ops/norm at the shapes of Flash (4096) and Pro (7168), and of the query latent (1024, 1536)."""

import torch

from dsv4.formats.tensors import ACTIVATION_GROUP
from dsv4.testing.bench import BenchCase, Work, nbytes
from dsv4.testing.op_call import op_call

EPS = 1e-6


def _inputs(rows: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
    return x, torch.randn(width, device=device, dtype=torch.bfloat16)


def _norm(rows: int, width: int, has_weight: bool) -> BenchCase:
    def build(device: torch.device) -> Work:
        x, weight = _inputs(rows, width, device)
        given = weight if has_weight else None
        return Work(
            op_call("rms_norm", x=x, weight=given, eps=EPS), nbytes(x, *([weight] if has_weight else [])), nbytes(x)
        )

    name = f"{'weighted' if has_weight else 'plain'}-{rows}x{width}"
    return BenchCase("rms_norm", name, {"rows": rows, "width": width, "weight": str(has_weight)}, build)


def _norm_quant(rows: int, width: int, keep_plain: bool) -> BenchCase:
    def build(device: torch.device) -> Work:
        x, weight = _inputs(rows, width, device)
        codes = rows * width + rows * width // ACTIVATION_GROUP
        written = codes + (nbytes(x) if keep_plain else 0)
        call = op_call("rms_norm_quant", x=x, weight=weight, eps=EPS, keep_plain=keep_plain)
        return Work(call, nbytes(x, weight), written)

    name = f"{'both' if keep_plain else 'codes'}-{rows}x{width}"
    return BenchCase("rms_norm_quant", name, {"rows": rows, "width": width, "keep_plain": str(keep_plain)}, build)


CASES = [
    *(_norm(rows, width, True) for width in (4096, 7168) for rows in (1, 16, 256, 4096)),
    *(_norm(rows, width, True) for width in (512, 1024, 1536) for rows in (1, 4096)),
    *(_norm(4096, width, False) for width in (512, 4096)),
    *(_norm_quant(rows, width, True) for width in (4096, 7168) for rows in (1, 16, 256, 4096)),
    *(_norm_quant(rows, width, False) for width in (1024, 1536) for rows in (1, 4096)),
]
SMALL = [
    *(_norm(5, 256, has_weight) for has_weight in (True, False)),
    *(_norm_quant(5, 256, keep_plain) for keep_plain in (True, False)),
]
