"""The prototype of kernel.py on an H200: its results against the model, and its times beside the form in use.

    python -m tools.fp8.probe        some twenty seconds; clock and power are nvidia-smi's

Weights are random words in the order of kernel.py. Nothing makes them from a checkpoint yet.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.formats.e8m0 import e8m0_to_float
from dsv4.formats.fp8 import fp8_quantize
from dsv4.formats.layouts import ShuffledTensor
from dsv4.formats.tensors import QuantFormat
from dsv4.ops.lib.guard import gl, gluon_jit
from dsv4.ops.lib.invariant import silu
from dsv4.ops.moe.kernel_rows import Matrix, PairOrder
from dsv4.ops.moe.launch import config_for, launch_moe
from dsv4.ops.moe.many.launch_tiles import launch_tiles
from dsv4.ops.moe.sort import ExpertOrder, expert_sort, max_tiles
from dsv4.testing.bench import BenchCase, Work
from dsv4.testing.cases.moe import random_inputs, random_layer
from tools.fp8.few import NUM_WARPS as FEW_WARPS
from tools.fp8.few import fp8_few_kernel
from tools.fp8.kernel import NUM_WARPS, fp8_experts_kernel
from tools.fp8.study import fp8_sums

D, I, E, TOP_K, LIMIT = 4096, 2048, 256, 6, 10.0  # Flash
SIZES = 1024, 4096, 16384
FEW_SIZES = 1, 5, 6, 16, 64, 256, 512, 1024
Calls = list[Callable[[], object]]
Plain = tuple[ShuffledTensor, ShuffledTensor, ShuffledTensor]  # w1, w2, w3 as the forms in use have them


# ---- operands ----


class Fp8Matrix:
    """Random words and scales of a stack [E, N, K]."""

    def __init__(self, num_experts: int, rows: int, cols: int, device: torch.device) -> None:
        lead = num_experts, rows // 64, cols // 128, 64
        exponents = torch.randint(3, 7, (*lead, 4), dtype=torch.uint8, device=device) * 8
        self.shape = num_experts, rows, cols
        self.data = torch.randint(-(2**31), 2**31 - 1, (*lead, 16), dtype=torch.int32, device=device)
        self.scale = exponents.view(torch.int32).squeeze(-1)
        self.out_scale = torch.full((num_experts,), 2.0**-7, device=device)

    @property
    def matrix(self) -> Matrix:
        return Matrix(self.data, self.scale, self.out_scale)

    def bytes_of(self, expert: int, first: int, count: int) -> Tensor:
        """fp64 [count, K] in the order of `ordered`: E4M3 numbers. `first` and `count` are multiples of 64."""
        tiles = slice(first // 64, (first + count) // 64)
        words = self.data[expert, tiles].transpose(1, 2).flatten(0, 1).unflatten(-1, (4, 4))  # [n, C, t, q]
        exponents = self.scale[expert, tiles].unsqueeze(-1).view(torch.uint8).transpose(1, 2).flatten(0, 1)  # [n, C, t]
        factor = torch.exp2(exponents.double() / 8 - 5)
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64, device=words.device)
        out = torch.zeros(*words.shape[:2], 4, 2, 4, 4, dtype=torch.float64, device=words.device)  # q, half, t, i
        for i in range(8):
            size = table[(words >> (4 * i) & 7).long()]
            sign = words >> (8 * i + 7 if i < 4 else 8 * i - 29) & 1
            values = size * (1 - 2 * sign) * factor[..., None]  # [n, C, t, q]
            out[:, :, :, i // 4, :, i % 4] = values.transpose(2, 3)
        return out.flatten(1)


def ordered(x: Tensor) -> Tensor:
    """[..., K] -> the same in the order of kernel.py."""
    return x.unflatten(-1, (-1, 4, 4, 2, 4)).movedim(-4, -2).flatten(-5).contiguous()  # t behind q and half


@dataclass
class Inputs:
    """Of a call of both forms: token rows, which experts they go to, and buffers."""

    x16: Tensor
    x: Tensor
    x_scale: Tensor
    experts: Tensor
    weights: Tensor
    order: ExpertOrder
    hidden: Tensor
    hidden_scale: Tensor
    parts: Tensor

    @classmethod
    def random(cls, tokens: int, device: torch.device) -> Inputs:
        x16, experts, weights = random_inputs("flash", tokens, device)
        if device.type == "meta":
            tiles = max_tiles(tokens * TOP_K, E, 128)
            sizes = E, E + 1, tokens * TOP_K, tiles, tiles
            order = ExpertOrder(*(torch.empty(size, dtype=torch.int32, device=device) for size in sizes))
            x, x_scale = x16.to(torch.int8), torch.empty(tokens, D // 128, device=device)
        else:
            order = expert_sort(experts, E, 128)
            codes, scale = fp8_quantize(x16, 128)
            x, x_scale = ordered(codes.view(torch.int8)), e8m0_to_float(scale)
            x16 = (codes.float().unflatten(-1, (-1, 128)) * x_scale[..., None]).flatten(1).bfloat16()
        pairs = tokens * TOP_K
        hidden = torch.zeros(pairs, I, dtype=torch.int8, device=device)
        parts = torch.zeros(pairs, D, dtype=torch.bfloat16, device=device)
        return cls(x16, x, x_scale, experts, weights, order, hidden, torch.zeros(pairs, I // 128, device=device), parts)

    def fp8(self, gate: Fp8Matrix, up: Fp8Matrix, down: Fp8Matrix) -> Calls:
        """Gate and up; down."""
        hidden = self.hidden, self.hidden_scale
        return [
            lambda: self._launch((self.x, self.x_scale), hidden, [gate, up]),
            lambda: self._launch(hidden, (self.parts, self.hidden_scale), [down]),
        ]

    def few(self, gate: Fp8Matrix, up: Fp8Matrix, down: Fp8Matrix) -> Calls:
        hidden = self.hidden, self.hidden_scale
        return [
            lambda: self._launch_few((self.x, self.x_scale), hidden, [gate, up]),
            lambda: self._launch_few(hidden, (self.parts, self.hidden_scale), [down]),
        ]

    def _launch_few(self, rows: tuple[Tensor, Tensor], out: tuple[Tensor, Tensor], matrices: list[Fp8Matrix]) -> None:
        first, *others = matrices
        num_experts, outs, width = first.shape
        order, num_pairs = self.order, self.experts.numel()
        num_tiles = len(order.tile_experts) if order else num_pairs
        pair_order = (
            PairOrder(order.pairs, order.offsets, order.tile_experts, order.tile_starts)
            if order else PairOrder(*(self.scratch,) * 4)
        )
        fp8_few_kernel[(min(132, num_tiles * (outs * len(matrices) // 256)),)](
            *rows, *out, self.weights, self.experts, pair_order,
            first.matrix, (others[0] if others else first).matrix, LIMIT, num_tiles,
            K=width, OUTS=outs, E=num_experts, TOP_K=TOP_K, GATE_UP=bool(others), PAIRS=0 if order else 32,
            num_warps=FEW_WARPS, enable_fp_fusion=False,
        )  # fmt: skip

    def _launch(self, rows: tuple[Tensor, Tensor], out: tuple[Tensor, Tensor], matrices: list[Fp8Matrix]) -> None:
        first, *others = matrices
        num_experts, outs, width = first.shape
        order = self.order
        num_work = len(order.tile_experts) * (outs * len(matrices) // 256)
        fp8_experts_kernel[(min(132, num_work),)](
            *rows, *out, self.weights,
            PairOrder(order.pairs, order.offsets, order.tile_experts, order.tile_starts),
            first.matrix, (others[0] if others else first).matrix, LIMIT, len(order.tile_experts),
            K=width, OUTS=outs, E=num_experts, TOP_K=TOP_K, GATE_UP=bool(others),
            DATA_WORDS=first.data[0].numel(), SCALE_WORDS=first.scale[0].numel(),
            num_warps=NUM_WARPS, enable_fp_fusion=False,
        )  # fmt: skip


def random_matrices(device: torch.device) -> list[Fp8Matrix]:
    return [Fp8Matrix(E, *shape, device) for shape in ((I, D), (I, D), (D, I))]


def _case(down: bool, few: bool = False) -> BenchCase:
    """For the compile check."""

    def build(device: torch.device) -> Work:
        inputs = Inputs.random(4096, device)
        return Work((inputs.few if few else inputs.fp8)(*random_matrices(device))[int(down)], 0, 0)

    return BenchCase("fp8_few" if few else "fp8_experts", "down" if down else "gate_up", {"tokens": 4096}, build)


CASES = [_case(False), _case(True), _case(False, True), _case(True, True)]


def check(inputs: Inputs, gate: Fp8Matrix, up: Fp8Matrix, down: Fp8Matrix) -> str:
    """Blocks of hidden and of parts of three experts against `fp8_sums`."""
    offsets = inputs.order.offsets.tolist()
    found: dict[str, list[Tensor]] = {"hidden codes": [], "hidden scales": [], "parts": []}
    for expert, block in ((0, 0), (2 * E // 5, I // 256), (E - 1, I // 128 - 1)):
        pairs = inputs.order.pairs[offsets[expert] : offsets[expert + 1]].long()

        def sums(codes: Tensor, scale: Tensor, matrix: Fp8Matrix, size: int, expert=expert, block=block) -> Tensor:
            codes = codes.view(torch.float8_e4m3fn).double().unflatten(-1, (-1, 128))
            wide = matrix.bytes_of(expert, size * block, size).unflatten(-1, (-1, 128))
            return (fp8_sums(codes, scale.double()[..., None], wide) * matrix.out_scale[expert]).bfloat16()

        rows = pairs // TOP_K
        first, second = (sums(inputs.x[rows], inputs.x_scale[rows], one, 128).float() for one in (gate, up))
        hidden = silu(first.clamp(max=LIMIT)) * second.clamp(-LIMIT, LIMIT) * inputs.weights.flatten()[pairs, None]
        codes, scale = fp8_quantize(hidden.bfloat16(), 128)
        columns = slice(128 * block, 128 * block + 128)
        found["hidden codes"].append(codes.view(torch.int8) != inputs.hidden[pairs, columns])
        found["hidden scales"].append(e8m0_to_float(scale).flatten() != inputs.hidden_scale[pairs, block])
        parts = sums(inputs.hidden[pairs], inputs.hidden_scale[pairs], down, 256)
        found["parts"].append(parts != inputs.parts[pairs, 256 * block : 256 * block + 256])
    totals = {name: torch.cat([part.flatten() for part in parts]) for name, parts in found.items()}
    return ", ".join(f"{name} {int(one.sum())} of {one.numel()}" for name, one in totals.items())


# ---- times ----


class Meter:
    """Clock and power as nvidia-smi has them, twenty times a second."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, float, float]] = []
        self.process = subprocess.Popen(
            ["nvidia-smi", "-i", "0", "--query-gpu=clocks.sm,power.draw.instant", "--format=csv,noheader,nounits",
             "-lms", "50"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()
        time.sleep(1)

    def _read(self) -> None:
        for line in self.process.stdout or ():
            clock, power = map(float, line.split(","))
            self.samples.append((time.time(), clock, power))

    def between(self, start: float, end: float) -> str:
        found = [sample[1:] for sample in self.samples if start <= sample[0] <= end]
        if not found:
            return "no clock, no power"
        clock, power = (sum(column) / len(found) for column in zip(*found, strict=True))
        return f"{clock:.0f} MHz, {power:.0f} W"


@gluon_jit
def _clock_kernel(out_ptr):
    cycles, nanoseconds = gl.inline_asm_elementwise(
        "{ .reg .b64 c0, c1, t0, t1; .reg .pred p; mov.u64 t0, %globaltimer; mov.u64 c0, %clock64;\n"
        "again: mov.u64 c1, %clock64; sub.u64 c1, c1, c0; setp.lt.u64 p, c1, 100000;\n@p bra again;\n"
        "mov.u64 t1, %globaltimer; sub.u64 t1, t1, t0; cvt.u32.u64 $0, c1; cvt.u32.u64 $1, t1; }",
        "=r,=r,r", [gl.program_id(0)], dtype=(gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    gl.store(out_ptr, cycles)
    gl.store(out_ptr + 1, nanoseconds)


def sustained(calls: Calls, meter: Meter, seconds: float = 0.3) -> tuple[list[float], str]:
    """Microseconds of each call when all follow one another for a while; clock and power in the second half of it."""
    once = 0.0
    for _ in range(2):  # the first compiles
        start = time.time()
        for call in calls:
            call()
        torch.cuda.synchronize()
        once = time.time() - start
    count = max(4, int(seconds / once))
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)] for _ in range(count)]
    ticks = torch.zeros(2, dtype=torch.int32, device="cuda")
    start = time.time()
    for row in marks:
        row[0].record()
        for call, mark in zip(calls, row[1:], strict=True):
            call()
            mark.record()
    _clock_kernel[(1,)](ticks, num_warps=1)
    torch.cuda.synchronize()
    end = time.time()
    late = marks[count // 2 :]
    times = [sum(row[i].elapsed_time(row[i + 1]) for row in late) / len(late) * 1e3 for i in range(len(calls))]
    cycles, nanoseconds = ticks.tolist()
    return times, f"{meter.between((start + end) / 2, end)}; {cycles / nanoseconds:.2f} GHz at the end"


def plain_products(meter: Meter, size: int = 8192) -> None:
    """What clock and power allow."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    left, right, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t(), torch.ones((), device="cuda")

    def scaled(is_fast: bool) -> None:
        torch._scaled_mm(left, right, one, one, out_dtype=torch.bfloat16, use_fast_accum=is_fast)

    forms: dict[str, Callable[[], object]] = {
        "bf16": lambda: torch.mm(a, b.t()),
        "FP8, fast sums": lambda: scaled(True),
        "FP8, fp32 sums": lambda: scaled(False),
    }
    for name, call in forms.items():
        (found,), text = sustained([call], meter)
        print(f"plain product {size}^3, {name:14} {found:5.0f} us {2e-6 * size**3 / found:5.0f} TFLOP/s; {text}")


def many_times(matrices: list[Fp8Matrix], plain: Plain, meter: Meter) -> None:
    w1, w2, w3 = plain
    print("tokens, form, gate and up, down", flush=True)
    for tokens in SIZES:
        inputs = Inputs.random(tokens, torch.device("cuda"))
        hidden16, parts16 = inputs.hidden.to(torch.bfloat16), torch.empty_like(inputs.parts)

        def today(inputs: Inputs = inputs, hidden: Tensor = hidden16, parts: Tensor = parts16) -> Calls:
            return [
                lambda: launch_tiles(inputs.x16, hidden, inputs.weights, inputs.order, (w1, w3), LIMIT, 1),
                lambda: launch_tiles(hidden, parts, inputs.weights, inputs.order, (w2,), LIMIT, 1),
            ]

        flops, base = 6e-6 * tokens * TOP_K * D * I, 0.0
        for name, calls in (("bf16", today()), ("FP8", inputs.fp8(*matrices)), ("bf16 again", today())):
            found, text = sustained(calls, meter)
            base = base or sum(found)
            print(
                f"{tokens:6} {name:10} {found[0]:6.0f} {found[1]:6.0f} us "
                f"{flops / sum(found):4.0f} TFLOP/s {base / sum(found):5.2f} x; {text}", flush=True,
            )  # fmt: skip
        kept = inputs.hidden.clone(), inputs.parts.clone()
        for call in inputs.fp8(*matrices):
            call()
        same = torch.equal(kept[0], inputs.hidden) and torch.equal(kept[1], inputs.parts)
        print(f"{tokens:6} again: equal bits {same}; other than the model: {check(inputs, *matrices)}", flush=True)


def few_times(matrices: list[Fp8Matrix], plain: Plain, shared: Plain) -> None:
    """Graphs of eight calls, each with experts of its own."""
    print("tokens, us of routed experts: today (with sort and preparation), FP8 (without)", flush=True)
    for tokens in FEW_SIZES:
        sets = [Inputs.random(tokens, torch.device("cuda")) for _ in range(8)]

        def today(one: Inputs) -> None:
            config = config_for(one.x16, one.experts, plain)
            launch_moe(
                one.x16, one.experts, one.weights, plain, shared, LIMIT, config, has_shared=False, rounded=one.x16
            )

        def fp8(one: Inputs) -> None:
            for call in one.fp8(*matrices):
                call()

        found = []
        for form in (today, fp8):
            form(sets[0])
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for one in sets:
                    form(one)
            times = []
            for _ in range(9):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                times.append(start.elapsed_time(end) * 1e3 / len(sets))
            found.append(sorted(times)[4])
        print(f"{tokens:6} today {found[0]:7.1f}, FP8 {found[1]:7.1f}: {found[0] / found[1]:.2f} x", flush=True)


def main() -> None:
    torch.manual_seed(0)
    device = torch.device("cuda")
    matrices = random_matrices(device)
    (w1, w2, w3), (s1, s2, s3) = random_layer("flash", QuantFormat.MXFP4, device)
    meter = Meter()
    try:
        plain_products(meter)
        many_times(matrices, (w1, w2, w3), meter)
        few_times(matrices, (w1, w2, w3), (s1, s2, s3))
    finally:
        meter.process.terminate()


if __name__ == "__main__":
    with torch.no_grad():
        main()
