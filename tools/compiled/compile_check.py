"""Compiles kernels for GPUs that are not there, with the launch configurations really used, and reports what ptxas
made.

A benchmark case is built on the "meta" device and called. Its launchers run as they are; Triton's own JIT derives
types, alignment and options from their arguments, and compiles for the given architecture instead of launching. So
nothing is written twice, and what is checked is what runs. Every distinct kernel is reported once per case that uses
it. Reports are kept on disk by the content of all that they depend on: a module's by its sources and compilers, and
what ptxas says by the PTX; PTX by Triton's own cache. So a changed module compiles and assembles changed kernels
only. Failures are not kept.

    python -m tools.compiled.compile_check 90 --only rms_norm/weighted-1x4096 dsv4.testing.cases.norm

prints JSON lines; `--help` says what may be left out.

It runs in a process of its own, because TRITON_INTERPRET must not be set, and because kernels are assembled once, by
`_assemble`: Triton makes no binary there, and has another cache. `reports()` starts one.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib import metadata
from multiprocessing import get_context
from typing import Any

import torch

from dsv4.errors import Dsv4Error
from dsv4.ops.compile_only import launches_only_compile
from dsv4.ops.lib.assembler import ptxas_version
from dsv4.testing.bench import ROOT, BenchCase, case_modules, load_cases
from tools.compiled.disk_cache import DiskCache, content_key
from tools.imports import ImportGraph

CACHE = DiskCache(ROOT / ".pytest_cache" / "compile")  # `make clean` removes it


class CompileError(Dsv4Error, ValueError):
    """The check could not run, or a kernel did not compile."""


@dataclass(frozen=True)
class CompileReport:
    """One kernel as one case launches it on one architecture. Bytes of spills, shared memory and stack.

    `loop_spills`: instructions that spill or bring back what was spilled inside innermost loops with products of warp
    groups, where they cost most: a kernel that has all of shared memory has no cache for them.
    `sum_layouts`: shape and register layout of every floating sum. They decide its order: two kernels that must agree
    bit for bit need the same.
    """

    case: str
    kernel: str
    arch: int
    target: str
    num_warps: int
    registers: int
    spill_bytes: int
    loop_spills: int
    stack_bytes: int
    shared_bytes: int
    uses_wgmma: bool
    uses_tcgen05: bool
    uses_tma: bool
    uses_cp_async: bool
    sum_layouts: list[str]


@dataclass(frozen=True)
class CompileFailure:
    """A case that did not compile, and why."""

    case: str
    arch: int
    error: str


def reports(
    arch: int, modules: list[str] | None = None, *, only: Iterable[str] | None = None
) -> list[CompileReport | CompileFailure]:  # fmt: skip
    """Compile the cases of the modules for an architecture, each module in a fresh process, on all cores.

    only: these cases, and as few others as launch every kernel with every number of warps; None compiles every case.
    """
    names = None if only is None else tuple(sorted(only))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(partial(_module_reports, arch, names), modules or case_modules())
    return [report for part in found for report in part]


def _module_reports(arch: int, only: tuple[str, ...] | None, module: str) -> list[CompileReport | CompileFailure]:
    key = content_key(_key_of_module(arch, module), json.dumps(only))
    kept = CACHE.read(key)
    lines = _compiled_lines(arch, module, only) if kept is None else json.loads(kept)
    if kept is None and not any("error" in line for line in lines):
        CACHE.write(key, json.dumps(lines))
    return [CompileFailure(**line) if "error" in line else CompileReport(**line) for line in lines]


def _key_of_module(arch: int, module: str) -> str:
    """All that the reports of a module can depend on: the sources it leads to, and the compilers."""
    files = ImportGraph(ROOT).files([module, __name__])
    sources = [
        part for file in sorted(files) for part in (str(file.relative_to(ROOT)), file.read_text(encoding="utf-8"))
    ]
    versions = [metadata.version(name) for name in ("torch", "triton")]
    return content_key(sys.version, *versions, str(arch), ptxas_version(arch), *sources)


def _compiled_lines(arch: int, module: str, only: tuple[str, ...] | None) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    choice = [] if only is None else ["--only", ",".join(only)]
    command = [sys.executable, "-m", "tools.compiled.compile_check", str(arch), *choice, module]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if run.returncode:
        raise CompileError(f"the compile check of {module} failed:\n{run.stdout[-4000:]}\n{run.stderr[-4000:]}")
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]  # Triton prints too


def compile_case(case: BenchCase, arch: int) -> list[CompileReport]:
    """Reports of the kernels that one case launches."""
    with offline(arch) as compiled:
        case.build(torch.device("meta")).call()
    if not compiled:
        raise CompileError(f"{case.key} launched no kernel")
    unique = {id(kernel): kernel for kernel in compiled}
    return [_report(case.key, kernel, arch) for kernel in unique.values()]


def precompile(keys: list[str], arch: int) -> None:
    """Compile cases for `arch` into Triton's disk cache, where a run on such a GPU then finds them. On all cores: for a
    process that will time many cases and should not wait for each."""
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        list(pool.map(_precompile_case, keys, [arch] * len(keys)))


def _precompile_case(key: str, arch: int) -> None:
    case = next(case for case in load_cases(case_modules()) if case.key == key)
    with suppress(Exception), offline(arch):  # what does not compile says so when it is run
        case.build(torch.device("meta")).call()


class OfflineDriver:
    """Answers what the JIT asks a driver. The architecture serves as device number, so that caches stay apart."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)


@contextmanager
def offline(arch: int) -> Iterator[list[Any]]:
    """Inside, launches on "meta" tensors compile for `arch` and append the compiled kernel to the list."""
    from triton.runtime import driver

    with launches_only_compile() as compiled:
        driver.set_active(OfflineDriver(arch))  # it stays: there may be no other, and this process launches nothing
        yield compiled


def _report(case: str, kernel: Any, arch: int) -> CompileReport:
    ptx: str = kernel.asm["ptx"]
    if is_only_a_trap(ptx):
        # Triton says nothing: it puts a trap where a kernel needs more than the chip has
        columns = getattr(kernel.metadata, "tmem_size", None)
        raise CompileError(f"{kernel.metadata.name} became a bare trap; columns of tensor memory: {columns} of 512")
    _check_launcher(kernel)
    target, log = _assemble(ptx, arch, kernel.metadata.enable_fp_fusion)
    return CompileReport(
        case=case,
        kernel=kernel.metadata.name,
        arch=arch,
        target=target,
        num_warps=kernel.metadata.num_warps,
        registers=_number(r"Used (\d+) registers", log),
        spill_bytes=_number(r"(\d+) bytes spill stores", log) + _number(r"(\d+) bytes spill loads", log),
        loop_spills=_number(r"(\d+) spills in loops of products", log),
        stack_bytes=_number(r"(\d+) bytes stack frame", log),
        shared_bytes=kernel.metadata.shared,
        uses_wgmma="wgmma.mma_async" in ptx,
        uses_tcgen05="tcgen05.mma" in ptx,
        uses_tma="cp.async.bulk.tensor" in ptx,
        uses_cp_async=re.search(r"cp\.async\.c[ag]", ptx) is not None,
        sum_layouts=_sum_layouts(kernel.asm["ttgir"]),
    )


def _check_launcher(kernel: Any) -> None:
    """Triton up to 3.7 cannot launch a kernel with a tensor descriptor inside a tuple, and says so when it does."""

    def has_descriptor(types: Any) -> bool:
        return any(map(has_descriptor, types)) if isinstance(types, tuple) else str(types).startswith("tensordesc")

    if any(has_descriptor(types) for types in kernel.src.signature.values() if isinstance(types, tuple)):
        raise CompileError(f"{kernel.metadata.name} is given a tensor descriptor inside a tuple")


def is_only_a_trap(ptx: str) -> bool:
    """PTX of a kernel that cannot end but by a trap."""
    return re.search(r"\btrap;", ptx) is not None and re.search(r"\b(ret|exit);", ptx) is None


def _sum_layouts(ttgir: str) -> list[str]:
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", ttgir, re.MULTILINE))
    # "tt.reduce"(%x) <{axis = 1 : i32}> ({ ... arith.addf ... }) : (tensor<8x512xf32, #blocked>) -> ...
    # or, where the operand is itself a reduction's result, tensor<32xf32, #ttg.slice<{dim = 0, parent = #blocked}>>
    reduce = re.compile(r'"tt\.reduce"\(.*?\}\) : \(tensor<([^,]*), (#.*?)>\) ->', re.DOTALL)

    def spelled_out(layout: str) -> str:
        return re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), layout)

    return [f"{match[1]} {spelled_out(match[2])}" for match in reduce.finditer(ttgir) if "arith.addf" in match[0]]


@cache
def _assemble(ptx: str, arch: int, has_fusion: bool) -> tuple[str, str]:
    """Target name, and what ptxas says with -v: Triton's cache keeps the binary but not this."""
    from triton.backends.nvidia.compiler import get_ptxas

    match = re.search(r"\.target (\w+)", ptx)
    assert match is not None, "PTX without a target"
    key = content_key("log, spills in loops", ptx, str(has_fusion), str(arch), ptxas_version(arch))
    kept = CACHE.read(key)
    if kept is not None:
        return match[1], kept
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "kernel.ptx")
        with open(source, "w", encoding="utf-8") as file:
            file.write(ptx)
        fusion = [] if has_fusion else ["--fmad=false"]
        output = os.path.join(folder, "kernel.cubin")
        command = [get_ptxas(arch).path, "-v", *fusion, f"--gpu-name={match[1]}", source, "-o", output]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            raise CompileError(f"ptxas failed: {run.stderr}")
        has_spills = _number(r"(\d+) bytes spill stores", run.stderr) > 0
        log = f"{run.stderr}\n{_loop_spills(output) if has_spills else 0} spills in loops of products\n"
    CACHE.write(key, log)
    return match[1], log


def _loop_spills(binary: str) -> int:
    """See `CompileReport`."""
    from triton import knobs

    command = [knobs.nvidia.cuobjdump.path, "-sass", binary]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);", listing)
    code = {int(address, 16): instruction for address, instruction in found}
    branches = ((address, re.search(r"\bBRA\b.* 0x([0-9a-f]+)", text)) for address, text in code.items())
    loops = [(int(match[1], 16), address) for address, match in branches if match and int(match[1], 16) < address]
    total = 0
    for first, last in loops:
        body = [text for address, text in code.items() if first <= address <= last]
        holds_another = any(first <= other[0] and other[1] <= last and other != (first, last) for other in loops)
        if "HGMMA" in " ".join(body) and not holds_another:
            total += sum(re.search(r"\b(LDL|STL)\b", text) is not None for text in body)
    return total


def _number(pattern: str, log: str) -> int:
    match = re.search(pattern, log)
    if match is None:
        raise CompileError(f"expected {pattern!r} in what ptxas printed, found:\n{log}")
    return int(match[1])


def covering(cases: Sequence[BenchCase], arch: int, only: Collection[str]) -> list[BenchCase]:
    """The cases named in `only`, and in their order the others that launch a kernel, or a number of warps, that no case
    before them launches."""
    chosen: list[BenchCase] = []
    seen: set[tuple[str, Any]] = set()
    for case in sorted(cases, key=lambda case: case.key not in only):
        launched = _launched(case, arch)
        if case.key in only or not launched <= seen:
            chosen.append(case)
            seen |= launched
    return chosen


def _launched(case: BenchCase, arch: int) -> set[tuple[str, Any]]:
    """Kernels by name and number of warps, as the case would launch them; nothing is compiled."""
    from triton.runtime.jit import JITFunction

    found: set[tuple[str, Any]] = set()
    run = JITFunction.run
    JITFunction.run = lambda self, *args, **kwargs: found.add((self.fn.__name__, kwargs.get("num_warps")))
    try:
        with offline(arch):
            case.build(torch.device("meta")).call()
    except Exception:  # compiling it will say why
        found.add((case.key, None))
    finally:
        JITFunction.run = run
    return found


def asked_for(arguments: Sequence[str] | None = None) -> Namespace:
    parser = ArgumentParser(
        prog="python -m tools.compiled.compile_check",
        description="Compiles kernels as benchmark cases launch them; prints registers and spills as JSON lines.",
    )
    parser.add_argument("arch", metavar="ARCH", type=int, help="90 is Hopper, 100 Blackwell")
    parser.add_argument("modules", metavar="MODULE", nargs="*", help="default: all modules of dsv4/testing/cases")
    parser.add_argument(
        "--only", metavar="CASE,...", type=lambda names: names.split(","),
        help="these cases, and as few others as launch every kernel with every number of warps",
    )  # fmt: skip
    return parser.parse_intermixed_args(arguments)


def main(arch: int, modules: list[str], only: list[str] | None) -> None:
    cases = load_cases(modules or case_modules())
    make_no_binaries()
    for case in cases if only is None else covering(cases, arch, only):
        try:
            results: list[Any] = list(compile_case(case, arch))
        except Exception as error:  # whatever a compiler raises belongs to this case, and the others go on
            results = [CompileFailure(case.key, arch, f"{type(error).__name__}: {error}")]
        for result in results:
            print(json.dumps(asdict(result)))


def make_no_binaries() -> None:
    """From now on Triton stops at PTX in this process, with a cache of its own that all such processes share."""
    from triton import knobs
    from triton.backends.nvidia.compiler import CUDABackend

    knobs.cache.dir = str(CACHE.folder / "triton")
    CUDABackend.make_cubin = lambda self, *arguments: b""


if __name__ == "__main__":
    main(**vars(asked_for()))
