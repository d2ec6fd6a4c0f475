"""Cases of ops/moe: all of a feed-forward sublayer behind the router, Flash and Pro, and one FP4 linear; the sort of
(token, choice) pairs in tiles of 16 (decode) and 64 rows.

Every token has experts of its own choice, uniformly: the bytes are those of the experts that such a choice meets on
average. Weights are random bits of the right kind; on "meta" they are empty.
"""

from __future__ import annotations

import torch

from dsv4.formats.fp8 import fp8_fake_quantize
from dsv4.formats.layouts import ShuffledTensor
from dsv4.formats.tensors import ACTIVATION_GROUP, QuantFormat
from dsv4.ops.moe import expert_sort, fp4_linear, max_tiles, takes_rounded
from dsv4.testing.bench import BenchCase, Work, nbytes
from dsv4.testing.op_call import op_call

MODELS = {"flash": (4096, 2048, 256, 6), "pro": (7168, 3072, 384, 6), "small": (256, 128, 4, 2)}
LIMIT = 10.0
TOP_K = 6


def random_weight(shape: tuple[int, ...], fmt: QuantFormat, device: torch.device) -> ShuffledTensor:
    """Random weights of standard deviation about 0.02 [..., N, K] in the shuffled form."""
    *stack, num_rows, num_cols = shape
    lead = (*stack, num_rows // 64, num_cols // 128)
    is_fp8 = fmt is QuantFormat.FP8_BLOCK
    words = 32 if is_fp8 else 16
    data = torch.randint(-(2**31), 2**31 - 1, (*lead, 64, words), dtype=torch.int32, device=device)
    if is_fp8:
        data &= 0xBFBFBFBF - 2**32  # bit 6 of no byte: neither NaN nor large
        scale = torch.full(lead, (127 + 120) * 0x00800080, dtype=torch.int32, device=device)
        out_scale, shift = 2.0**-5, -5  # blocks of 2^-5
    else:
        is_nvfp4 = fmt is QuantFormat.NVFP4
        code = 0x9C if is_nvfp4 else 250  # 0.75; 2^-7 with the shift
        scale = torch.full(
            (*lead, 64, 2 if is_nvfp4 else 1), code * 0x01010101 - 2**32, dtype=torch.int32, device=device
        )
        out_scale, shift = (2.0**2, 0) if is_nvfp4 else (2.0**-4, 130)
    given = torch.full(tuple(stack), 2.0**-7, device=device) if fmt is QuantFormat.NVFP4 else None
    scale_dtype = torch.float8_e4m3fn if fmt is QuantFormat.NVFP4 else torch.uint8
    out_scales = torch.full(tuple(stack), out_scale, device=device)
    shifts = torch.full(tuple(stack), shift, dtype=torch.int32, device=device)
    return ShuffledTensor(data, scale, out_scales, shifts, fmt, torch.Size(shape), (128, 128), scale_dtype, given)


def random_layer(
    model: str, fmt: QuantFormat, device: torch.device, num_experts: int | None = None
) -> tuple[tuple[ShuffledTensor, ...], tuple[ShuffledTensor, ...]]:
    """(w1, w2, w3) of the routed experts, all or this many, and of the shared one."""
    dim, width, all_experts, _ = MODELS[model]
    num_experts = all_experts if num_experts is None else num_experts
    shapes = ((width, dim), (dim, width), (width, dim))
    routed = tuple(random_weight((num_experts, *shape), fmt, device) for shape in shapes)
    return routed, tuple(random_weight(shape, QuantFormat.FP8_BLOCK, device) for shape in shapes)


def random_inputs(model: str, tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, experts (distinct, ascending) and weights."""
    dim, _, num_experts, top_k = MODELS[model]
    x = torch.randn(tokens, dim, device=device, dtype=torch.bfloat16)
    experts = torch.rand(tokens, num_experts, device=device).topk(top_k, sorted=False).indices.sort(-1).values
    return x, experts, torch.rand(tokens, top_k, device=device)


def experts_met(num_experts: int, top_k: int, tokens: int) -> float:
    return num_experts * (1 - (1 - top_k / num_experts) ** tokens)


def layer_bytes(model: str, fmt: QuantFormat, tokens: int) -> int:
    """Weights of the experts met on average, the shared expert, and x in and out."""
    dim, width, num_experts, top_k = MODELS[model]
    weight = 0.5625 if fmt is QuantFormat.NVFP4 else 0.53125
    return int(3 * dim * width * (experts_met(num_experts, top_k, tokens) * weight + 1) + 2 * tokens * dim)


def _moe(model: str, fmt: QuantFormat, tokens: int) -> BenchCase:
    dim, width, num_experts, top_k = MODELS[model]

    def build(device: torch.device) -> Work:
        routed, shared = random_layer(model, fmt, device)
        x, experts, weights = random_inputs(model, tokens, device)

        call = op_call("moe", x=x, experts=experts, weights=weights, routed=routed, shared=shared, limit=LIMIT)
        if takes_rounded(tokens, routed):  # as the model calls it
            call = op_call("moe", **call.arguments, rounded=fp8_fake_quantize(x, ACTIVATION_GROUP))
        flops = 6 * tokens * (top_k + 1) * dim * width
        return Work(call, layer_bytes(model, fmt, tokens), 2 * tokens * dim, flops)

    shape: dict[str, int | str] = {"tokens": tokens, "dim": dim, "width": width, "experts": num_experts, "top_k": top_k}
    return BenchCase("moe", f"{model}-{fmt.value}-{tokens}", shape, build)


def _moe_parts(model: str, fmt: QuantFormat, tokens: int, num_ranks: int) -> BenchCase:
    """What one of `num_ranks` ranks computes of `tokens` tokens: parts of its own experts."""
    dim, width, num_experts, top_k = MODELS[model]
    own = num_experts // num_ranks

    def build(device: torch.device) -> Work:
        routed, shared = random_layer(model, fmt, device, own)
        x, experts, weights = random_inputs(model, tokens, device)
        experts = torch.where(experts < own, experts, -1)

        call = op_call("moe_parts", x=x, experts=experts, weights=weights, routed=routed, shared=shared, limit=LIMIT)
        weight = 0.5625 if fmt is QuantFormat.NVFP4 else 0.53125
        met = experts_met(num_experts, top_k, tokens) / num_ranks
        num_parts = tokens * top_k // num_ranks
        read = int(3 * dim * width * met * weight + 2 * tokens * dim)
        return Work(call, read, 2 * num_parts * dim, 6 * num_parts * dim * width)

    shape: dict[str, int | str] = {"tokens": tokens, "dim": dim, "width": width, "experts": own, "top_k": top_k}
    return BenchCase("moe_parts", f"{model}-{fmt.value}-{tokens}-of-{num_ranks}", shape, build)


def _moe_shared(model: str, fmt: QuantFormat, tokens: int) -> BenchCase:
    dim, width, _, top_k = MODELS[model]

    def build(device: torch.device) -> Work:
        routed, shared = random_layer(model, fmt, device, 1)
        x = torch.randn(tokens, dim, device=device, dtype=torch.bfloat16)
        out = torch.empty_like(x)
        op = op_call("moe_shared", x=x, routed=routed, shared=shared, out=out, top_k=top_k, limit=LIMIT)

        def call() -> torch.Tensor:
            op()
            return out

        return Work(call, 3 * dim * width + nbytes(x), nbytes(x), 6 * tokens * dim * width, op=op)

    shape: dict[str, int | str] = {"tokens": tokens, "dim": dim, "width": width, "top_k": top_k}
    return BenchCase("moe_shared", f"{model}-{fmt.value}-{tokens}", shape, build)


def _moe_fold(model: str, tokens: int) -> BenchCase:
    dim, _, _, top_k = MODELS[model]

    def build(device: torch.device) -> Work:
        parts = torch.randn(tokens, top_k, dim, device=device, dtype=torch.bfloat16)
        shared_out = torch.randn(tokens, dim, device=device, dtype=torch.bfloat16)
        call = op_call("moe_fold", parts=parts, shared_out=shared_out)
        return Work(call, nbytes(parts, shared_out), nbytes(shared_out))

    return BenchCase("moe_fold", f"{model}-{tokens}", {"tokens": tokens, "dim": dim, "top_k": top_k}, build)


def _fp4_linear(fmt: QuantFormat, rows: int, num_outs: int, num_cols: int) -> BenchCase:
    def build(device: torch.device) -> Work:
        weight = random_weight((num_outs, num_cols), fmt, device)
        x = torch.randn(rows, num_cols, device=device, dtype=torch.bfloat16)
        read = nbytes(x, weight.data, weight.scale)
        return Work(lambda: fp4_linear(x, weight), read, 2 * rows * num_outs, 2 * rows * num_outs * num_cols)

    shape: dict[str, int | str] = {"rows": rows, "outs": num_outs, "cols": num_cols}
    return BenchCase("fp4_linear", f"{fmt.value}-{rows}x{num_outs}x{num_cols}", shape, build)


def _expert_sort(num_experts: int, tokens: int, tile_rows: int) -> BenchCase:
    def build(device: torch.device) -> Work:
        experts = torch.randint(0, num_experts, (tokens, TOP_K), device=device)
        num_pairs = tokens * TOP_K
        written = 4 * (2 * num_experts + 1 + num_pairs + 2 * max_tiles(num_pairs, num_experts, tile_rows))
        return Work(lambda: expert_sort(experts, num_experts, tile_rows), nbytes(experts), written)

    shape: dict[str, int | str] = {"experts": num_experts, "tokens": tokens, "tile_rows": tile_rows}
    return BenchCase("expert_sort", f"{num_experts}-{tokens}x{TOP_K}", shape, build)


CASES = [
    *(_moe("flash", QuantFormat.NVFP4, tokens) for tokens in (1, 4, 8, 16, 64, 256, 1024, 4096, 16384)),
    *(_moe("flash", QuantFormat.MXFP4, tokens) for tokens in (1, 4, 8, 16, 64, 256, 1024, 4096, 16384)),
    *(_moe("pro", QuantFormat.NVFP4, tokens) for tokens in (1, 64, 4096)),
    *(_moe_parts("flash", QuantFormat.NVFP4, tokens, 4) for tokens in (4, 64, 4096)),
    *(_moe_shared("flash", QuantFormat.NVFP4, tokens) for tokens in (1, 16, 1024)),
    *(_moe_fold("flash", tokens) for tokens in (1, 16, 1024)),
    *(_fp4_linear(QuantFormat.NVFP4, rows, 4096, 4096) for rows in (1, 64, 4096)),
    *(_fp4_linear(QuantFormat.MXFP4, rows, 4096, 4096) for rows in (1, 4096)),
    *(_expert_sort(num_experts, tokens, 16) for num_experts in (256, 384) for tokens in (1, 16, 64)),
    *(_expert_sort(num_experts, tokens, 64) for num_experts in (256, 384) for tokens in (256, 4096)),
]
SMALL = [
    *(_moe("small", fmt, 3) for fmt in (QuantFormat.NVFP4, QuantFormat.MXFP4)),
    _moe_parts("small", QuantFormat.NVFP4, 3, 2),
    _moe_shared("small", QuantFormat.NVFP4, 3),
    _moe_fold("small", 3),
]
