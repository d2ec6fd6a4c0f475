"""Imports run one way, and the modules that plan and speak without a model do not pull in torch."""

import ast
import fnmatch
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tools.imports import imports_of

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dsv4"

# what each part may import besides itself and the base
BASE = {"config", "request", "replay", "errors", "__version__"}
BELOW_ENGINE = ("loader", "model", "dist", "ops", "cache", "formats")
MAY_IMPORT = {
    "formats": set(),
    "cache": {"formats"},
    "ops": {"cache", "formats"},
    "dist": {"ops", "cache", "formats"},
    "model": {"dist", "ops", "cache", "formats"},
    "hub": set(),
    "loader": {"hub", "model", "ops", "cache", "formats"},
    "text": set(),
    "engine": {"text", *BELOW_ENGINE},
    "llm_input": {"model", "cache", "formats"},
    "llm_inside": {"llm_input", "engine", "model", "cache"},
    "llm_outputs": {"engine", "text", "loader"},
    "llm_start": {"llm_input", "engine", *BELOW_ENGINE},
    "llm": {"llm_inside", "llm_outputs", "llm_input", "llm_start", "text", "engine", *BELOW_ENGINE},
    "async_llm": {"llm", "llm_input", "text", "engine"},
    "rank": {"llm", "dist"},
    "tools": {"hub", "llm", "text", "engine", *BELOW_ENGINE},
    "http": {"tools", "async_llm", "llm", "text", "engine", *BELOW_ENGINE},
    "cli": {"http", "tools", "llm", "text", "engine", *BELOW_ENGINE},
}
# The package's own face and the list of its errors may name everything: both import on demand. `testing` may import
# everything too, and only the self-test imports it.
TOP = {"__init__", "__main__", "errors", "testing"}
SELFTEST = "dsv4.tools.selftest"

TORCH_FREE = [
    "dsv4", "dsv4.errors", "dsv4.config", "dsv4.config.*", "dsv4.request", "dsv4.replay", "dsv4.hub",
    "dsv4.cache.schema", "dsv4.cache.allocator",
    "dsv4.engine.schedule.scheduler", "dsv4.engine.draft.policy", "dsv4.engine.offload.placement",
    "dsv4.tools.plan.plan", "dsv4.dist.shares", "dsv4.dist.messages", "dsv4.engine.ranks.router",
    "dsv4.engine.ranks.remote", "dsv4.engine.serving", "dsv4.dist.mesh", "dsv4.cache.prefix.watch", "dsv4.formats.rows",
    "dsv4.text", "dsv4.text.*",
    "dsv4.engine.link.client", "dsv4.engine.link.connection", "dsv4.engine.link.messages", "dsv4.engine.link.stream",
    "dsv4.engine.link.throughput", "dsv4.cli.serve.*",
]  # fmt: skip
if importlib.util.find_spec("starlette") is not None:  # whatever a front end and the supervisor load
    TORCH_FREE += [
        "dsv4.http.server", "dsv4.http.lifecycle", "dsv4.http.engine_connection", "dsv4.http.telemetry.shared_metrics",
        "dsv4.http.apis.*", "dsv4.http.grammar.answer", "dsv4.http.grammar.structured", "dsv4.http.processes.*",
    ]  # fmt: skip


def module_name(file):
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file): file for file in sorted(PACKAGE.rglob("*.py"))}


def part_of(module):
    """`dsv4.ops.moe` -> `ops`; the package itself -> `__init__`."""
    names = module.split(".")
    return names[1] if len(names) > 1 else "__init__"


def imported_modules(tree, module, is_package):
    """Every dsv4 module an AST imports, wherever in the file the import stands."""
    for target, name in imports_of(tree, module, is_package):
        if target == "dsv4" and name is not None:  # `from dsv4 import llm` names the part after the import
            yield f"dsv4.{name}"
        elif target.split(".")[0] == "dsv4":
            yield target


def wrong_imports(module, source, is_package=False):
    part = part_of(module)
    allowed = BASE if part in BASE else BASE | {part} | MAY_IMPORT.get(part, set())
    if module == SELFTEST or module.startswith(SELFTEST + "."):
        allowed = allowed | {"testing"}
    return [
        target
        for target in imported_modules(ast.parse(source), module, is_package)
        if part not in TOP and part_of(target) not in allowed
    ]


def test_every_part_has_a_rule():
    assert {part_of(module) for module in MODULES} <= set(MAY_IMPORT) | BASE | TOP


def test_imports_run_one_way():
    wrong = [
        f"{module} imports {target}"
        for module, file in MODULES.items()
        for target in wrong_imports(module, file.read_text(encoding="utf-8"), file.name == "__init__.py")
    ]
    assert wrong == []


# what runs on one GPU, and knows nothing of ranks; of ranks themselves only `LLM` and an annotation know
ONE_GPU = ["dsv4.engine.engine", "dsv4.engine.schedule.*", "dsv4.engine.step.*", "dsv4.engine.run.[!p]*"]
KNOW_RANKS = {"dsv4.llm", "dsv4.engine.serving"}


def test_the_engine_of_one_gpu_imports_nothing_of_ranks():
    wrong, found = [], set()
    for module, file in MODULES.items():
        targets = set(imported_modules(ast.parse(file.read_text(encoding="utf-8")), module, file.name == "__init__.py"))
        of_ranks = {target for target in targets if target.startswith("dsv4.engine.ranks")}
        if any(fnmatch.fnmatchcase(module, pattern) for pattern in ONE_GPU):
            found.add(module)
            of_ranks |= {target for target in targets if target.startswith("dsv4.dist")}
        elif module in KNOW_RANKS or module.startswith("dsv4.engine.ranks"):
            continue
        wrong += [f"{module} imports {target}" for target in sorted(of_ranks)]
    assert {"dsv4.engine.engine", "dsv4.engine.run.runner", "dsv4.engine.schedule.scheduler"} <= found
    assert wrong == []


# what each family of ops may import besides itself and lib
FAMILY_MAY_IMPORT = {
    "lib": set(),
    "norm": set(),
    "select": set(),
    "linear": set(),
    "drafting": set(),
    "rows": {"norm"},
    "hyper": {"norm"},
    "moe": {"linear"},
    "router": {"select"},
    "sampling": {"select"},
    "compress": {"norm", "rows"},
    "indexer": {"norm", "rows", "select"},
    "attention": {"norm", "rows", "indexer"},
}
TAKE_FROM_ALL = ("backend", "contracts", "shapes", "torch_library", "compile_only", "compile_workers")


def test_families_of_ops_import_one_way():
    wrong = []
    for module, file in MODULES.items():
        family = module.removeprefix("dsv4.ops.").split(".")[0]
        takes_from_all = family in TAKE_FROM_ALL
        if not module.startswith("dsv4.ops.") or takes_from_all:
            continue
        allowed = FAMILY_MAY_IMPORT[family] | {family, "lib"}
        targets = imported_modules(ast.parse(file.read_text(encoding="utf-8")), module, file.name == "__init__.py")
        for target in targets:
            if target.startswith("dsv4.ops") and "".join(target.split(".")[2:3]) not in allowed:
                wrong.append(f"{module} imports {target}")
    assert wrong == []


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("dsv4.formats.fp8", "from dsv4.cache.batch import TokenBatch", ["dsv4.cache.batch"]),
        ("dsv4.ops.moe", "def f():\n    import dsv4.model.block", ["dsv4.model.block"]),
        ("dsv4.ops.moe", "from ..model import block", ["dsv4.model"]),
        ("dsv4.model.block", "from dsv4 import engine", ["dsv4.engine"]),
        ("dsv4.config", "from dsv4.formats.rows import RowFormat", ["dsv4.formats.rows"]),
        ("dsv4.text.chat", "from dsv4.engine.engine import Engine", ["dsv4.engine.engine"]),
        ("dsv4.engine.engine", "from dsv4.testing.numeric import close", ["dsv4.testing.numeric"]),
        ("dsv4.engine.engine", "from dsv4.loader.weights import load_params", []),
        ("dsv4.cli.main", "from dsv4.llm import LLM\nfrom . import protocol\nimport torch", []),
    ],
)
def test_the_rule_itself(module, source, wrong):
    assert wrong_imports(module, source) == wrong


def torch_free_modules():
    return [module for module in MODULES if any(fnmatch.fnmatchcase(module, pattern) for pattern in TORCH_FREE)]


def test_torch_free_modules_do_not_import_torch():
    modules = torch_free_modules()
    assert {"dsv4.config", "dsv4.config.layers", "dsv4.request", "dsv4.cache.schema", "dsv4.tools.plan.plan"} <= set(
        modules
    )
    program = (
        "import importlib, sys\n"
        "for module in sys.argv[1:]:\n"
        "    importlib.import_module(module)\n"
        "    if 'torch' in sys.modules:\n"
        "        sys.exit(f'{module} imports torch')\n"
    )
    run = subprocess.run([sys.executable, "-c", program, *modules], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_supervisor_and_front_ends_do_without_numpy():
    """It takes a sixth of their memory."""
    pytest.importorskip("starlette")
    imports = "import sys, dsv4.cli.serve.command, dsv4.http.server, dsv4.http.lifecycle, dsv4.text.tokenizer"
    subprocess.run([sys.executable, "-c", f"{imports}; assert 'numpy' not in sys.modules"], cwd=ROOT, check=True)
