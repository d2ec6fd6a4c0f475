"""What test_hopper_forms.py needs a process for in which kernels are compiled, not interpreted: what launchers choose
on Hoppers with fewer multiprocessors than an H200, compiled where an H200 has no such form.

    python hopper_forms_process.py        prints one JSON line
"""

import json
from dataclasses import asdict

import torch
from triton.runtime.jit import JITFunction

from dsv4.ops.indexer.plan import score_config
from dsv4.ops.lib import arch
from dsv4.testing.bench import case_modules, load_cases
from tools.compiled import compile_check

OWN = arch.H200_MULTIPROCESSORS
# few and many tokens of whatever asks for the number of multiprocessors
CASES = (
    *(f"sparse_attention/flash-csa-64k-{queries}" for queries in (1, 64, 256, "prefill-2048")),
    "sparse_attention/flash-hca-64k-64", "sparse_attention/flash-hca-1m-1", "sparse_attention/flash-hca-1m-16",
    *(f"index_topk/{form}" for form in ("1x1-at-65536-fp4", "64x1-at-65536-fp4", "1x2048-at-65536-fp4")),
    *(f"topk_select/512-of-262144x{rows}" for rows in (1, 2, 16, 300)), "topk_select/512-of-2048x256",
    "topk_select/512-of-16384x8",
    "linear/flash-wq_a-1", "linear/flash-wo_b-4096", "linears/flash-csa-in-4096",
    *(f"grouped_linear/flash-wo_a-{tokens}" for tokens in (1, 64, 256, 4096)),
    *(f"moe/flash-nvfp4-{tokens}" for tokens in (1, 64, 4096)), "moe/flash-mxfp4-4096",
)  # fmt: skip


def is_known(value):
    """What a kernel is compiled for, of an argument that is no tensor."""
    return (value == 1, value % 16 == 0) if isinstance(value, int) else None


def form_of(name, args, kwargs):
    tensors = tuple(str(one.dtype) if isinstance(one, torch.Tensor) else is_known(one) for one in args)
    return repr((name, tensors, sorted((key, str(value)) for key, value in kwargs.items())))


def launches(case, known):
    """Kernels of a case, each with its grid and form; `known`: forms that need not be compiled, None: none."""
    found, reports = [], []
    with compile_check.offline(90) as compiled:
        compile_only = JITFunction.run

        def run(self, *args, grid, warmup, **kwargs):
            form = form_of(self.fn.__name__, args, kwargs)
            found.append((self.fn.__name__, [*grid], form))
            if known is not None and form not in known:
                compile_only(self, *args, grid=grid, warmup=warmup, **kwargs)

        JITFunction.run = run
        case.build(torch.device("meta")).call()
        reports += [asdict(compile_check._report(case.key, kernel, 90)) for kernel in compiled]
    return found, reports


def main():
    cases = [case for case in load_cases(case_modules()) if case.key in CASES]
    assert {case.key for case in cases} == set(CASES)
    chips, known = {}, None
    compile_check.make_no_binaries()
    for count in (OWN, 114, 78):
        arch.H200_MULTIPROCESSORS = count
        arch.num_multiprocessors.cache_clear()
        score_config.cache_clear()
        forms, grids, reports = set(), {}, []
        for case in cases:
            found, compiled = launches(case, known)
            grids[case.key] = [(name, grid) for name, grid, _ in found]
            forms |= {form for _, _, form in found}
            reports += compiled
        chips[count] = {"grids": grids, "compiled": reports}
        known = forms | (known or set())
    print(json.dumps(chips))


if __name__ == "__main__":
    main()
