"""Random shapes: models and calls of ops with widths that are no powers of two and odd numbers of heads,
groups, experts and choices. For tests of what must hold at every shape that the kernels take.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.formats.rows import RowFormat, RowKind
from dsv4.formats.tensors import QuantFormat
from dsv4.loader.write.config_file import ExpertFormat
from dsv4.ops.hyper import HyperSettings
from dsv4.ops.linear import LinearBundle
from dsv4.testing.cases.attention import KEYS, build_inputs
from dsv4.testing.cases.compress import compression
from dsv4.testing.cases.hyper import make_inputs
from dsv4.testing.cases.indexer import FORMATS, batch_at, random_keys
from dsv4.testing.cases.linear import random_activation, random_fp8, random_plain, random_shuffled
from dsv4.testing.cases.moe import LIMIT, random_weight
from dsv4.testing.cases.rows import decode, ring_of
from dsv4.testing.cases.sampling import SETTINGS as SAMPLING
from dsv4.testing.cases.sampling import sample_case
from dsv4.testing.op_call import OpCall, op_call

SETTINGS = HyperSettings(num_iters=3, hc_eps=1e-6, norm_eps=1e-6)
EPS = {"hc_eps": SETTINGS.hc_eps, "norm_eps": SETTINGS.norm_eps}
FP8_GROUP = 128  # an FP8 weight, or FP4 experts, have whole groups of columns
FAMILY = 8  # models that share most of their kernels
HIDDEN_GROUPS = (3, 5, 9, 32, 1, 7, 11, 2)  # of a family's hidden size; 32 are Flash's
MOE_GROUPS = {9: (8, 9), 32: (16, 16), 11: (9, 8)}  # of experts by those of such a size: as forms of many tokens ask


class RandomModel(NamedTuple):
    config: ModelConfig
    experts: ExpertFormat

    def __str__(self) -> str:
        names = (
            "hidden_size", "num_attention_heads", "head_dim", "q_lora_rank", "o_groups", "o_lora_rank",
            "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "index_n_heads", "index_topk",
            "sliding_window", "compress_ratios",
        )  # fmt: skip
        return f"{self.experts} " + " ".join(f"{name}={getattr(self.config, name)}" for name in names)


def random_model(seed: int, *, most_groups: int = 32, num_layers: int = 3) -> RandomModel:
    """Widths up to `most_groups` times 128 (of experts up to 9 times, but where hidden sizes are Flash's), the first
    model's 384.

    `FAMILY` seeds in a row share what most kernels are compiled for, and each has one of two choices of heads, of
    indexer and of experts, so that a family costs the compiler as much as two models. Layers and routers are its own.
    """
    family, member = divmod(seed, FAMILY)
    common, own = random.Random(family), random.Random(f"model {seed}")

    def width(most: int) -> int:
        return FP8_GROUP * common.randint(1, most)

    hidden_groups = min(most_groups, HIDDEN_GROUPS[family % len(HIDDEN_GROUPS)])
    o_groups, head_dim, q_lora_rank = common.choice([1, 2, 3, 4, 5]), common.choice([128, 256, 512]), width(4)
    o_lora_rank = FP8_GROUP * common.choice([1, 2])
    heads = common.sample([1, 2, 3], 2)[member & 1]
    index = list(zip(common.sample([1, 3, 5, 6, 8, 11], 2), common.sample([8, 24, 40, 100], 2), strict=True))
    experts = list(zip(common.sample([5, 7, 9, 12, 16, 17], 2), common.sample([1, 2, 3, 5], 2), strict=True))
    formats: list[ExpertFormat] = common.sample(["mxfp4", "nvfp4"], 2)
    moe_widths = [width(min(most_groups, 9)) for _ in range(2)]
    moe_widths = [FP8_GROUP * groups for groups in MOE_GROUPS.get(hidden_groups, ())] or moe_widths
    of_index, of_experts = member >> 1 & 1, member >> 2 & 1
    ratios = tuple(own.sample([0, 4, 128], 3)) if num_layers == 3 else tuple(own.choices([4, 128], k=num_layers))
    config = ModelConfig.tiny(
        vocab_size=256, hidden_size=FP8_GROUP * hidden_groups, num_hidden_layers=num_layers,
        num_hash_layers=own.choice([0, 1]), num_attention_heads=o_groups * heads, head_dim=head_dim,
        q_lora_rank=q_lora_rank, o_groups=o_groups, o_lora_rank=o_lora_rank, n_routed_experts=experts[of_experts][0],
        num_experts_per_tok=experts[of_experts][1], moe_intermediate_size=moe_widths[of_experts],
        index_n_heads=index[of_index][0], index_topk=index[of_index][1], compress_ratios=ratios,
        num_nextn_predict_layers=0, max_position_embeddings=2048,
    )  # fmt: skip
    return RandomModel(config, formats[of_experts])


# ---- ops ----


def _hyper(chance: random.Random, num_rows: int, most: int, device: torch.device) -> OpCall:
    width = 64 * chance.randint(1, 2 * most)
    x = make_inputs(num_rows, width, device)
    return op_call(
        "hc_boundary", **x.streams_arguments, **x.mixing_arguments, norm_weight=x.norm, settings=SETTINGS,
        has_codes=width % FP8_GROUP == 0,
    )  # fmt: skip


def _hyper_head(chance: random.Random, num_rows: int, most: int, device: torch.device) -> OpCall:
    x = make_inputs(num_rows, 64 * chance.randint(1, 2 * most), device, num_mixes=4)
    return op_call("hc_head_norm", streams=x.streams, **x.mixing_arguments, norm_weight=x.norm, **EPS)


def _norm(chance: random.Random, num_rows: int, most: int, device: torch.device) -> OpCall:
    width = FP8_GROUP * chance.randint(1, most)
    x, weight = random_plain(num_rows, width, device), random_plain(1, width, device)[0]
    return op_call("rms_norm_quant", x=x, weight=weight, eps=1e-6, keep_plain=True)


def _route(chance: random.Random, num_rows: int, most: int, device: torch.device) -> OpCall:
    width, num_experts = 64 * chance.randint(1, 2 * most), chance.choice([5, 9, 17, 65, 130])
    top_k = chance.choice([1, 3, 5])
    return op_call(
        "route", x=random_plain(num_rows, width, device), gate=random_plain(num_experts, width, device),
        bias=torch.randn(num_experts, device=device), tid2eid=None,
        token_ids=torch.zeros(num_rows, dtype=torch.int64, device=device), top_k=top_k, scale=1.5,
    )  # fmt: skip


def _linear(chance: random.Random, num_rows: int, most: int, device: torch.device) -> OpCall:
    width, num_outputs = FP8_GROUP * chance.randint(1, 2 * most), 8 * chance.randint(1, 4 * most)
    return op_call("linear", x=random_plain(num_rows, width, device), weight=random_fp8(num_outputs, width, device))


def _plain_linear(chance: random.Random, num_rows: int, most: int, device: torch.device) -> OpCall:
    width, num_outputs = 8 * chance.randint(1, 32 * most), 8 * chance.randint(1, 4 * most)
    x, weight = random_plain(num_rows, width, device), random_plain(num_outputs, width, device)
    return op_call("linear", x=x, weight=weight, out_dtype=torch.float32)


def _grouped(chance: random.Random, num_rows: int, most: int, device: torch.device) -> OpCall:
    num_groups, rank, width = (
        chance.choice([1, 3, 5]),
        64 * chance.choice([1, 3]),
        FP8_GROUP * chance.randint(1, 2 * most),
    )
    x = random_plain(num_rows, num_groups * width, device).unflatten(1, (num_groups, width))
    return op_call("grouped_linear", x=x, weight=random_shuffled(num_groups * rank, width, device))


def _moe(chance: random.Random, num_rows: int, most: int, device: torch.device) -> OpCall:
    dim, width = (FP8_GROUP * chance.choice([one for one in (1, 2, 3, 5, 9) if one <= most]) for _ in range(2))
    num_experts, top_k = chance.choice([5, 9, 17]), chance.choice([1, 3, 5])
    weight_format = chance.choice([QuantFormat.NVFP4, QuantFormat.MXFP4])
    shapes = ((width, dim), (dim, width), (width, dim))
    scores = torch.rand(num_rows, num_experts, device=device)
    return op_call(
        "moe", x=random_plain(num_rows, dim, device), experts=scores.topk(top_k).indices.sort(-1).values,
        weights=torch.rand(num_rows, top_k, device=device),
        routed=tuple(random_weight((num_experts, *shape), weight_format, device) for shape in shapes),
        shared=tuple(random_weight(shape, QuantFormat.FP8_BLOCK, device) for shape in shapes), limit=LIMIT,
    )  # fmt: skip


def _sampled_logprobs(chance: random.Random, num_rows: int, most: int, device: torch.device) -> OpCall:
    vocab_size = chance.randint(100, 500 * most)
    logits: Tensor = torch.randn(num_rows, vocab_size, device=device)
    token_ids = torch.randint(vocab_size, (num_rows,), device=device)
    return op_call("sampled_logprobs", logits=logits, token_ids=token_ids, num_top=chance.choice([0, 3, 20]))


def _head_dim(chance: random.Random, most: int) -> int:
    return chance.choice([128, 256, 512][: max(most // 2, 1)])


def _linears(chance: random.Random, num_rows: int, most: int, device: torch.device) -> OpCall:
    """The projections that share an input, in one bundle."""
    width, rows = FP8_GROUP * chance.randint(1, 2 * most), [8 * chance.randint(1, 2 * most) for _ in range(4)]
    bundle = LinearBundle.build(
        [*(random_fp8(count, width, device) for count in rows[:2]), *(random_plain(n, width, device) for n in rows[2:])]
    )
    return op_call(
        "linears", x=random_plain(num_rows, width, device), weights=bundle,
        out_dtypes=[torch.bfloat16] * 2 + [torch.float32] * 2, codes=random_activation(num_rows, width, device),
    )  # fmt: skip


def _grouped_codes(chance: random.Random, num_rows: int, most: int, device: torch.device) -> OpCall:
    num_groups, width = chance.choice([1, 3, 5]), FP8_GROUP * chance.randint(1, 2 * most)
    x = random_plain(num_rows, num_groups * width, device).unflatten(1, (num_groups, width))
    return op_call("grouped_codes", x=x, weight=random_shuffled(num_groups * FP8_GROUP, width, device))


def _attention(chance: random.Random, num_rows: int, most: int, device: torch.device) -> OpCall:
    """A decode step of requests of one length."""
    row_format = RowFormat(RowKind.ENTRY_FP8, _head_dim(chance, most), rope_dim=64)
    ratio, num_picks = chance.choice([4, 128]), chance.choice([8, 24, 100])
    context = 128 * chance.randint(4, 3 + most)
    inputs = build_inputs(chance.randint(1, 7), num_picks, row_format, ratio, context, num_rows, 1, device)
    return op_call("sparse_attention", **inputs)


def _attention_inputs(chance: random.Random, num_rows: int, most: int, device: torch.device) -> OpCall:
    heads, dim = chance.randint(1, 7), _head_dim(chance, most)
    index_q = random_plain(num_rows, 3 * 128, device).unflatten(1, (3, 128))
    return op_call(
        "attention_inputs", q=random_plain(num_rows, heads * dim, device).unflatten(1, (heads, dim)),
        kv=random_plain(num_rows, dim, device), index_q=index_q, kv_norm=random_plain(1, dim, device)[0],
        freqs=torch.rand(32, device=device), eps=1e-6,
        window=ring_of(num_rows, device, RowFormat(RowKind.ENTRY_FP8, dim, rope_dim=64)),
        keys=random_keys(1, KEYS, device), batch=decode(num_rows, device), appends=True,
    )  # fmt: skip


def _compress(chance: random.Random, num_rows: int, most: int, device: torch.device) -> OpCall:
    batch = decode(num_rows, device, position=128 * chance.randint(1, 3) - 1)
    job = compression(RowFormat(RowKind.ENTRY_FP8, _head_dim(chance, most), rope_dim=64), 128, batch, device)
    parts = {name: getattr(job, name) for name in ("kv", "gate", "spec", "state", "pages")}
    return op_call("compress", **parts, batch=batch)


def _compress_pair(chance: random.Random, num_rows: int, most: int, device: torch.device) -> OpCall:
    batch = decode(num_rows, device, position=4 * chance.randint(3, 90) - 1)
    formats = RowFormat(RowKind.ENTRY_FP8, _head_dim(chance, most), rope_dim=64), KEYS
    attention, index = (compression(one, 4, batch, device) for one in formats)
    return op_call("compress_pair", attention=attention, index=index, batch=batch)


def _index_topk(chance: random.Random, num_rows: int, most: int, device: torch.device) -> OpCall:
    """The last tokens of a chunk."""
    heads, context = chance.choice([1, 3, 5]), 128 * chance.randint(3, 2 + most) + num_rows // 128 * 128
    return op_call(
        "index_topk", q=random_plain(num_rows, heads * 128, device).unflatten(1, (heads, 128)),
        weights=torch.randn(num_rows, heads, device=device),
        keys=random_keys(context // 128, FORMATS[chance.choice(["fp4", "fp8"])], device),
        batch=batch_at(1, num_rows, context, device), ratio=4, top_k=chance.choice([8, 24, 40]),
    )  # fmt: skip


def _topk(chance: random.Random, num_rows: int, most: int, device: torch.device) -> OpCall:
    scores = torch.randn(num_rows, chance.randint(30, 1000 * most), device=device).mul(4).round()  # many are equal
    return op_call("topk_select", scores=scores, k=chance.randint(1, 30), ascending=chance.random() < 0.5)


def _sample(chance: random.Random, num_rows: int, most: int, device: torch.device) -> OpCall:
    name = chance.choice(list(SAMPLING))
    call = sample_case(name, num_rows, vocabulary=chance.randint(100, 500 * most)).build(device).op_call
    assert call is not None
    return call


class FormsOfOp(NamedTuple):
    """`make(chance, rows, most, device)`, for widths of up to about `most` times 128; numbers of rows at which the form
    changes, of those an interpreter can afford."""

    make: Callable[[random.Random, int, int, torch.device], OpCall]
    limits: tuple[int, ...]


FORMS: dict[str, FormsOfOp] = {
    "hc_boundary": FormsOfOp(_hyper, (1, 16)),
    "hc_head_norm": FormsOfOp(_hyper_head, (1, 16)),
    "rms_norm_quant": FormsOfOp(_norm, (1, 8)),
    "route": FormsOfOp(_route, (1, 64)),
    "linear of FP8": FormsOfOp(_linear, (1, 16, 32)),
    "linear of bf16": FormsOfOp(_plain_linear, (1, 16, 32)),
    "grouped_linear": FormsOfOp(_grouped, (1, 16, 32)),
    "linears": FormsOfOp(_linears, (1, 16, 32)),
    "grouped_codes": FormsOfOp(_grouped_codes, (1, 16)),
    "moe": FormsOfOp(_moe, (1, 5)),
    "sparse_attention": FormsOfOp(_attention, (1, 4)),
    "attention_inputs": FormsOfOp(_attention_inputs, (1, 4)),
    "compress": FormsOfOp(_compress, (1, 8)),
    "compress_pair": FormsOfOp(_compress_pair, (1, 4)),
    "index_topk": FormsOfOp(_index_topk, (1, 256)),
    "topk_select": FormsOfOp(_topk, (1, 8)),
    "sample": FormsOfOp(_sample, (1, 4)),
    "sampled_logprobs": FormsOfOp(_sampled_logprobs, (1, 4)),
}
# where rows cost next to nothing
GPU_LIMITS = (1, 5, 11, 16, 32, 64, 128, 224, 256, 341, 384, 511, 512, 1365)


def random_call(name: str, seed: int, num_rows: int, device: torch.device, most: int) -> OpCall:
    torch.manual_seed(seed)
    return FORMS[name].make(random.Random(f"{name} {seed}"), num_rows, most, device)
