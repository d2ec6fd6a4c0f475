"""What MXFP4 experts would compute on Hopper's FP8 tensor cores: an oracle of `moe`, and how far it is from exact sums.

    python -m tools.fp8.study        random rows, set A, and the miniature's perplexity; on a CPU

An instruction adds 32 products to what is there: all are cut off below 2^-13 of the largest of them. A product counts
there by its codes' exponents alone: 1.5 x 1.5 as 1. The result is cut off after 14 bits again. Every 128 columns the
sum is added in fp32. An H200 agreed in all of 524,288 sums, bit by bit.
Decision record: docs/decisions/mxfp4-on-fp8.md.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from dsv4.formats.exact_sums import RUN, in_runs, power_below
from dsv4.formats.fp8 import fp8_groups
from dsv4.formats.tensors import AnyWeight, QuantFormat, QuantTensor, as_loaded
from dsv4.llm import LLM
from dsv4.ops import TORCH
from dsv4.ops.lib.invariant import silu
from dsv4.ops.moe.op import Matrices, _Pairs, moe_fold_ref, moe_shared_ref
from dsv4.testing.vectors import VectorSet, quantised_failures

ROOT = Path(__file__).parents[2]
BITS, STEP = 14, 32  # of a sum in the tensor core; columns of an instruction
SMALLEST_NORMAL = 2.0**-6  # of E4M3
SPAN = 14  # scales of 128 columns of a row at most so many powers of two apart: then every weight is exact in E4M3
TOKENS, CONTEXT = 1024, 256  # of the perplexity


def cut_off(x: Tensor, largest: Tensor) -> Tensor:
    """x without what is below the last of BITS bits of `largest`, a power of two or 0."""
    unit = (largest * 2.0 ** (1 - BITS)).clamp_min(torch.finfo(torch.float64).tiny)
    return (x / unit).trunc() * unit


def chain_sums(x: Tensor, weight: Tensor, smallest: float = 0.0) -> Tensor:
    """fp64 numbers of x [P, K], E4M3 codes, and of weight [N, K] -> fp64 [P, N], added up by instructions from zero.
    Of weights, a number below `smallest` is a subnormal code; as a rule there are none: scales see to that."""
    sums = x.new_zeros(len(x), len(weight))
    for start in range(0, x.shape[1], STEP):
        columns = slice(start, start + STEP)
        sums = plus_products(sums, x[:, columns], weight[:, columns], smallest)
    return sums


def plus_products(sums: Tensor, left: Tensor, right: Tensor, smallest: float) -> Tensor:
    """An instruction: sums [P, N] plus the products of [P, 32] and [N, 32], as in `chain_sums`."""
    left, right = left[:, None], right[None]
    products = left * right  # [P, N, 32], exact
    sizes = power_below(left.abs()).clamp_min(SMALLEST_NORMAL) * power_below(right.abs()).clamp_min(smallest)
    sizes = torch.where(products == 0, 0, sizes).amax(-1)
    largest = torch.maximum(sizes, power_below(sums.abs()))
    sums = cut_off(products, largest[..., None]).sum(-1) + cut_off(sums, largest)
    return cut_off(sums, power_below(sums.abs()))


def fp8_sums(x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    """x [P, C, 128] with a scale [P, C, 1], and weight [N, C, 128], both as in `chain_sums` -> fp32 [P, N]: a chain for
    every 128 columns, times the scale, is added in fp32."""
    totals = x.new_zeros(len(x), len(weight), dtype=torch.float32)
    for run in range(x.shape[1]):
        totals += (chain_sums(x[:, run], weight[:, run]) * scale[:, run]).float()
    return totals


def linear_fp8(x: Tensor, weight: AnyWeight, rows: int = 64) -> Tensor:
    """bf16 x [P, K] rounded to E4M3 on an MXFP4 weight [N, K] -> bf16 [P, N]; `rows` at once, for memory."""
    loaded = as_loaded(weight)
    assert isinstance(loaded, QuantTensor), type(loaded)
    assert loaded.format is QuantFormat.MXFP4, loaded.format
    wide, (codes, _, scale) = in_runs(loaded.dequantize()), fp8_groups(x, RUN)
    parts = zip(codes.double().split(rows), scale.double().split(rows), strict=True)
    return torch.cat([fp8_sums(*part, wide) for part in parts]).to(x.dtype)


def moe_fp8(
    x: Tensor, experts: Tensor, weights: Tensor, routed: Matrices, shared: Matrices, *, limit: float,
    rounded: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`moe_ref` with the routed experts' products as `fp8_sums` has them."""
    pairs, scales = _Pairs.of(experts, routed), weights.flatten()
    parts, start = [], 0
    for (w1, w2, w3), count in zip(pairs.matrices, pairs.counts, strict=True):
        order = slice(start, start + count)
        rows = x[pairs.rows[order]]
        gate, up = linear_fp8(rows, w1).float(), linear_fp8(rows, w3).float()
        hidden = silu(gate.clamp(max=limit)) * up.clamp(-limit, limit) * scales[pairs.order[order]].unsqueeze(-1)
        parts.append(linear_fp8(hidden.to(x.dtype), w2))
        start += count
    shared_out = torch.empty_like(x)
    moe_shared_ref(x, routed, shared, shared_out, top_k=experts.shape[1], limit=limit)
    return moe_fold_ref(pairs.in_place(torch.cat(parts), experts), shared_out)


def spans(weight: QuantTensor) -> Tensor:
    """Of every row's 128 columns of an MXFP4 weight [..., N, K]: how many powers of two its scales are apart, where
    there are weights other than zero."""
    groups = weight.scale.shape[-1]
    codes = in_runs(weight.scale.repeat_interleave(32, -1).float())  # [..., N, C, 128]
    is_used = in_runs(weight.dequantize()).abs().unflatten(-1, (-1, 32)).amax(-1) > 0
    codes = codes.unflatten(-1, (-1, 32))[..., 0]
    assert codes.shape[-2] * codes.shape[-1] >= groups
    highest = codes.masked_fill(~is_used, -math.inf).amax(-1)
    return (highest - codes.masked_fill(~is_used, math.inf).amin(-1)).clamp_min(0)


# ---- numbers ----


def set_a() -> Iterator[str]:
    """Official vectors: deviations from them in units of their noise, exact sums and sums of 14 bits."""
    vectors = VectorSet.open(ROOT / "tests" / "vectors" / "setA")
    table = vectors.expected("expected_quant")
    for name, backend in (("exact sums", TORCH), ("14 bits", TORCH.with_ops(moe=moe_fp8))):
        llm = LLM(vectors.model_path, backend=backend)
        columns: tuple[list[Tensor], ...] = ([], [], [], [])
        for case in vectors.cases["cases"]:
            run = llm.mtp_logits if case["kind"].startswith("mtp") else llm.logits
            row = run(vectors.token_ids(case), vectors.chunks(case))[case["positions"]], table[case["logits"]]
            noise = (table[f"{case['id']}.{kind}"] for kind in ("noise_maxabs", "noise_cosdist"))
            for column, part in zip(columns, (*row, *noise), strict=True):
                column.append(part)
        found, wanted, noise_abs, noise_cosine = (torch.cat(column).double() for column in columns)
        distance = 1 - torch.nn.functional.cosine_similarity(found, wanted, dim=-1)
        kept = (found.argmax(-1) == wanted.argmax(-1)).double().mean()
        yield (
            f"set A, {name}: {len(found)} rows, mean cosine distance {distance.mean() / noise_cosine.mean():.3f} and "
            f"median deviation {(found - wanted).abs().amax(-1).median() / noise_abs.median():.3f} of the noise, "
            f"top-1 {kept:.3f}, failures {quantised_failures(found, wanted, noise_abs, noise_cosine)}"
        )


def perplexity() -> Iterator[str]:
    folder = ROOT / "dsv4" / "demo"
    for name, backend in (("exact sums", TORCH), ("14 bits", TORCH.with_ops(moe=moe_fp8))):
        llm = LLM(folder / "flash-mini", backend=backend)
        ids = torch.tensor(llm.encode((folder / "heldout.txt").read_text(encoding="utf-8"))[:TOKENS])
        losses = []
        for part in ids.split(CONTEXT):
            logits = llm.logits(part.tolist())[:-1].double()
            losses.append(torch.nn.functional.cross_entropy(logits, part[1:], reduction="none"))
        yield f"miniature, {name}: perplexity {math.exp(torch.cat(losses).mean()):.4f} over {TOKENS} tokens"


def random_rows() -> Iterator[str]:
    """Weights and inputs of normal values."""
    torch.manual_seed(0)
    for width in (4096, 2048):
        weight = torch.randn(64, width // 32, 32).mul(4).round().clamp(-6, 6).div(2)
        wide = in_runs((weight * 2.0 ** torch.randint(-3, 1, (64, width // 32, 1))).flatten(1))
        codes, _, scale = fp8_groups(torch.randn(64, width, dtype=torch.bfloat16), RUN)
        exact = torch.einsum("pcr,ncr->pn", codes.double() * scale, wide)
        found = fp8_sums(codes.double(), scale.double(), wide)
        error = (found - exact).abs() / exact.abs().amax(-1, keepdim=True)
        other = (found.bfloat16() != exact.bfloat16()).double().mean()
        off = f"off by {error.mean():.1e}, at most {error.max():.1e}"
        yield f"{width} columns: {off}; {other:.1%} of bf16 results differ"


def linear_rows() -> Iterator[str]:
    """FP8 linears: both operands E4M3, of normal values."""
    torch.manual_seed(0)
    for width in (128, 256, 1024, 4096):
        wide = in_runs(torch.randn(96, width).mul(100).to(torch.float8_e4m3fn).double())
        codes, _, scale = fp8_groups(torch.randn(144, width), RUN)
        exact = torch.einsum("pcr,ncr->pn", codes.double() * scale, wide)
        error = (fp8_sums(codes.double(), scale.double(), wide) - exact) / exact.abs().amax(-1, keepdim=True)
        off = f"off by {error.square().mean().sqrt():.1e} (root of the mean square), at most {error.abs().max():.1e}"
        yield f"FP8 on FP8, {width} columns: {off}"


def exactness() -> Iterator[str]:
    for name, folder in (("set A", ROOT / "tests/vectors/setA/model"), ("miniature", ROOT / "dsv4/demo/flash-mini")):
        params = LLM(folder, backend=TORCH).model.weights
        found = []
        for block in params.layers:
            for weight in block.ffn.experts.matrices:
                loaded = as_loaded(weight)
                assert isinstance(loaded, QuantTensor)
                found.append(spans(loaded).flatten())
        most = torch.cat(found)
        number = f"{int((most > SPAN).sum())} of {len(most)} do not fit"
        yield f"{name}: scales of 128 columns lie within 2^{int(most.max())}; {number}"


if __name__ == "__main__":
    with torch.no_grad():
        for part in (random_rows, linear_rows, exactness, set_a, perplexity):
            for text in part():
                print(text, flush=True)
