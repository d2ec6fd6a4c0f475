"""RMSNorm, alone and with FP8 codes of its result."""

from dsv4.ops.norm.launch import rms_norm, rms_norm_quant
from dsv4.ops.norm.op import rms_norm_quant_ref, rms_norm_ref
from dsv4.ops.norm.plan import KERNEL_DTYPES, ROW_CONFIGS

__all__ = [
    "KERNEL_DTYPES", "ROW_CONFIGS", "rms_norm", "rms_norm_quant", "rms_norm_quant_ref", "rms_norm_ref",
]
