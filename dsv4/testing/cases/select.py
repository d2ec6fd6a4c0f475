"""Cases of ops/select: index top-k (512 and 1024 of up to 262,144 candidates, ascending), and best first."""

from collections.abc import Callable
from functools import partial

import torch

from dsv4.ops.select import TOPK_CONFIG, TopkConfig, launch_topk
from dsv4.testing.bench import BenchCase, Work, nbytes
from dsv4.testing.op_call import op_call

# the default and what it is compared with
NEVER = 1 << 24  # columns
VARIANTS = {
    "": TOPK_CONFIG,
    "-one-program": TopkConfig(long_row=NEVER),
    "-shared": TopkConfig(lone_rows=0),
}


def _case(rows: int, columns: int, k: int, ascending: bool = True, variant: str = "") -> BenchCase:
    def build(device: torch.device) -> Work:
        scores = torch.randn(rows, columns, device=device)
        config = VARIANTS[variant]
        call: Callable[[], object] = op_call("topk_select", scores=scores, k=k, ascending=ascending)
        if variant:
            call = partial(launch_topk, scores, k, None, ascending, config)
        return Work(call, nbytes(scores), rows * k * 8)

    order = "" if ascending else "-best-first"
    shape: dict[str, int | str] = {"rows": rows, "columns": columns, "k": k, "ascending": str(ascending)}
    return BenchCase("topk_select", f"{k}-of-{columns}x{rows}{order}{variant}", shape | {"variant": variant}, build)


CASES = [
    *(_case(1, 262144, 512, variant=variant) for variant in ("", "-shared")),
    *(_case(rows, 262144, 512) for rows in (2, 4, 8, 16, 32, 64, 300)),
    *(_case(rows, 262144, 1024) for rows in (1, 16, 300)),
    *(_case(rows, columns, 512) for columns in (2048, 16384) for rows in (1, 64, 256)),
    *(_case(rows, 16384, 512) for rows in (8, 32)),
    *(_case(rows, 16384, 512, variant="-one-program") for rows in (1, 64)),
    _case(4096, 2048, 512),
    _case(1, 262144, 512, ascending=False),
]
SMALL = [_case(3, 300, 32), _case(3, 300, 32, ascending=False)]
