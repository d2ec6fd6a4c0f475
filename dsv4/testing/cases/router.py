"""Cases of ops/router: the dense router of Flash (256 experts of 4096) and Pro (384 of 7168), a hash layer, the
choice.
"""

from collections.abc import Callable
from functools import partial

import torch

from dsv4.ops.router import GATE_CONFIGS, GateConfig, launch_route
from dsv4.testing.bench import BenchCase, Work, nbytes
from dsv4.testing.op_call import op_call

MODELS = {"flash": (4096, 256, 6), "pro": (7168, 384, 6), "small": (256, 16, 2)}
REAL = ("flash", "pro")
VOCABULARY = 129280
_, MIDDLE, LARGE = GATE_CONFIGS.values()
VARIANTS = {
    1: {"-warps8": GateConfig(64, 16, True, num_warps=8), "-two-launches": GateConfig(64, 16, True, is_fused=False)},
    64: {"-rows64": MIDDLE},
    256: {"-unsplit": LARGE},
    4096: {"-64x64": GateConfig(64, 64, False, num_warps=4, num_stages=2)},
}


def _route(model: str, rows: int, is_hash: bool = False, variant: tuple[str, GateConfig] | None = None) -> BenchCase:
    width, num_experts, top_k = MODELS[model]

    def build(device: torch.device) -> Work:
        x = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
        gate = torch.randn(num_experts, width, device=device, dtype=torch.bfloat16)
        bias = torch.randn(num_experts, device=device)
        table = torch.randint(0, num_experts, (VOCABULARY, top_k), device=device) if is_hash else None
        token_ids = torch.randint(0, VOCABULARY, (rows,), device=device)
        given = None if is_hash else bias

        call: Callable[[], object] = op_call(
            "route", x=x, gate=gate, bias=given, tid2eid=table, token_ids=token_ids, top_k=top_k, scale=1.5
        )
        if variant is not None:
            config = variant[1]
            call = partial(launch_route, x, gate, given, table, token_ids, top_k, 1.5, config)
        flops = 2 * rows * num_experts * width
        return Work(call, nbytes(x, gate, bias, token_ids), rows * top_k * 12, flops)

    name = f"{model}-{'hash' if is_hash else 'dense'}-{rows}{variant[0] if variant else ''}"
    shape: dict[str, int | str] = {"rows": rows, "width": width, "experts": num_experts, "top_k": top_k}
    return BenchCase("route", name, shape | {"variant": variant[0] if variant else ""}, build)


def _choice(rows: int) -> BenchCase:
    def build(device: torch.device) -> Work:
        logits, bias = torch.randn(rows, 256, device=device), torch.randn(256, device=device)
        call = op_call("activation_topk", logits=logits, bias=bias, top_k=6, scale=1.5)
        return Work(call, nbytes(logits, bias), rows * 6 * 12)

    return BenchCase("activation_topk", f"{rows}x256", {"rows": rows, "experts": 256}, build)


CASES = [
    *(_route(model, rows) for model in REAL for rows in (1, 16, 64, 256, 4096)),
    *(_route("flash", rows, variant=item) for rows, variants in VARIANTS.items() for item in variants.items()),
    *(_route("flash", rows, is_hash=True) for rows in (1, 4096)),
    *(_choice(rows) for rows in (1, 4096)),
]
SMALL = [_route("small", 5), _route("small", 5, is_hash=True), _choice(5)]
