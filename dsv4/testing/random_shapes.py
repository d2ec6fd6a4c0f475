"""Random shapes: models and calls of ops with widths that are no powers of two and odd numbers of heads,
groups, experts and choices. For tests of what must hold at every shape that the kernels take.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.formats.tensors import QuantFormat
from dsv4.loader.write.config_file import ExpertFormat
from dsv4.ops.hyper import HyperSettings
from dsv4.testing.cases.hyper import make_inputs
from dsv4.testing.cases.linear import random_fp8, random_plain, random_shuffled
from dsv4.testing.cases.moe import LIMIT, random_weight
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
    "moe": FormsOfOp(_moe, (1, 5)),
    "sampled_logprobs": FormsOfOp(_sampled_logprobs, (1, 4)),
}
# where rows cost next to nothing
GPU_LIMITS = (1, 5, 11, 16, 32, 64, 128, 224, 256, 384, 511, 512)


def random_call(name: str, seed: int, num_rows: int, device: torch.device, most: int) -> OpCall:
    torch.manual_seed(seed)
    return FORMS[name].make(random.Random(f"{name} {seed}"), num_rows, most, device)
