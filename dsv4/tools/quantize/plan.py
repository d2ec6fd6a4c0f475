"""What a quantisation will write, decided from headers alone: formats, shards, config, bytes.

| target | experts | other matrices |
|---|---|---|
| mxfp4 | I8 codes, E8M0 `.scale` per 32 (the official layout) | FP8 blocks or BF16 |
| nvfp4 | U8 codes, E4M3 `.weight_scale` per 16, FP32 `.weight_scale_2` (ModelOpt's layout) | FP8 blocks or BF16 |

Names are the official ones whatever the source's are. Tensors that the model does not read (a draft head) are copied.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dsv4.config import ModelConfig
from dsv4.formats.rows import MXFP4_GROUP, NVFP4_GROUP
from dsv4.formats.tensors import QuantFormat
from dsv4.loader.checkpoint import Checkpoint
from dsv4.loader.header import CheckpointError
from dsv4.loader.layout import StoredTensor, weight_tensors
from dsv4.loader.names import Naming, Role
from dsv4.loader.resolve import LoadPlan, Source
from dsv4.loader.write.config_file import quantization_section

Experts = Literal["nvfp4", "mxfp4"]
Linears = Literal["fp8", "bf16"]
BITS = {None: 16, QuantFormat.FP8_BLOCK: 8, QuantFormat.NVFP4: 4, QuantFormat.MXFP4: 4}


@dataclass(frozen=True)
class Target:
    """Formats asked for; `linears` None leaves projections as they are."""

    experts: Experts
    linears: Linears | None = None

    def format_of(self, source: Source) -> QuantFormat | None:
        """The format `source` is written in; None is plain."""
        stored = source.format.quant
        if source.tensor.role is Role.EXPERT:
            return QuantFormat(self.experts)
        if source.tensor.role is Role.LINEAR and self.linears is not None:
            return QuantFormat.FP8_BLOCK if self.linears == "fp8" else None
        return stored


def check_target(target: Target, plan: LoadPlan, config: ModelConfig) -> None:
    """`CheckpointError` where rounding again would only lose, or nothing would change."""
    changed = False
    for source in plan.sources:
        stored, wanted = source.format.quant, target.format_of(source)
        if stored == wanted:
            continue
        changed = True
        option = "--experts" if source.tensor.role is Role.EXPERT else "--linears"
        if (stored is QuantFormat.NVFP4 and wanted is QuantFormat.MXFP4) or (
            source.tensor.role is Role.LINEAR and BITS[stored] == 4
        ):
            raise CheckpointError(
                f"{source.data} is {stored} already: rounding it again to {wanted or 'bf16'} can only lose; "
                f"start from a finer source, or choose another {option}"
            )
        group = {QuantFormat.MXFP4: MXFP4_GROUP, QuantFormat.NVFP4: NVFP4_GROUP}.get(wanted) if wanted else None
        if group and source.tensor.shape[1] % group:
            raise CheckpointError(
                f"{source.data} has {source.tensor.shape[1]} columns, no multiple of the {group} of {wanted}"
            )
    if not changed:
        raise CheckpointError(f"nothing to do: every weight already has the requested format ({target})")


def stored_parts(source: Source, target: Target, config: ModelConfig) -> tuple[StoredTensor, ...]:
    """What the output holds for one weight: the weight, then its scales."""
    wanted, stored = target.format_of(source), source.format
    dtype = "BF16" if stored.quant is not None else stored.dtype  # where it is plain
    scale_dtype = (stored.scale_dtype if stored.quant is wanted else None) or "F8_E8M0"
    return weight_tensors(source.tensor, wanted, config.weight_block_size, dtype=dtype, scale_dtype=scale_dtype)


def copied_tensors(checkpoint: Checkpoint, plan: LoadPlan) -> list[StoredTensor]:
    """Tensors the model does not read, to be copied as they are: a draft head the loader leaves out."""
    used = {name for source in plan.sources for name in (source.data, source.scale, source.global_scale)}
    used |= {source.data.removesuffix(".weight") + ".input_scale" for source in plan.sources}
    rest = [info for name, info in checkpoint.tensors.items() if name not in used]
    if rest and plan.naming is not Naming.OFFICIAL:
        raise CheckpointError(f"{rest[0].name} cannot be carried over from {plan.naming} names")
    return [StoredTensor(info.name, info.dtype, info.shape) for info in rest]


def output_config(raw: Mapping[str, Any], config: ModelConfig, target: Target, plan: LoadPlan) -> dict[str, Any]:
    """The source's config.json with what quantisation changes in it."""
    is_bf16 = target.linears == "bf16" or (
        target.linears is None
        and any(source.tensor.role is Role.LINEAR and source.format.quant is None for source in plan.sources)
    )
    section = quantization_section(config, target.experts)
    assert section is not None
    if is_bf16:
        section["modules_to_not_convert"] = ["attn", "shared_experts", "e_proj", "h_proj", "main_proj"]
    result = {**raw, "expert_dtype": "fp4", "quantization_config": section}
    result.pop("dtype", None)
    return result | {"torch_dtype": "bfloat16"}


def modelopt_config(target: Target) -> dict[str, Any] | None:
    """hf_quant_config.json, which engines that read ModelOpt's checkpoints look for."""
    if target.experts != "nvfp4":
        return None
    excluded = ["*attn*", "*shared_experts*", "*ffn.gate*", "*hc_*", "embed", "head", "*e_proj", "*h_proj"]
    return {
        "producer": {"name": "dsv4"},
        "quantization": {
            "quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "group_size": NVFP4_GROUP,
            "kv_cache_quant_algo": None, "exclude_modules": excluded,
        },
    }  # fmt: skip
