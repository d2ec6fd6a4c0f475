"""What only a GPU can show: capture into CUDA graphs, and batch invariance at full size."""

from contextlib import contextmanager
from dataclasses import fields, is_dataclass

import pytest
import torch

from dsv4.ops.norm import rms_norm, rms_norm_quant
from dsv4.ops.rows import rope, rope_frequencies
from dsv4.testing.bench import case_modules, load_cases
from dsv4.testing.inputs import normal, wild
from dsv4.testing.numeric import assert_bitwise

pytestmark = pytest.mark.gpu
EPS = 1e-6
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


@pytest.mark.parametrize("width", [512, 1536, 4096, 7168])
def test_a_norm_of_4096_rows_is_4096_norms_of_one(width):
    x, weight = wild((4096, width), seed=width), normal((width,), seed=1)
    whole, quant = rms_norm_quant(x, weight, EPS, True)
    for row in (0, 1, 2047, 4095):
        single, single_quant = rms_norm_quant(x[row : row + 1], weight, EPS, True)
        assert_bitwise(single[0], whole[row])
        assert_bitwise(single_quant.codes[0], quant.codes[row])


@pytest.mark.parametrize("heads", [64, 128])
def test_4096_tokens_of_heads_are_4096_times_one(heads):
    q = wild((4096, heads, 512), seed=heads)
    positions = torch.arange(4096, device=q.device) * 255
    freqs = rope_frequencies(64, 10000.0, None).to(q.device)
    whole = rope(rms_norm(q, None, EPS), positions, freqs)
    for token in (0, 1, 2047, 4095):
        one = slice(token, token + 1)
        assert_bitwise(rope(rms_norm(q[one], None, EPS), positions[one], freqs), whole[one])
