"""Cases of ops/linear: the FP8 and bf16 products of a Flash and of a Pro layer, alone and as the bundles a layer
launches, and the vocabulary projection.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dsv4.formats.layouts import TILE_COLS, TILE_ROWS, ShuffledTensor
from dsv4.formats.tensors import QuantActivation, QuantFormat, QuantTensor, Weight
from dsv4.ops.linear import LinearBundle, grouped_codes, linear, linears
from dsv4.testing.bench import BenchCase, Work, nbytes
from dsv4.testing.op_call import op_call

ROWS = (1, 16, 64, 256, 4096)
# FP8 weights on codes that a norm has made: name -> N, K
FP8_SHAPES = {
    "flash-wq_a": (1024, 4096),
    "flash-wkv": (512, 4096),
    "flash-wq_b": (32768, 1024),
    "flash-wo_b": (4096, 8192),
    "pro-wq_a": (1536, 7168),
    "pro-wq_b": (65536, 1536),
    "pro-wo_b": (7168, 16384),
}
# N of the FP8 weights, N of the bf16 weights, K
BUNDLES = {
    "flash-csa-in": ((1024, 512), (1024, 1024, 256, 256, 64), 4096),
    "flash-hca-in": ((1024, 512), (512, 512), 4096),
    "flash-csa-queries": ((32768, 8192), (), 1024),
    "pro-csa-in": ((1536, 512), (1024, 1024, 256, 256, 64), 7168),
    "pro-csa-queries": ((65536, 8192), (), 1536),
    "small": ((72, 64), (24, 64), 256),
}
GROUPED = {"flash-wo_a": (8, 1024, 4096), "pro-wo_a": (16, 1024, 4096), "small": (2, 64, 256)}  # G, R, K
HEADS = {"flash-lm_head": (129280, 4096), "pro-lm_head": (129280, 7168), "small-head": (200, 256)}
SMALL_NAME = "small"


def random_bytes(shape: tuple[int, ...], low: int, high: int, device: torch.device) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, device=device)


def random_codes(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """E4M3 codes of normal values."""
    return torch.randn(shape, device=device, dtype=torch.bfloat16).to(torch.float8_e4m3fn)


def random_fp8(num_rows: int, width: int, device: torch.device) -> QuantTensor:
    scale = random_bytes((-(-num_rows // 128), -(-width // 128)), 118, 124, device)
    return QuantTensor(random_codes((num_rows, width), device), scale, QuantFormat.FP8_BLOCK)


def random_shuffled(num_rows: int, width: int, device: torch.device) -> ShuffledTensor:
    """Built from its parts, since a weight on the device "meta" has no values to shuffle. No code is a NaN."""
    tiles = num_rows // TILE_ROWS, width // TILE_COLS
    shape = (*tiles, TILE_ROWS, TILE_COLS // 4)
    data = random_codes((*shape, 4), device).view(torch.uint8).view(torch.int32).view(shape)
    bits = (127 + 120 - torch.randint(0, 6, tiles, dtype=torch.int32, device=device)) << 7
    zero = torch.zeros((), dtype=torch.int32, device=device)
    return ShuffledTensor(
        data, bits | (bits << 16), torch.ones((), device=device), zero, QuantFormat.FP8_BLOCK,
        torch.Size((num_rows, width)), (TILE_ROWS, TILE_COLS), torch.uint8,
    )  # fmt: skip


def random_plain(num_rows: int, width: int, device: torch.device) -> torch.Tensor:
    return torch.randn(num_rows, width, device=device, dtype=torch.bfloat16)


def random_activation(num_tokens: int, width: int, device: torch.device) -> QuantActivation:
    scale = random_bytes((num_tokens, width // 128), 118, 124, device)
    return QuantActivation(random_codes((num_tokens, width), device), scale)


def weight_bytes(weights: Sequence[Weight]) -> int:
    return sum(weight.nbytes for weight in weights)


def _linear(name: str, num_rows: int, width: int, tokens: int, has_codes: bool) -> BenchCase:
    def build(device: torch.device) -> Work:
        weight = random_fp8(num_rows, width, device)
        x = random_activation(tokens, width, device) if has_codes else random_plain(tokens, width, device)
        read = weight.nbytes + (nbytes(x.codes, x.scale) if isinstance(x, QuantActivation) else nbytes(x))
        call = op_call("linear", x=x, weight=weight)
        return Work(call, read, 2 * tokens * num_rows, 2 * tokens * num_rows * width, "fp8")

    shape = {"tokens": tokens, "outputs": num_rows, "width": width, "input": "codes" if has_codes else "bf16"}
    return BenchCase("linear", f"{name}-{tokens}{'' if has_codes else '-bf16'}", shape, build)


def _bundle(name: str, tokens: int) -> BenchCase:
    fp8_rows, plain_rows, width = BUNDLES[name]

    def build(device: torch.device) -> Work:
        fp8: list[Weight] = [random_fp8(num_rows, width, device) for num_rows in fp8_rows]
        plain: list[Weight] = [random_plain(num_rows, width, device) for num_rows in plain_rows]
        bundle = LinearBundle.build([*fp8, *plain])
        codes = random_activation(tokens, width, device)
        x = random_plain(tokens, width, device)
        dtypes = [torch.bfloat16] * len(fp8) + [torch.float32] * len(plain)
        read = weight_bytes(bundle.weights) + nbytes(codes.codes, codes.scale) + (nbytes(x) if plain else 0)
        written = tokens * (2 * sum(fp8_rows) + 4 * sum(plain_rows))
        # a bf16 operation takes 1392 / 792 times as long as an FP8 one
        flops = int(2 * tokens * width * (sum(fp8_rows) + sum(plain_rows) * 1392 / 792))
        call = op_call("linears", x=x if plain else codes, weights=bundle, out_dtypes=dtypes, codes=codes)
        return Work(call, read, written, flops, "fp8")

    return BenchCase("linears", f"{name}-{tokens}", {"tokens": tokens, "width": width}, build)


def _grouped(name: str, tokens: int, has_codes: bool = False) -> BenchCase:
    groups, rank, width = GROUPED[name]
    op = "grouped_codes" if has_codes else "grouped_linear"

    def build(device: torch.device) -> Work:
        weight = random_shuffled(groups * rank, width, device)
        x = random_plain(tokens, groups * width, device).unflatten(1, (groups, width))
        written, flops = tokens * groups * rank, 2 * tokens * groups * rank * width
        written = written * 129 // 128 if has_codes else 2 * written
        return Work(op_call(op, x=x, weight=weight), weight.nbytes + nbytes(x), written, flops)

    return BenchCase(op, f"{name}-{tokens}", {"tokens": tokens, "groups": groups, "width": width}, build)


def _head(name: str, tokens: int) -> BenchCase:
    num_rows, width = HEADS[name]

    def build(device: torch.device) -> Work:
        weight, x = random_plain(num_rows, width, device), random_plain(tokens, width, device)
        written, flops = 4 * tokens * num_rows, 2 * tokens * num_rows * width
        call = op_call("linear", x=x, weight=weight, out_dtype=torch.float32)
        return Work(call, nbytes(weight, x), written, flops)

    return BenchCase("linear", f"{name}-{tokens}", {"tokens": tokens, "outputs": num_rows, "width": width}, build)


@dataclass
class AttentionBlock:
    """The linears of one Flash CSA layer as the model calls them, each on a result of the one before: the two bundles,
    wo_a and wo_b, 137 MB of weights. What stands between them in the model is left out."""

    tokens: int
    device: torch.device

    def __post_init__(self) -> None:
        device = self.device
        self.bundles = []
        for name in ("flash-csa-in", "flash-csa-queries"):
            fp8_rows, plain_rows, width = BUNDLES[name]
            weights: list[Weight] = [random_fp8(num_rows, width, device) for num_rows in fp8_rows]
            weights += [random_plain(num_rows, width, device) for num_rows in plain_rows]
            self.bundles.append(LinearBundle.build(weights))
        groups, rank, width = GROUPED["flash-wo_a"]
        self.wo_a, self.wo_b = random_shuffled(groups * rank, width, device), random_fp8(4096, 8192, device)
        self.groups = groups
        self.x, self.codes = random_plain(self.tokens, 4096, device), random_activation(self.tokens, 4096, device)

    @property
    def nbytes(self) -> int:
        return weight_bytes([*self.bundles[0].weights, *self.bundles[1].weights, self.wo_b]) + self.wo_a.nbytes

    def dtypes(self, place: int) -> list[torch.dtype]:
        return [torch.bfloat16 if segment.is_fp8 else torch.float32 for segment in self.bundles[place].segments]

    def call(self) -> tuple[torch.Tensor, ...]:
        latent, *of_compressors = linears(self.x, self.bundles[0], self.dtypes(0), self.codes)
        queries, index_queries = linears(latent, self.bundles[1], self.dtypes(1))
        grouped = grouped_codes(queries.unflatten(1, (self.groups, -1)), self.wo_a)
        return linear(grouped, self.wo_b), index_queries, *of_compressors


def _block(tokens: int) -> BenchCase:
    def build(device: torch.device) -> Work:
        block = AttentionBlock(tokens, device)
        return Work(block.call, block.nbytes + nbytes(block.x, block.codes.codes), 2 * tokens * 4096)

    return BenchCase("linears", f"attention-block-{tokens}", {"tokens": tokens, "launches": 4}, build)


CASES = [
    *(_linear(name, *shape, tokens, True) for name, shape in FP8_SHAPES.items() for tokens in ROWS),
    *(_linear("flash-wo_b", *FP8_SHAPES["flash-wo_b"], tokens, False) for tokens in ROWS),
    *(_bundle(name, tokens) for name in BUNDLES if name != SMALL_NAME for tokens in ROWS),
    *(_grouped(name, tokens) for name in GROUPED if name != SMALL_NAME for tokens in ROWS),
    *(_grouped(name, tokens, True) for name in ("flash-wo_a", "pro-wo_a") for tokens in (1, 16, 64)),
    *(_head(name, tokens) for name in HEADS if not name.startswith(SMALL_NAME) for tokens in (1, 16, 64)),
    *(_block(tokens) for tokens in (1, 16)),
]
SMALL = [
    *(_linear("small", 72, 256, tokens, has_codes) for tokens in (5, 70) for has_codes in (True, False)),
    _bundle(SMALL_NAME, 5),
    _grouped(SMALL_NAME, 5),
    _grouped(SMALL_NAME, 5, True),
    _head("small-head", 5),
]
