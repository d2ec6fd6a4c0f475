"""The compressors: cache entries and index keys."""

from dsv4.ops.compress.launch import compress, compress_pair, launch_compress, launch_compress_pair
from dsv4.ops.compress.op import Compression, CompressorSpec, compress_pair_ref, compress_ref
from dsv4.ops.compress.plan import CSA_FEW, CSA_MANY, HCA_FEW, HCA_MANY, CompressPlan

__all__ = [
    "CSA_FEW", "CSA_MANY", "HCA_FEW", "HCA_MANY", "CompressPlan", "Compression", "CompressorSpec", "compress",
    "compress_pair", "compress_pair_ref", "compress_ref", "launch_compress", "launch_compress_pair",
]
