"""What holds for every op: oracle, kernel and, where model or engine call it, Protocol share a signature."""

import ast
import inspect
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

import dsv4.ops
from dsv4.ops import TORCH, TRITON, OpSet
from dsv4.testing.op_call import oracles_and_kernels

PAIRS = oracles_and_kernels()


def test_the_kernels_written_so_far_are_found():
    assert {"norm.rms_norm_ref", "rows.window_rows_ref", "rows.rope_ref"} <= set(PAIRS)


@pytest.mark.parametrize("name", PAIRS)
def test_oracle_and_kernel_share_a_signature(name):
    oracle, kernel = PAIRS[name]
    assert inspect.signature(oracle) == inspect.signature(kernel)
    assert all(
        parameter.annotation is not inspect.Parameter.empty
        for parameter in inspect.signature(oracle).parameters.values()
    )


@pytest.mark.parametrize("name", PAIRS)
def test_a_kernel_is_documented(name):
    oracle, kernel = PAIRS[name]
    assert oracle.__doc__
    assert kernel.__doc__


@pytest.mark.parametrize("op", [field.name for field in fields(OpSet)])
def test_a_protocol_has_the_signature_of_oracle_and_kernel(op):
    """And both backends hold the op under its own name."""
    called = inspect.signature(get_type_hints(OpSet)[op].__call__)
    without_self = called.replace(parameters=list(called.parameters.values())[1:])
    oracle, kernel = getattr(TORCH.ops, op), getattr(TRITON.ops, op)
    assert inspect.signature(oracle) == inspect.signature(kernel) == without_self
    assert (oracle.__name__, kernel.__name__) == (f"{op}_ref", op)
    assert (oracle, kernel) in PAIRS.values()


def untyped(source):
    """Names of functions without all annotations, but kernels and their device functions."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or any("jit" in ast.unparse(part) for part in node.decorator_list):
            continue
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        given = [argument for argument in arguments if argument is not None and argument.arg not in ("self", "cls")]
        if node.returns is None or any(argument.annotation is None for argument in given):
            yield node.name


def test_all_but_kernels_is_typed():
    """mypy does not ask for it in `dsv4/ops`, where kernels cannot be (pyproject.toml)."""
    package = Path(dsv4.ops.__file__).parent
    files = [*package.rglob("*.py"), package.parent / "dist" / "symmetric.py"]
    assert [(file.name, name) for file in files for name in untyped(file.read_text(encoding="utf-8"))] == []
    assert list(untyped("@jit\ndef k(x): ...\ndef f(x: int, *rest): ...\ndef g() -> int: ...\n")) == ["f"]
