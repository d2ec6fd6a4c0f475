"""Digests of what ops compute: so that a change of bits between two commits is seen without looking for it.

Inputs of a case are drawn from a seed of its own, so they are the same in every run with one version of torch on one
kind of device. The sum that a digest is made of is one of integers, taken where the tensor lies: of gigabytes a few
numbers travel.
"""

import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4.ops import TRITON
from dsv4.testing.agreement import defined_result
from dsv4.testing.bench import BenchCase
from dsv4.testing.numeric import bits_of

_PART = 1 << 24  # elements that are summed at once
_ODD = 0x5851F42D4C957F2D  # spreads the places of elements over 64 bits


def seeded(case: BenchCase) -> None:
    """Before `case.build`."""
    torch.manual_seed(zlib.crc32(case.key.encode()))


def digest_of_case(case: BenchCase, device: torch.device, *, is_oracle: bool = False) -> str:
    """Of what a case's kernels compute, or its op's oracle; of a case that is no op, of its call."""
    seeded(case)
    work = case.build(device)
    if work.op_call is None:
        return digest(work.defined(work.call()))
    call = work.op_call.fresh()
    result, written = call.run(call.oracle if is_oracle else call.kernel(TRITON))
    return digest(defined_result(call, result), written)


def digest(*values: Any) -> str:
    """Of every tensor in them: type, shape and bits."""
    state = hashlib.sha256()
    for tensor in _tensors(values):
        state.update(f"{tensor.dtype} {tuple(tensor.shape)} {_sum(tensor)};".encode())
    return state.hexdigest()[:16]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for name in sorted(value):
            yield from _tensors(value[name])
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))


def _sum(tensor: Tensor) -> list[int]:
    """Elements as integers, each times an odd number of its place, and their squares too."""
    flat = bits_of(tensor.detach()).flatten()
    totals = [0, 0]
    for first in range(0, flat.numel(), _PART):
        part = flat[first : first + _PART].to(torch.int64)
        places = (torch.arange(first, first + part.numel(), device=part.device) * 2 + 1) * _ODD
        mixed = (part + places) * places
        totals[0] += int(mixed.sum())
        totals[1] += int((mixed ^ (mixed >> 29)).mul_(_ODD).sum())
    return [total & (1 << 64) - 1 for total in totals]
