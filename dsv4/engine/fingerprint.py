"""Names for what decides bits: `Identity` for people and receipts, `run_fingerprint` for files of cached rows.

The checkpoint (every header, and samples of every file's bytes; its config and tokenizer; of tensors that came from no
file, sums of all their bytes), the numerics, this package's own arithmetic, the libraries, and the processor. What
provably changes no bit is left out: limits, chunk sizes, offloading, the number of GPUs. Files are sampled, not read: a
checkpoint edited in a few places between two samples keeps its name. `checkpoint_parts` (tools/receipts/digests.py)
has every byte, and says which layer it is that differs.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from dsv4 import __version__
from dsv4.cache.schema import CacheSchema
from dsv4.config import ModelConfig
from dsv4.loader.checkpoint import Checkpoint
from dsv4.ops.lib.assembler import assembler_of

IN_MEMORY = "memory"  # instead of a digest: parameters that came from no checkpoint
_NUM_SAMPLES, _SAMPLE_BYTES = 256, 4096
_LINE_BYTES = 256
_ARITHMETIC = ("formats", "ops", "model", "cache")  # the parts whose code decides what is in a row, and where
_NAME_DIGITS = 12


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What, besides a request itself, decides its tokens and log-probabilities.

    checkpoint  digest of weights (sampled), config and tokenizer
    numerics    `official`, or `exact.` and the dtype
    kernels     digest of the code that computes, the backend's name and the libraries
    libraries   torch and Triton, and on a GPU ptxas, with their versions
    processor   `sm_90.NVIDIA-H200`, or a CPU's architecture, instruction set and threads
    package     version and digest of the whole package: sampling rules and stop strings are decided there too
    """

    checkpoint: str
    numerics: str
    kernels: str
    libraries: str
    processor: str
    package: str

    @property
    def name(self) -> str:
        """One word for answers: checkpoint, numerics, kernels, processor."""
        checkpoint, kernels = self.checkpoint[:_NAME_DIGITS], self.kernels[:_NAME_DIGITS]
        return f"dsv4-{checkpoint}-{self.numerics}-{kernels}-{self.processor}"


def identify(checkpoint: str, *, numerics: str, dtype: torch.dtype, backend: str, device: torch.device) -> Identity:
    """Of a model as it runs now, with the digest of its weights; torch's threads are part of it on a CPU."""
    libraries = _libraries(device)
    return Identity(
        checkpoint=checkpoint,
        numerics=numerics if numerics == "official" else f"{numerics}.{str(dtype).removeprefix('torch.')}",
        kernels=digest_of([source_digest(_ARITHMETIC), backend, *libraries]),
        libraries=", ".join(libraries),
        processor=_processor(device),
        package=f"{__version__} {source_digest(('',))}",
    )


def run_fingerprint(identity: Identity, config: ModelConfig, schema: CacheSchema) -> str:
    """32 hexadecimal digits: whose cached rows these are. Rows do not depend on rules outside the arithmetic."""
    pools = [(one.name, one.layer_ids, one.shape[1:], one.itemsize) for one in schema.paged_pools]
    pools += [(one.name, one.layer_ids, one.shape[1:], one.itemsize) for one in schema.snapshot_pools]
    facts = (identity.checkpoint, identity.numerics, identity.kernels, identity.processor)
    return digest_of([*facts, repr(config), repr(pools)])


# ---- weights ----


def weights_digest(checkpoint: Checkpoint | None, config: ModelConfig) -> str:
    """Of weights (sampled), config and tokenizer, as they lie on the disk now."""
    if checkpoint is None:
        return IN_MEMORY
    return digest_of([checkpoint_digest(checkpoint), *config_parts(checkpoint, config).values()])


class TensorsDigest:
    """Of named tensors in memory: what they are, and the sums of their 8-byte words, by place modulo 32. It takes one
    read of each, where it lies; the host waits for none of them before `hexdigest`."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._sums: list[torch.Tensor] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if data.storage_offset() % 8:
            data = data.clone()
        num_whole = data.numel() // _LINE_BYTES * _LINE_BYTES
        rest = torch.nn.functional.pad(data[num_whole:], (0, num_whole + _LINE_BYTES - data.numel()))
        whole = data[:num_whole].view(torch.int64).view(-1, _LINE_BYTES // 8).sum(0)
        self._names.append(repr((name, tensor.dtype, tuple(tensor.shape))))
        self._sums.append(whole + rest.view(torch.int64))

    def hexdigest(self) -> str:
        """The same in any order of tensors."""
        sums = torch.stack([one.to(self._sums[0].device) for one in self._sums]).cpu().numpy()
        return digest_of(sorted(f"{name} {one.tobytes().hex()}" for name, one in zip(self._names, sums, strict=True)))


def checkpoint_digest(checkpoint: Checkpoint) -> str:
    """Every tensor's name, type, shape and place, and `_NUM_SAMPLES` samples of each file, its ends among them."""
    digest = hashlib.blake2b(digest_size=16)
    for info in checkpoint.tensors.values():
        digest.update(repr((info.name, info.dtype, info.shape, info.file.name, info.start, info.end)).encode("utf-8"))
    for file in sorted({info.file for info in checkpoint.tensors.values()}):
        size = file.stat().st_size
        last = max(0, size - _SAMPLE_BYTES)
        with file.open("rb") as stream:
            for start in sorted({last * sample // (_NUM_SAMPLES - 1) for sample in range(_NUM_SAMPLES)}):
                stream.seek(start)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def config_parts(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, str]:
    """Digests of what is beside the weights; the config as it was understood, not its spelling."""
    file = checkpoint.path / "tokenizer.json"
    words = hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest() if file.is_file() else "none"
    return {"config.json": digest_of([repr(config)]), "tokenizer.json": words}


# ---- code, libraries, processors ----


@cache
def source_digest(parts: tuple[str, ...]) -> str:
    """Of the package's folders `parts`, with all below them."""
    root = Path(__file__).parents[1]
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        for file in sorted((root / part).rglob("*.py")):
            digest.update(file.relative_to(root).as_posix().encode("utf-8") + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _libraries(device: torch.device) -> list[str]:
    """With the assembler where kernels are compiled: two versions of it may make other bits of the same kernel."""
    found = [f"torch {torch.__version__}"]
    try:
        found.append(f"triton {importlib.metadata.version('triton')}")
    except importlib.metadata.PackageNotFoundError:
        return [*found, "no triton"]
    if device.type == "cuda":
        found.append(assembler_of(torch.cuda.get_device_capability(device)))
    return found


def _processor(device: torch.device) -> str:
    """A GPU by its capability and name. A CPU's libraries sum in an order that follows its threads."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        words = [f"sm_{major}{minor}", torch.cuda.get_device_name(device)]
    else:
        words = ["cpu", platform.machine(), torch.backends.cpu.get_cpu_capability(), f"{torch.get_num_threads()}t"]
    return ".".join(re.sub(r"[^A-Za-z0-9_]+", "-", word) for word in words)


def digest_of(parts: Iterable[str]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part.encode("utf-8"))
    return digest.hexdigest()
