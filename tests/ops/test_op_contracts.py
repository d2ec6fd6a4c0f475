"""What holds for every op: kernel and oracle share a signature, and both op sets are complete."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from dataclasses import fields

import pytest

import dsv4.ops
from dsv4.ops import TORCH
from dsv4.ops.triton_set import TRITON

MODULES = [importlib.import_module(f"dsv4.ops.{info.name}") for info in pkgutil.iter_modules(dsv4.ops.__path__)]


def own_functions(module):
    return {name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}


PAIRS = {
    f"{module.__name__}.{name}": (value, own_functions(module)[name.removesuffix("_ref")])
    for module in MODULES
    for name, value in own_functions(module).items()
    if name.endswith("_ref") and name.removesuffix("_ref") in own_functions(module)
}


def test_the_kernels_written_so_far_are_found():
    assert {"dsv4.ops.norm.rms_norm_ref", "dsv4.ops.rope.head_norm_rope_ref", "dsv4.ops.rope.rope_ref"} <= set(PAIRS)


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


def test_kernels_are_in_the_set_of_kernels():
    in_oracles = {getattr(TORCH, field.name): field.name for field in fields(TORCH)}
    for oracle, kernel in PAIRS.values():
        if oracle in in_oracles:
            assert getattr(TRITON, in_oracles[oracle]) is kernel
