"""What the last `dsv4 selftest` said of this GPU's kernels, for the engine to ask before it uses them.

One JSON file in the user's cache folder (user_cache.py) for each GPU, driver, version of the kernels and of the
libraries that compile them; and one for each checkpoint's shapes on them. Without a file nothing is known, and the
kernels are used. A kernel that failed is refused; one that cannot run on the architecture is served by its oracle.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from dsv4.config import ModelConfig
from dsv4.engine.fingerprint import source_digest
from dsv4.engine.user_cache import cache_file, read_json, write_json
from dsv4.errors import Dsv4Error
from dsv4.loader.header import TensorInfo
from dsv4.ops import TORCH, Backend
from dsv4.ops.lib.assembler import assembler_of

_DRIVER = Path("/proc/driver/nvidia/version")
_KERNELS = ("formats", "ops")  # the parts whose code is the kernels'


class KernelRefused(Dsv4Error, ValueError):
    """The self-test found kernels wrong on this GPU."""


@dataclass(frozen=True)
class KernelVerdict:
    """`key`: of which GPU and kernels, and maybe of which model's shapes; ops that failed, or what of the model did;
    ops whose kernels cannot run there."""

    key: dict[str, str]
    failed: tuple[str, ...]
    missing: tuple[str, ...]


def kernel_key(device: torch.device) -> dict[str, str]:
    """Everything that decides what the kernels compute."""
    return {
        "gpu": torch.cuda.get_device_name(device),
        "driver": _driver_version(),
        "kernels": source_digest(_KERNELS),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "assembler": assembler_of(torch.cuda.get_device_capability(device)),
    }


def model_key(device: torch.device, config: ModelConfig, tensors: Iterable[TensorInfo]) -> dict[str, str]:
    """The same, and the shapes that a checkpoint gives the kernels."""
    shapes = sorted({(info.dtype, info.shape) for info in tensors})
    digest = hashlib.blake2b(repr((config, shapes)).encode(), digest_size=8).hexdigest()
    return kernel_key(device) | {"model": digest}


def verdict_file(key: dict[str, str]) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", key["gpu"].lower()).strip("-")
    return cache_file("selftest", f"{name}-{hashlib.blake2b(json.dumps(key).encode(), digest_size=8).hexdigest()}")


def write_verdict(verdict: KernelVerdict) -> Path | None:
    """None where it cannot be written."""
    return write_json(verdict_file(verdict.key), asdict(verdict))


def read_verdict(key: dict[str, str]) -> KernelVerdict | None:
    """None where there is none, or one that cannot be read."""
    found = read_json(verdict_file(key))
    try:
        verdict = KernelVerdict(found["key"], tuple(found["failed"]), tuple(found["missing"]))
    except (KeyError, TypeError):
        return None
    return verdict if verdict.key == key else None


def allowed_backend(
    backend: Backend, device: torch.device, config: ModelConfig, tensors: Iterable[TensorInfo], *, is_ignored: bool
) -> Backend:  # fmt: skip
    """The backend as this GPU's self-tests allow it, of all shapes and of this checkpoint's: oracles serve where a
    kernel cannot run, and then nothing is captured. `KernelRefused` where one failed, unless that is ignored.
    """
    if not backend.has_kernels or device.type != "cuda" or is_ignored:
        return backend
    keys = model_key(device, config, tensors), kernel_key(device)
    verdicts = [verdict for verdict in map(read_verdict, keys) if verdict is not None]
    for verdict in verdicts:
        refuse(verdict)
    missing = {op for verdict in verdicts for op in verdict.missing}
    oracles = {op: getattr(TORCH.ops, op) for op in sorted(missing) if hasattr(TORCH.ops, op)}
    return replace(backend.with_ops(**oracles), graph_devices=frozenset()) if oracles else backend


def refuse(verdict: KernelVerdict) -> None:
    """`KernelRefused` if something failed."""
    if verdict.failed:
        argument, where = (" MODEL", ", at this model's shapes") if "model" in verdict.key else ("", "")
        raise KernelRefused(
            f"`dsv4 selftest{argument}` found wrong results on this {verdict.key['gpu']}{where}: "
            f"{', '.join(verdict.failed)}; run it again for the details (after a change of driver or version it is "
            "asked anew), or use the model anyway with ignore_selftest=True or --ignore-selftest"
        )


def _driver_version() -> str:
    """The kernel module's, or 'unknown' where it does not say."""
    try:
        match = re.search(r"\b\d+\.\d+(\.\d+)?\b", _DRIVER.read_text(encoding="utf-8"))
    except OSError:
        return "unknown"
    return match[0] if match else "unknown"
