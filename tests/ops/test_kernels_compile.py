"""Every kernel, as the benchmark cases launch it, compiles for Hopper (in `make slow-test` for Blackwell too); no
kernel spills registers but those of `KNOWN_SPILLS`.
"""

import json
import re

import pytest
import torch

from dsv4.ops.select import TOPK_CONFIG
from dsv4.testing.bench import case_modules, load_cases
from dsv4.testing.cases.sampling import VOCABULARY
from dsv4.testing.cases.select import VARIANTS
from tools.compiled.compile_check import CompileFailure, reports

SHAPES = {case.key: case.shape for case in load_cases(case_modules())}
CASES = list(SHAPES)
# Cases whose sums are compared below. By default these are compiled, and as few others as launch every kernel with
# every number of warps; `make slow-test` compiles every case, for Blackwell too.
COMPARED = (
    *(f"rms_norm/weighted-{rows}x{width}" for rows in (1, 4096) for width in (4096, 7168)),
    *(f"rms_norm/weighted-4096x{width}" for width in (512, 1024, 1536)),
    *(f"rms_norm_quant/both-{rows}x{width}" for rows in (1, 4096) for width in (4096, 7168)),
    *(f"rms_norm_quant/codes-4096x{width}" for width in (1024, 1536)),
    "rms_norm/plain-4096x512",
    *(f"hc_boundary/{rows}x{width}" for rows in (1, 4096) for width in (4096, 7168)),
    "hc_boundary/codes-1x4096", "hc_boundary/codes-4096x7168", "hc_enter/1x4096",
    "hc_pre/1x4096", "hc_pre/4096x4096", "hc_head_norm/1x4096", "hc_head/1x4096",
    "window_rows/1", "compress/hca-open-1", "compress/hca-prefill-8192",
    "compress_pair/csa-open-1", "compress_pair/csa-prefill-8192",
    "attention_inputs/csa-1-ring", "attention_inputs/hca-16", "attention_inputs/csa-4096",
    *(f"sparse_attention/flash-csa-64k-{rows}" for rows in (8, 64, 256)),
    "sparse_attention/flash-hca-1m-16", "sparse_attention/pro-csa-64k-32",
    "sparse_attention/flash-csa-64k-prefill-8192",
    *(case for case in CASES if case.startswith("sample/") and not SHAPES[case]["variant"]),
)  # fmt: skip
# kernels that may spill: stored and loaded bytes at most, and why
KNOWN_SPILLS = {
    ("_attend_kernel", 90): (100, "many queries: 128 accumulators a thread"),
    ("attend_pairs_kernel", 90): (804, "nearly all of it outside the loop over keys"),
    ("dense_tiles_kernel", 90): (464, "producers and epilogue have 32 registers; MMA warps add ranges once a tile"),
    ("expert_tiles_kernel", 90): (124, "producer and epilogue warps have 32 registers"),
    ("grouped_shuffled_kernel", 90): (16, "256 rows of wo_a: four words"),
    ("_attend_kernel", 100): (16, "a million keys of HCA: four words"),
}


def allowed_spills(kernel, arch):
    return KNOWN_SPILLS.get((kernel, arch), (0, ""))[0]


class Compiled(dict):
    """Reports by case, for one architecture."""

    def __init__(self, arch, *, is_whole):
        super().__init__()
        self.arch, self.is_whole = arch, is_whole
        for report in reports(arch, only=None if is_whole else COMPARED):
            self.setdefault(report.case, []).append(report)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((90, False), id="sm_90"),
        pytest.param((90, True), id="sm_90-every-case", marks=pytest.mark.slow),
        pytest.param((100, True), id="sm_100-every-case", marks=pytest.mark.slow),
    ],
)
def compiled(request):
    """Compiled once: `--dist loadscope` keeps a module in one process."""
    arch, is_whole = request.param
    return Compiled(arch, is_whole=is_whole)


def test_compiles_without_spills(compiled):
    """One list of everything that is wrong."""
    wrong = []
    for case, kernels in compiled.items():
        for kernel in kernels:
            if isinstance(kernel, CompileFailure):
                wrong.append((case, kernel.error))
            elif kernel.spill_bytes > allowed_spills(kernel.kernel, compiled.arch):
                wrong.append((case, kernel.kernel, f"spills {kernel.spill_bytes} bytes"))
            elif not (0 < kernel.registers <= 255 and kernel.shared_bytes <= 227 * 1024):
                wrong.append((case, kernel.kernel, kernel.registers, kernel.shared_bytes))
    assert wrong == []
    assert set(compiled) >= set(CASES if compiled.is_whole else COMPARED)


def test_no_kernel_is_listed_without_need(compiled):
    if not compiled.is_whole:
        return  # only some cases of a kernel spill
    spilling = {kernel.kernel for kernels in compiled.values() for kernel in kernels if kernel.spill_bytes}
    assert {kernel for kernel, known in KNOWN_SPILLS if known == compiled.arch} - spilling == set()


# where products of warp groups are, spills cost most: instructions inside such loops, at most
LOOP_SPILLS = {"_attend_kernel": 10, "attend_pairs_kernel": 70}


def test_next_to_nothing_is_spilled_between_products(compiled):
    """Of attention in pairs of tiles, a form with 80 in the loop of each group was a fifth slower."""
    if compiled.arch != 90:
        return  # no products of warp groups
    kernels = [(case, kernel.kernel, kernel.loop_spills) for case, found in compiled.items() for kernel in found]
    assert [one for one in kernels if one[2] > LOOP_SPILLS.get(one[1], 0)] == []
    assert max(one[2] for one in kernels if one[0] == "sparse_attention/flash-csa-64k-prefill-8192") <= 12


# where a long selection occurs: rows and columns of a case's shape
LONG_ROWS = {
    "topk_select": lambda shape: (shape["rows"], shape["columns"]),
    "index_topk": lambda shape: (shape["requests"] * shape["tokens"], shape["context"] // 4),
    "sampled_logprobs": lambda shape: (shape["rows"], VOCABULARY),
}


def test_programs_that_wait_fit_a_multiprocessor(compiled):
    """All programs of a long selection wait for each other: as many as the launcher counts on must run at once. (Other
    kernels that wait do so for programs that started before.)
    """
    counted = set()
    for case, kernels in compiled.items():
        for kernel in kernels:
            if kernel.kernel != "topk_long_kernel":
                continue
            config = VARIANTS[SHAPES[case].get("variant", "")]
            spread = config.spread(*LONG_ROWS[case.split("/")[0]](SHAPES[case]), torch.device("meta"))
            assert kernel.registers * 32 * kernel.num_warps * spread.resident <= 65536, case
            assert (kernel.shared_bytes + 1024) * spread.resident <= 227 * 1024, case  # 1,024 the system's own
            counted.add(spread.resident)
    assert counted == {1, TOPK_CONFIG.resident} if compiled.is_whole else counted <= {1, TOPK_CONFIG.resident}


def test_norms_that_must_agree_sum_in_the_same_order(compiled):
    """Fused and unfused are the same bits on a GPU only if the sum has the same tile and register layout."""

    def layouts(case):
        (kernel,) = compiled[case]
        assert len(kernel.sum_layouts) == 1
        return kernel.sum_layouts

    for width in (4096, 7168):
        assert layouts(f"rms_norm/weighted-4096x{width}") == layouts(f"rms_norm_quant/both-4096x{width}")
    for width in (1024, 1536):
        assert layouts(f"rms_norm/weighted-4096x{width}") == layouts(f"rms_norm_quant/codes-4096x{width}")


def test_hyper_connections_that_must_agree_sum_in_the_same_order(compiled):
    """Fused or not, for few rows or many: the same sums; the norm behind them is that of the norm's own kernel."""

    def layouts(case):
        (kernel,) = compiled[case]
        return kernel.sum_layouts

    # squares: groups of eight over these lanes, whole or halved in a thread; `_square_sum` adds both in one order
    group = re.compile(r"sizePerThread = \[1, 1, (\d), 4\], threadsPerWarp = \[\d+, (\d+), (\d), 1\]")

    def squares(case):
        found = [group.search(layout) for layout in layouts(case)]
        return [(match[2], int(match[1]) * int(match[3])) for match in found if match]

    def others(case):
        return [layout for layout in layouts(case) if not group.search(layout)]

    for width, lanes in ((4096, "4"), (7168, "8")):
        few, many = f"hc_boundary/1x{width}", f"hc_boundary/4096x{width}"
        assert squares(few) == squares(many) == [(lanes, 2)] * 12
        assert others(few) == others(many)
        assert layouts(few)[-1:] == layouts(f"rms_norm/weighted-1x{width}")
    assert layouts("hc_boundary/1x4096") == layouts("hc_boundary/codes-1x4096") == layouts("hc_enter/1x4096")
    assert layouts("hc_boundary/1x4096")[:-1] == layouts("hc_pre/1x4096")
    assert squares("hc_boundary/4096x4096") == squares("hc_pre/4096x4096")
    assert others("hc_boundary/4096x4096")[:-1] == others("hc_pre/4096x4096")
    assert layouts("hc_boundary/4096x7168") == layouts("hc_boundary/codes-4096x7168")
    assert layouts("hc_head_norm/1x4096")[:-1] == layouts("hc_head/1x4096")


def test_cached_rows_sum_as_the_norm_does(compiled):
    """The number of rows in a tile may differ, what happens inside a row may not."""

    def inside_rows(case):
        pattern = (
            r"x(\d+)xf32 .*sizePerThread = \[1, (\d+)\], threadsPerWarp = \[\d+, (\d+)\], warpsPerCTA = \[\d+, (\d+)\]"
        )
        return [re.search(pattern, layout).groups() for kernel in compiled[case] for layout in kernel.sum_layouts]

    norm = inside_rows("rms_norm/weighted-4096x512")
    assert norm == [("512", "8", "32", "2")]
    for case in ("rms_norm/plain-4096x512", "window_rows/1", "compress/hca-open-1", "compress/hca-prefill-8192"):
        assert inside_rows(case) == norm
    for case in ("compress_pair/csa-open-1", "compress_pair/csa-prefill-8192"):
        assert inside_rows(case) == [*norm, ("128", "8", "16", "1")]
    for case in ("attention_inputs/csa-1-ring", "attention_inputs/hca-16", "attention_inputs/csa-4096"):
        assert inside_rows(case) == [*norm, *norm], "rows, then heads"


def test_attention_sums_weights_in_one_order_by_tiles_and_by_columns(compiled):
    """Keys of a half tile: those of a thread, in the order of its registers, then lanes; halves are added after."""
    if compiled.arch != 90:
        return  # attention by columns and in pairs of tiles is for Hopper
    layout = re.compile(r"64x2x32xf32 .*register = (\[.*?\]\]), lane = (\[.*?\]\])")

    def orders(case):
        found = [layout.search(text) for kernel in compiled[case] for text in kernel.sum_layouts]
        return [
            [[base[2] for base in json.loads(bases) if base[2]] for bases in match.groups()] for match in found if match
        ]

    kernels = {kernel.kernel for kernel in compiled["sparse_attention/flash-csa-64k-64"]}
    assert kernels == {"_qk_softmax_kernel", "_pv_accumulate_kernel"}
    assert orders("sparse_attention/flash-csa-64k-64") == [[[1, 8, 16], [2, 4]]]
    for case in ("flash-csa-64k-8", "flash-csa-64k-256", "flash-hca-1m-16", "pro-csa-64k-32"):
        num_groups = 2 if case == "flash-csa-64k-256" else 1  # in pairs of tiles two groups weigh keys
        assert orders(f"sparse_attention/{case}") == [[[1, 8, 16], [2, 4]]] * num_groups


def test_the_batch_size_does_not_change_the_kernel(compiled):
    for op, shape in (("rms_norm", "weighted-{}x4096"), ("rms_norm_quant", "both-{}x7168")):
        (one,) = compiled[f"{op}/{shape.format(1)}"]
        (many,) = compiled[f"{op}/{shape.format(4096)}"]
        assert (one.registers, one.sum_layouts) == (many.registers, many.sum_layouts)


def test_neither_settings_nor_rows_change_the_kernels_of_a_draw(compiled):
    cases = [case for case in CASES if case.startswith("sample/") and not SHAPES[case]["variant"]]
    found = {(kernel.kernel, kernel.registers, kernel.shared_bytes) for case in cases for kernel in compiled[case]}
    assert sorted(name for name, *_ in found) == ["_draw_kernel", "_narrow_kernel", "_scan_kernel", "_tie_kernel"]
