"""Routed experts as both forms of the prototype take them: operands, launches, and what the model says they compute.

Weights are random words in the order of kernel.py. Nothing makes them from a checkpoint yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.formats.e8m0 import e8m0_to_float
from dsv4.formats.fp8 import fp8_quantize
from dsv4.ops.moe.kernel_rows import Matrix, PairOrder
from dsv4.ops.moe.sort import ExpertOrder, expert_sort, expert_sort_ref
from dsv4.testing.bench import BenchCase, Work
from tools.fp8 import few, kernel
from tools.fp8.study import fp8_sums

LIMIT = 10.0
LOG2_E = math.log2(math.e)
PROGRAMS = 132  # multiprocessors of an H200
MANY_ROWS = 128  # token rows of a tile in kernel.py
DIRECT_PAIRS = few.ROWS  # up to so many pairs few.py finds its rows without a sort


class Sizes(NamedTuple):
    dim: int = 4096
    width: int = 2048
    num_experts: int = 256
    top_k: int = 6


FLASH = Sizes()


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


def random_matrices(sizes: Sizes, device: torch.device) -> list[Fp8Matrix]:
    """Gate, up, down."""
    shapes = (sizes.width, sizes.dim), (sizes.width, sizes.dim), (sizes.dim, sizes.width)
    return [Fp8Matrix(sizes.num_experts, *shape, device) for shape in shapes]


def ordered(x: Tensor) -> Tensor:
    """[..., K] -> the same in the order of kernel.py."""
    return x.unflatten(-1, (-1, 4, 4, 2, 4)).movedim(-4, -2).flatten(-5).contiguous()  # t behind q and half


def random_choices(tokens: int, sizes: Sizes, is_skewed: bool, device: torch.device) -> Tensor:
    """int32 [T, k]. Skewed: of the last experts most, of the first none; some tokens have fewer choices, some none."""
    scores = torch.rand(tokens, sizes.num_experts, device=device)
    if is_skewed:
        scores = scores**3 + torch.linspace(0, 1, sizes.num_experts, device=device) ** 4
        scores[:, 0] = -1.0
    experts = scores.topk(sizes.top_k).indices.sort(-1).values.int()
    if is_skewed:
        experts[::7, 1], experts[5::11] = -1, -1
    return experts


@dataclass
class Call:
    """Token rows of a call, which experts they go to, and what it writes. `x16`: the same numbers in bf16."""

    sizes: Sizes
    x16: Tensor
    x: Tensor
    x_scale: Tensor
    experts: Tensor
    weights: Tensor
    hidden: Tensor
    hidden_scale: Tensor
    parts: Tensor
    scratch: Tensor

    @classmethod
    def random(cls, tokens: int, sizes: Sizes, device: torch.device, *, is_skewed: bool = False) -> Call:
        pairs, scale_shape = tokens * sizes.top_k, (tokens, sizes.dim // 128)
        x16 = torch.randn(tokens, sizes.dim, device=device).bfloat16()
        if device.type == "meta":
            experts = torch.empty(tokens, sizes.top_k, dtype=torch.int32, device=device)
            x, x_scale = x16.to(torch.int8), torch.empty(scale_shape, device=device)
        else:
            experts = random_choices(tokens, sizes, is_skewed, device)
            codes, scale = fp8_quantize(x16, 128)
            x, x_scale = ordered(codes.view(torch.int8)), e8m0_to_float(scale)
            x16 = (codes.float().unflatten(-1, (-1, 128)) * x_scale[..., None]).flatten(1).bfloat16()
        return cls(
            sizes, x16, x, x_scale, experts, torch.rand(tokens, sizes.top_k, device=device),
            torch.zeros(pairs, sizes.width, dtype=torch.int8, device=device),
            torch.zeros(pairs, sizes.width // 128, device=device),
            torch.zeros(pairs, sizes.dim, dtype=torch.bfloat16, device=device),
            torch.zeros(PROGRAMS * 4 * DIRECT_PAIRS, dtype=torch.int32, device=device),
        )  # fmt: skip

    def sort(self, tile_rows: int) -> ExpertOrder:
        sort = expert_sort_ref if self.x.device.type == "cpu" else expert_sort
        return sort(self.experts, self.sizes.num_experts, tile_rows)

    def many(self, matrices: list[Fp8Matrix], order: ExpertOrder | None = None) -> list[Callable[[], None]]:
        """Gate and up; down. `order` in tiles of MANY_ROWS."""
        return self._launches(matrices, order or self.sort(MANY_ROWS), is_few=False)

    def few(self, matrices: list[Fp8Matrix], order: ExpertOrder | None = None) -> list[Callable[[], None]]:
        """The same. `order` in tiles of few.ROWS; with DIRECT_PAIRS pairs and fewer it needs none."""
        if order is None and self.experts.numel() > DIRECT_PAIRS:
            order = self.sort(few.ROWS)
        return self._launches(matrices, order, is_few=True)

    def _launches(self, matrices: list[Fp8Matrix], order: ExpertOrder | None, is_few: bool) -> list[Callable[[], None]]:
        gate, up, down = matrices
        hidden = self.hidden, self.hidden_scale
        return [
            lambda: self._launch((self.x, self.x_scale), hidden, (gate, up), order, is_few),
            lambda: self._launch(hidden, (self.parts, self.hidden_scale), (down, down), order, is_few),
        ]

    def _launch(
        self, rows: tuple[Tensor, Tensor], out: tuple[Tensor, Tensor], matrices: tuple[Fp8Matrix, Fp8Matrix],
        order: ExpertOrder | None, is_few: bool,
    ) -> None:  # fmt: skip
        first, second = matrices
        num_experts, outs, width = first.shape
        has_both = first is not second
        if order is None:
            num_tiles, places = self.experts.numel(), PairOrder(*[self.scratch] * 4)
        else:
            num_tiles = len(order.tile_experts)
            places = PairOrder(order.pairs, order.offsets, order.tile_experts, order.tile_starts)
        given = (self.experts, places) if is_few else (places,)
        flags = (
            {"IS_SORTED": order is not None}
            if is_few
            else {"DATA_WORDS": first.data[0].numel(), "SCALE_WORDS": first.scale[0].numel()}
        )
        launched, form = (few.fp8_few_kernel, few) if is_few else (kernel.fp8_experts_kernel, kernel)
        launched[(min(PROGRAMS, num_tiles * (outs * (1 + has_both) // 256)),)](
            *rows, *out, self.weights, *given, first.matrix, second.matrix, LIMIT, num_tiles,
            K=width, OUTS=outs, E=num_experts, TOP_K=self.sizes.top_k, GATE_UP=has_both, **flags,
            num_warps=form.NUM_WARPS, enable_fp_fusion=False,
        )  # fmt: skip

    # ---- what the model says ----

    def wrong(self, matrices: list[Fp8Matrix], places: Iterable[tuple[int, int, bool]]) -> dict[str, tuple[int, int]]:
        """Of blocks (expert, block, whether of hidden, else of parts): how many codes, scales and parts are not those
        of `fp8_sums`, of how many."""
        found = {"hidden": (0, 0), "scales": (0, 0), "parts": (0, 0)}

        def count(name: str, is_wrong: Tensor) -> None:
            found[name] = found[name][0] + int(is_wrong.sum()), found[name][1] + is_wrong.numel()

        for expert, block, is_hidden in places:
            pairs = (self.experts.flatten() == expert).nonzero().flatten()
            if is_hidden:
                codes, scale = self._hidden(matrices, pairs, expert, block)
                count("hidden", codes.view(torch.int8) != self.hidden[pairs, 128 * block : 128 * block + 128])
                count("scales", scale != self.hidden_scale[pairs, block])
            else:
                given = self.hidden[pairs], self.hidden_scale[pairs]
                parts = _sums(*given, matrices[2], expert, 256 * block, 256)
                count("parts", parts != self.parts[pairs, 256 * block : 256 * block + 256])
        return found

    def _hidden(self, matrices: list[Fp8Matrix], pairs: Tensor, expert: int, block: int) -> tuple[Tensor, Tensor]:
        rows = pairs // self.sizes.top_k
        given = self.x[rows], self.x_scale[rows]
        gate, up = (_sums(*given, one, expert, 128 * block, 128).float() for one in matrices[:2])
        gate = gate.clamp(max=LIMIT)
        silu = gate / (1 + torch.exp2(-gate * LOG2_E))  # as the kernels' `activate`
        hidden = silu * up.clamp(-LIMIT, LIMIT) * self.weights.flatten()[pairs, None]
        codes, scale = fp8_quantize(hidden.bfloat16(), 128)
        return codes, e8m0_to_float(scale).flatten()


def _sums(codes: Tensor, scale: Tensor, matrix: Fp8Matrix, expert: int, first: int, count: int) -> Tensor:
    wide = matrix.bytes_of(expert, first, count).unflatten(-1, (-1, 128))
    rows = codes.view(torch.float8_e4m3fn).double().unflatten(-1, (-1, 128))
    return (fp8_sums(rows, scale.double()[..., None], wide) * matrix.out_scale[expert]).bfloat16()


# ---- for the compile check ----


def _case(is_few: bool, tokens: int, down: bool) -> BenchCase:
    def build(device: torch.device) -> Work:
        call, matrices = Call.random(tokens, FLASH, device), random_matrices(FLASH, device)
        return Work((call.few if is_few else call.many)(matrices)[int(down)], 0, 0)

    name = f"{'down' if down else 'gate_up'}-{tokens}"
    return BenchCase("fp8_few" if is_few else "fp8_experts", name, {"tokens": tokens}, build)


CASES = [_case(*form, down) for form in ((False, 4096), (True, 16), (True, 1)) for down in (False, True)]
