"""What holds for every op: kernel and oracle share a signature, and both op sets are complete."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest

from dsv4.ops import TORCH
from dsv4.ops.triton_set import TRITON
from dsv4.testing.op_modules import oracles_and_kernels

PAIRS = oracles_and_kernels()


def test_the_kernels_written_so_far_are_found():
    assert {"norm.rms_norm_ref", "rows.head_norm_rope_ref", "rows.rope_ref"} <= set(PAIRS)


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
