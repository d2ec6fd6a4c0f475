"""All parts in their order. Import it after `choose_device`."""

import platform
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from dsv4 import __version__
from dsv4.config import ModelConfig
from dsv4.engine.run.kernel_record import kernel_key, model_key
from dsv4.errors import Dsv4Error
from dsv4.loader.checkpoint import Checkpoint
from dsv4.ops import TRITON, Backend
from dsv4.ops.lib.guard import HAS_TRITON
from dsv4.testing.bench import Timer, case_modules, load_cases
from dsv4.tools.selftest.model import check_model, check_vectors
from dsv4.tools.selftest.ops import Done, check_ops, compile_ahead, op_cases
from dsv4.tools.selftest.own import check_shapes_of, keep_verdict
from dsv4.tools.selftest.report import Check, DeviceLost, SelftestReport, Speed, Status

CASES = (
    "rms_norm/weighted-4096x4096", "hc_boundary/1x4096", "linears/flash-csa-in-1", "linear/flash-wo_b-64",
    "linear/flash-lm_head-1", "route/flash-dense-1", "moe/flash-nvfp4-1", "moe/flash-nvfp4-64", "moe/flash-mxfp4-64",
    "index_topk/1x1-at-65536-fp4", "sparse_attention/flash-csa-64k-1", "sparse_attention/flash-csa-64k-64",
    "sample/top-p-64",
)  # fmt: skip
SAMPLES = 30
_PASS_BYTES = 4 << 30


def read_bandwidth(timer: Timer) -> float:
    """Bytes a second of a sum over a large tensor."""
    free, _ = torch.cuda.mem_get_info()
    values = torch.zeros(min(_PASS_BYTES, free // 4) // 4, dtype=torch.float32, device="cuda")
    seconds = 1e-6 * statistics.median(timer.times_us(values.sum))
    return values.numel() * 4 / seconds


def speeds(timer: Timer, bandwidth: float) -> Iterator[Speed]:
    """One row for each case that runs here."""
    known = {case.key: case for case in load_cases(case_modules())}
    for key in CASES:
        try:
            work = known[key].build(torch.device("cuda"))
            median = statistics.median(timer.times_us(work.call))
        except (RuntimeError, ValueError):  # said by the checks already
            continue
        finally:
            torch.cuda.empty_cache()
        rate = (work.bytes_read + work.bytes_written) / median * 1e6
        yield Speed(
            key, round(median, 2), round(rate / 1e9, 1), round(100 * rate / bandwidth, 1),
            round(work.flops / median / 1e6, 1),
        )  # fmt: skip


class SelftestError(Dsv4Error, ValueError):
    """The self-test cannot run here."""


@dataclass(frozen=True)
class SelftestOptions:
    """What is run.

    is_quick: small shapes only, no speed. ops: only the checks of these ops. backend: whose ops, by default the
    kernels. is_kept: write the verdict that the engine reads, after a complete run on a GPU. model: a checkpoint
    folder, for its shapes alone
    """

    is_quick: bool = False
    ops: tuple[str, ...] = ()
    backend: Backend | None = None
    is_kept: bool = True
    model: Path | None = None


def run_selftest(
    device: torch.device, options: SelftestOptions, progress: Done = lambda what, done, total: None
) -> SelftestReport:
    """Everything that can run on this device; `progress` hears what is tried."""
    start, backend, is_gpu = time.perf_counter(), options.backend or TRITON, device.type == "cuda"
    if not HAS_TRITON:
        raise SelftestError("Triton is not installed, so there is no kernel to test; pip install triton")
    report = SelftestReport(_machine(device), is_interpreted=not is_gpu)
    key = partial(kernel_key, device)
    if options.model is not None:
        if options.ops or options.is_quick:
            raise SelftestError("a MODEL is tested whole: leave out --op and --quick")
        config, tensors = ModelConfig.from_pretrained(options.model), Checkpoint.open(options.model).tensors
        key = partial(model_key, device, config, tensors.values())
        checks = check_shapes_of(options.model, device, backend, progress)
    else:
        checks = _checks(device, options, backend, progress)
    try:
        report.checks.extend(checks)
        if is_gpu and not (options.is_quick or options.ops or options.model):
            progress("speed", 0, 1)
            timer = Timer(SAMPLES)
            bandwidth = read_bandwidth(timer)
            report.speeds, report.bandwidth = list(speeds(timer, bandwidth)), round(bandwidth / 1e9, 1)
    except DeviceLost as lost:
        report.checks.append(lost.check)
        report.checks.append(Check("oracle", "everything after it", Status.FAILED, "", "the device is lost"))
    report.seconds = round(time.perf_counter() - start, 1)
    if options.is_kept and is_gpu and not options.ops and options.backend is None:
        keep_verdict(report.checks, key())
    return report


def _checks(device: torch.device, options: SelftestOptions, backend: Backend, progress: Done) -> Iterator[Check]:
    """Of all shapes. On a CPU the miniature runs on the oracles: interpreted kernels would take hours."""
    cases = op_cases(device, has_real_shapes=not options.is_quick, ops=options.ops)
    if not cases:
        raise SelftestError(f"no op is called {', '.join(options.ops)}")
    compile_ahead(cases, lambda done, total: progress("compiling kernels", done, total))
    yield from check_ops(cases, backend, device, progress)
    if not options.ops:
        progress("the miniature", len(cases), len(cases))
        yield from check_vectors(device, backend)
        yield from check_model(device, backend if device.type == "cuda" else None)


def _machine(device: torch.device) -> dict[str, str]:
    import triton

    machine = {
        "dsv4": __version__, "python": platform.python_version(), "torch": torch.__version__,
        "triton": triton.__version__, "cuda": str(torch.version.cuda), "system": platform.platform(),
    }  # fmt: skip
    if device.type != "cuda":
        return {"device": f"{platform.machine()} CPU, kernels in Triton's interpreter"} | machine
    properties = torch.cuda.get_device_properties(device)
    major, minor = torch.cuda.get_device_capability(device)
    return {
        "device": properties.name, "architecture": f"sm_{major}{minor}", "memory_bytes": str(properties.total_memory),
        "multiprocessors": str(properties.multi_processor_count), **kernel_key(device),
    } | machine  # fmt: skip
