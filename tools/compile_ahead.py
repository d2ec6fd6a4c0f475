"""Kernels compiled on a machine without a GPU, for one that has it, whatever its Python and its build of Triton.

    python tools/compile_ahead.py cases FOLDER [--op OP ...]      what benchmark cases launch
    python tools/compile_ahead.py models FOLDER NUMBER            what `benchmarks bits --models NUMBER` launches
    python -m pytest -p tools.compile_ahead --compile-into FOLDER [--compile-on meta] ...      what tests launch
    dsv4 kernels pack FILE --cache FOLDER                         binaries alone, without what they were made from
    dsv4 kernels unpack FILE                                      on that machine, into Triton's cache

A GPU by the minute should run kernels, not wait for compilers: with them along, a run that compares bits and times of
some kernels takes a minute instead of ten. What is missing is compiled there, as always.

Tests run with launches that compile for Hopper and do nothing, and comparisons that pass; what a test asserts itself
may fail, and ends it there. `--compile-on meta` is for tests at real sizes: their tensors have no memory.

Triton names a kernel's folder by a hash of its own files and of the kernel. The second part is written down here, so
that another Triton of the same version finds the folder under its own name.
"""

import argparse
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from dsv4.tools.kernel_archive import KEYS, folder_name

ARCHITECTURE = 90


def record_into(folder: Path) -> None:
    """Triton's cache is `folder` from now on, and the kernels' own parts of names are written down in it."""
    from triton import knobs
    from triton.compiler import compiler
    from triton.runtime import cache

    folder.mkdir(parents=True, exist_ok=True)
    knobs.cache.dir = str(folder.resolve())
    seen = set()

    def key(source: Any, backend: Any, options: Any, env_vars: Any) -> str:
        own = f"-{source.hash()}-{backend.hash()}-{options.hash()}-{sorted(env_vars.items())}"
        name = folder_name(own)
        if name not in seen:
            seen.add(name)
            with (folder / KEYS).open("a", encoding="utf-8") as file:
                file.write(json.dumps([name, own]) + "\n")
        return cache.triton_key() + own

    compiler.get_cache_key = key


def compile_cases(folder: Path, ops: list[str]) -> None:
    import torch

    from dsv4.testing.bench import case_modules, load_cases
    from tools.compiled.compile_check import offline

    record_into(folder)
    cases = [case for case in load_cases(case_modules()) if not ops or case.key.split("/")[0] in ops]
    for number, case in enumerate(cases):
        print(f"{number + 1} of {len(cases)}: {case.key}", flush=True)
        with suppress(Exception), offline(ARCHITECTURE):  # what does not compile says so when it is run
            case.build(torch.device("meta")).call()


def compile_models(folder: Path, number: int) -> None:
    import torch

    from benchmarks.kernels.bits import num_tokens
    from dsv4.ops import TRITON
    from dsv4.testing import model_cuts
    from dsv4.testing.random_shapes import FAMILY, random_model
    from tools.compiled.compile_check import offline

    record_into(folder)
    with offline(ARCHITECTURE):
        pass  # its driver stays
    for first in range(0, number, FAMILY):
        family = range(first, min(first + FAMILY, number))
        device = torch.device("cpu")
        models = [model_cuts.CutModel.random(random_model(one), num_tokens(one), TRITON, device) for one in family]
        model_cuts.compile_models(models, lambda done, total: print(f"\r{done} of {total}", end="", flush=True))
        print(f": models {family[0]} to {family[-1]}", flush=True)


# ---- as a plugin of pytest ----


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--compile-into", metavar="FOLDER", help="compile what tests launch, and run nothing")
    parser.addoption("--compile-on", choices=("cpu", "meta"), default="cpu", help="where tests then have their tensors")


def pytest_load_initial_conftests(early_config: Any) -> None:
    """Before tests/conftest.py, which would choose the interpreter."""
    options = early_config.known_args_namespace
    if options.compile_into is not None:
        _only_compile(Path(options.compile_into), options.compile_on)


def _only_compile(folder: Path, device: str) -> None:
    import torch
    import torch.fx.experimental._config as meta_config
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from dsv4.ops.lib import guard
    from dsv4.testing import inputs, interpreter, numeric
    from tools.compiled import compile_check

    record_into(folder)
    run, is_true = JITFunction.run, torch.Tensor.__bool__

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        with suppress(Exception):
            run(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = compile_only
    driver.set_active(compile_check.OfflineDriver(ARCHITECTURE))
    guard.LAUNCH_DEVICES = frozenset({"cuda", "cpu", "meta"})
    interpreter.without_gpu = lambda: False
    inputs.kernel_device = lambda: torch.device(device)
    inputs.elementwise_block = lambda: 1024
    for name in [name for name in vars(numeric) if name.startswith("assert_")]:
        setattr(numeric, name, lambda *args, **kwargs: None)
    meta_config.meta_nonzero_assume_all_nonzero = True
    torch.Tensor.__bool__ = lambda tensor: tensor.device.type == "meta" or is_true(tensor)  # type: ignore[method-assign,assignment]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    cases = commands.add_parser("cases", help="compile what benchmark cases launch")
    cases.add_argument("folder", type=Path)
    cases.add_argument("--op", action="append", default=[], help="only cases of this op; may be repeated")
    models = commands.add_parser("models", help="compile what random models launch")
    models.add_argument("folder", type=Path)
    models.add_argument("number", type=int)
    options = parser.parse_args()
    if options.command == "cases":
        compile_cases(options.folder, options.op)
    else:
        compile_models(options.folder, options.number)


if __name__ == "__main__":
    main()
