"""What holds for every op alike, over its small cases: a row knows nothing of the others and of padding, rows and their
columns may lie apart in memory, no rows are no results, and nothing is written but what an op is there to write.
Batches so large that an op takes another form: test_forms.py.
"""

from functools import cache

import pytest
import torch

from dsv4.formats.trees import map_tensors, tensors_of
from dsv4.ops import TRITON
from dsv4.ops.lib.guard import KernelInputError
from dsv4.testing.agreement import defined_result
from dsv4.testing.bench import case_modules, load_small_cases
from dsv4.testing.inputs import kernel_device, poison, strided
from dsv4.testing.numeric import assert_bitwise
from dsv4.testing.op_call import ROWS, OpCall, rows_of

CASES = {case.key: case for case in load_small_cases(case_modules())}
FIRST = {case.op: key for key, case in reversed(CASES.items())}  # of every op
PLACES = ("experts", "slots", "num_drafts")  # -1: nowhere
DENSE_ROWS = {"moe_shared"}  # a launch of its own takes them as they are
DENSE_COLUMNS = {
    "append_swa", "window_rows", "moe_shared", "index_topk", "tap_streams", "compress_pair", "compress",
    "attention_inputs", "sparse_attention",
}  # fmt: skip


def run(call, function=None):
    """Results of the rows, and what is written that belongs to none of them; by the kernel, or by `function`."""
    result, written = call.run(function or call.kernel(TRITON))
    is_row = {name: name in ROWS[call.op] and isinstance(one, torch.Tensor) for name, one in written.items()}
    state = [
        (getattr(one, "state", one), getattr(one, "pages", ())) for name, one in written.items() if not is_row[name]
    ]
    return [defined_result(call, result), *(one for name, one in written.items() if is_row[name])], state


@cache
def whole(key):
    """A case's call, and what comes of it."""
    torch.manual_seed(1)
    call = CASES[key].build(kernel_device()).op_call
    before = [tensor.clone() for tensor in tensors_of(list(call.arguments.values()))]
    found = run(call.fresh())
    assert_same(list(call.arguments.values()), before, "what is not written")
    return call, *found


def assert_same(found, expected, what):
    found, expected = tensors_of(found), tensors_of(expected)
    assert len(found) == len(expected)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert_bitwise(one, other, f"{what}, {number}")


def pad(call):
    """The first and the last row become padding: NaN, of no slot and of no expert."""
    for name in ROWS[call.op]:
        value = call.arguments.get(name)
        if hasattr(value, "slots"):  # a batch, or rows of sampling
            value.slots[[0, -1]] = -1
            continue
        for tensor in tensors_of((value.kv, value.gate) if hasattr(value, "kv") else value):
            for row in (tensor[:1], tensor[-1:]):
                if tensor.dtype != torch.int64:
                    poison(row)
                elif name in PLACES:
                    row.fill_(-1)


def check_batch(key, kernel=None):
    """The same rows backwards, between padding, have the same bits."""
    call, rows, state = whole(key)
    order = torch.arange(call.num_rows, device=kernel_device()).flip(0)
    padded = call.fresh().of_rows(torch.cat((order[:1], order, order[:1])))
    pad(padded)
    other_rows, other_state = run(padded, kernel)
    assert_same(rows_of(other_rows, slice(1, -1)), rows_of(rows, order), "rows")
    assert_same(other_state, state, "state")


def check_no_rows(key, kernel=None):
    """Results of the same kinds without a row, and nothing is written."""
    call, rows, _ = whole(key)
    before = [tensor.clone() for tensor in tensors_of(list(call.arguments.values()))]
    empty, _ = run(call.of_rows(slice(0, 0)), kernel)
    kinds = [(0, *tensor.shape[1:], tensor.dtype) for tensor in tensors_of(rows)]
    assert [(*tensor.shape, tensor.dtype) for tensor in tensors_of(empty)] == kinds
    assert_same(list(call.arguments.values()), before, "arguments")


def check_view(key, dim, kernel=None):
    """The rows' arguments as views of larger tensors that hold NaN between."""
    (call, rows, state), other = whole(key), whole(key)[0].fresh()
    given = {name: other.arguments[name] for name in ROWS[call.op] if other.arguments.get(name) is not None}
    views = map_tensors(tuple(given.values()), lambda x: strided(x, dim) if x.dim() > -dim else x)
    other_rows, other_state = run(OpCall(call.op, other.arguments | dict(zip(given, views, strict=True))), kernel)
    assert_same(other_rows, rows, "rows")
    assert_same(other_state, state, "state")


def has_several_rows(key):
    call = CASES[key].build(torch.device("cpu")).op_call
    return call.num_rows > 1 and call.has_independent_rows and key != "hc_boundary/70x128"  # which takes too long


@pytest.mark.parametrize("key", [key for key in CASES if has_several_rows(key)])
def test_a_row_does_not_depend_on_the_batch(key):
    check_batch(key)


@pytest.mark.parametrize("op", FIRST)
def test_shapes_and_dtypes_are_the_oracle_s(op):
    call, rows, state = whole(FIRST[op])
    found = tensors_of((rows, state)), tensors_of(run(call.fresh(), call.oracle))
    kernel, oracle = ([(tensor.shape, tensor.dtype) for tensor in tensors] for tensors in found)
    assert kernel == oracle


@pytest.mark.parametrize("op", FIRST)
def test_no_rows(op):
    check_no_rows(FIRST[op])


@pytest.mark.parametrize(("dim", "dense"), [(0, DENSE_ROWS), (-1, DENSE_COLUMNS)], ids=["rows", "columns"])
@pytest.mark.parametrize("op", FIRST)
def test_rows_and_columns_may_lie_apart(op, dim, dense):
    if op in dense:
        with pytest.raises(KernelInputError, match="contiguous"):
            check_view(FIRST[op], dim)
    else:
        check_view(FIRST[op], dim)


def of_a_neighbour(x, weight, eps):
    return TRITON.ops.rms_norm(x.roll(1, 0), weight, eps)


def as_if_dense(x, weight, eps):
    return TRITON.ops.rms_norm(x.as_strided(x.shape, (x.shape[1], 1)), weight, eps)


def never_empty(x, weight, eps):
    return TRITON.ops.rms_norm(torch.cat((x, x.new_zeros(int(not len(x)), x.shape[1]))), weight, eps)


@pytest.mark.parametrize(
    ("check", "mistake"),
    [
        (check_batch, of_a_neighbour),
        (lambda key, wrong: check_view(key, 0, wrong), as_if_dense),
        (check_no_rows, never_empty),
    ],
)
def test_a_mistake_is_seen(check, mistake):
    with pytest.raises(AssertionError):
        check(FIRST["rms_norm"], mistake)
