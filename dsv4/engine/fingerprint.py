"""A name for everything that decides the bits of a cached row, so that a file is used by nobody else.

The checkpoint (every header, and samples of every file's bytes), the numerics, the layout of rows and snapshots, this
package's own arithmetic, the libraries, and the processor. What provably changes no bit is left out: limits, chunk
sizes, offloading. Bytes are sampled, not read: a checkpoint edited in a few places between two samples keeps its name.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from pathlib import Path

import torch

from dsv4.cache.schema import CacheSchema
from dsv4.config import ModelConfig
from dsv4.loader.checkpoint import Checkpoint

_NUM_SAMPLES, _SAMPLE_BYTES = 256, 4096
_ARITHMETIC = ("formats", "ops", "model", "cache")  # the parts whose code decides what is in a row, and where


def run_fingerprint(
    checkpoint: Checkpoint, config: ModelConfig, schema: CacheSchema, *, numerics: str, dtype: torch.dtype,
    backend: str, device: torch.device,
) -> str:  # fmt: skip
    """32 hexadecimal digits."""
    pools = [(one.name, one.layer_ids, one.shape[1:], one.itemsize) for one in schema.paged_pools]
    pools += [(one.name, one.layer_ids, one.shape[1:], one.itemsize) for one in schema.snapshot_pools]
    facts = [repr(config), repr(pools), numerics, str(dtype), backend, *_libraries(), *_processor(device)]
    digest = hashlib.blake2b(digest_size=16)
    for part in (*facts, checkpoint_digest(checkpoint), _source_digest()):
        digest.update(len(part).to_bytes(8, "little") + part.encode("utf-8"))
    return digest.hexdigest()


def checkpoint_digest(checkpoint: Checkpoint) -> str:
    """Every tensor's name, type, shape and place, and `_NUM_SAMPLES` samples of each file, its ends among them."""
    digest = hashlib.blake2b(digest_size=16)
    files: set[Path] = set()
    for info in checkpoint.tensors.values():
        digest.update(repr((info.name, info.dtype, info.shape, info.file.name, info.start, info.end)).encode("utf-8"))
        files.add(info.file)
    for file in sorted(files):
        size = file.stat().st_size
        last = max(0, size - _SAMPLE_BYTES)
        with file.open("rb") as stream:
            for start in sorted({last * sample // (_NUM_SAMPLES - 1) for sample in range(_NUM_SAMPLES)}):
                stream.seek(start)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _source_digest() -> str:
    root = Path(__file__).parents[1]
    digest = hashlib.blake2b(digest_size=16)
    for part in _ARITHMETIC:
        for file in sorted((root / part).rglob("*.py")):
            digest.update(file.relative_to(root).as_posix().encode("utf-8") + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _libraries() -> list[str]:
    found = [f"torch {torch.__version__}"]
    try:
        found.append(f"triton {importlib.metadata.version('triton')}")
    except importlib.metadata.PackageNotFoundError:
        found.append("no triton")
    return found


def _processor(device: torch.device) -> list[str]:
    """A GPU by its name and capability. A CPU's libraries sum in an order that follows its threads."""
    if device.type == "cuda":
        return [torch.cuda.get_device_name(device), repr(torch.cuda.get_device_capability(device))]
    return [platform.machine(), torch.backends.cpu.get_cpu_capability(), f"{torch.get_num_threads()} threads"]
