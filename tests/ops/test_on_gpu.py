"""What only a GPU can show: capture into CUDA graphs. Rows alone at full size are a part of the self-test."""

from contextlib import contextmanager
from dataclasses import fields, is_dataclass

import pytest
import torch

from dsv4.testing.bench import case_modules, load_cases
from dsv4.testing.numeric import assert_bitwise

pytestmark = pytest.mark.gpu
CASES = {case.key: case for case in load_cases(case_modules())}


def tensors_in(value):
    """Every tensor of a result: a tensor, a tuple, a dataclass, or None."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    if is_dataclass(value):
        return [tensor for field in fields(value) for tensor in tensors_in(getattr(value, field.name))]
    return []


@contextmanager
def new_memory_filled():
    """Inside, `torch.empty` gives NaN or the largest integer: what a call leaves unwritten is the same every time."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # without it the fill, on by default, is not in force
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("key", CASES)
def test_a_replayed_graph_gives_what_a_call_gives(key):
    """What a call allocates and leaves unwritten is filled alike for both; rows it writes into a cache lie in zeros."""
    call = CASES[key].build(torch.device("cuda")).call
    call()  # compiles
    with new_memory_filled():
        called = tensors_in(call())
    expected = [tensor.clone() for tensor in called]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = tensors_in(call())
    assert captured, f"{key}: a case returns what it wrote"
    for before, tensor in zip(called, captured, strict=True):
        if tensor.data_ptr() == before.data_ptr():  # not the call's own, but a cache
            tensor.zero_()
        else:
            with new_memory_filled():
                tensor.copy_(torch.empty_like(tensor))
    graph.replay()
    torch.cuda.synchronize()
    for found, wanted in zip(captured, expected, strict=True):
        assert_bitwise(found, wanted, key)
