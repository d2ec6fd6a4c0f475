"""What there is of ops: the modules of `dsv4.ops`, and every oracle with its kernel."""

import importlib
import pkgutil
from collections.abc import Callable
from types import ModuleType
from typing import Any

import dsv4.ops


def op_modules() -> list[ModuleType]:
    """Every module below `dsv4.ops`, in folders too."""
    names = [info.name for info in pkgutil.walk_packages(dsv4.ops.__path__, "dsv4.ops.")]
    return [importlib.import_module(name) for name in names]


def family_of(module: str) -> str:
    """`dsv4.ops.moe.launch` -> `moe`."""
    return module.split(".")[2]


def oracles_and_kernels() -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """`<op>_ref` and `<op>` where one family defines both, by "family.op_ref"."""
    defined = {
        f"{family_of(module.__name__)}.{name}": value
        for module in op_modules()
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__
    }
    return {
        name: (oracle, defined[name.removesuffix("_ref")])
        for name, oracle in defined.items()
        if name.endswith("_ref") and name.removesuffix("_ref") in defined
    }
