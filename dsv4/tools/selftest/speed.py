"""A short table of speed: kernels of a decode step and of prefill beside the read bandwidth this GPU was measured to
have, with a cold cache (testing/bench.py).
"""

import statistics
from collections.abc import Iterator

import torch

from dsv4.testing.bench import Timer, case_modules, load_cases
from dsv4.tools.selftest.report import Speed

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
