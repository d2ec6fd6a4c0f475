"""An op has one form for few rows and others for many. At shapes nobody chose: a row is the same bits in all of them.

In the interpreter every op with several forms, up to the numbers of rows that it can afford; on a GPU, where the order
of sums is the compiler's, all numbers at which a form changes. What an op writes in place is compared too.
"""

from dataclasses import replace

import pytest
import torch

from dsv4.ops import TRITON
from dsv4.testing.agreement import differing_rows
from dsv4.testing.cases.hyper import make_inputs
from dsv4.testing.inputs import kernel_device
from dsv4.testing.op_call import op_call
from dsv4.testing.random_shapes import FORMS, GPU_LIMITS, SETTINGS, random_call

IS_GPU = kernel_device().type == "cuda"
SEEDS = range(8 if IS_GPU else 1)
MOST = 10 if IS_GPU else 2  # times 128 columns


def cuts_of(limits, num_rows):
    """Up to each limit, and one beyond it; the first row alone, and the last."""
    counts = sorted({count for limit in limits for count in (limit, limit + 1)[: 2 if IS_GPU else 1]})
    return [*(slice(0, count) for count in counts), slice(num_rows - 1, num_rows)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", FORMS)
def test_a_row_is_the_same_in_every_form(name, seed):
    limits = GPU_LIMITS if IS_GPU else FORMS[name].limits
    call = random_call(name, seed, max(limits) + 1, kernel_device(), MOST)
    assert differing_rows(call, TRITON, cuts_of(limits, call.num_rows)) == []


@pytest.mark.parametrize("width", [64, 192, 320, 384, 448, 512, 576, 640, 768, 1024, 1088])
@pytest.mark.skipif(not IS_GPU, reason="needs a GPU: in the interpreter a sum has one order")
def test_hyper_connections_at_every_width(width):
    """At 257 to 1,024 columns few tokens and many once summed their partials in different orders."""
    torch.manual_seed(width)
    x = make_inputs(40, width, kernel_device())
    call = op_call(
        "hc_boundary", **x.streams_arguments, **x.mixing_arguments, norm_weight=x.norm, settings=SETTINGS,
        has_codes=False,
    )  # fmt: skip
    assert differing_rows(call, TRITON, cuts_of((1, 16), 40)) == []


# ---- mistakes that the comparison must see ----


def in_another_order(x, weight, out_dtype=None):
    """Of more than 16 rows K is summed from its other end."""
    if len(x) > 16:
        x, weight = x.flip(1).contiguous(), weight.flip(1).contiguous()
    return TRITON.ops.linear(x, weight, out_dtype)


def split_by_rows(x, weight, out_dtype=None):
    """Up to 16 rows K is summed in two halves, each rounded."""
    if len(x) > 16:
        return TRITON.ops.linear(x, weight, out_dtype)
    half = x.shape[1] // 2
    left, right = x.clone(), x.clone()
    left[:, half:], right[:, :half] = 0, 0
    return TRITON.ops.linear(left, weight, out_dtype) + TRITON.ops.linear(right, weight, out_dtype)


def masked_tail(logits, token_ids, num_top):
    """The last row of a tile that is not full is that of the row before it."""
    found = TRITON.ops.sampled_logprobs(logits, token_ids, num_top)
    if len(logits) % 2:
        return found
    again = TRITON.ops.sampled_logprobs(logits.roll(1, 0), token_ids, num_top)
    return tuple(torch.cat([one[:-1], other[-1:]]) for one, other in zip(found, again, strict=True))


def other_states(attention, index, batch):
    """Alone, a token leaves other scores for the entry that is open."""
    if len(attention.kv) == 1:
        attention = replace(attention, gate=attention.gate + 1)
    return TRITON.ops.compress_pair(attention, index, batch)


@pytest.mark.parametrize(
    ("name", "op", "mistake"),
    [
        ("linear of bf16", "linear", in_another_order),
        ("linear of bf16", "linear", split_by_rows),
        ("sampled_logprobs", "sampled_logprobs", masked_tail),
        ("compress_pair", "compress_pair", other_states),
    ],
)
def test_a_mistake_is_seen(name, op, mistake):
    limits = FORMS[name].limits
    call = random_call(name, 0, max(limits) + 1, kernel_device(), MOST)
    found = differing_rows(call, TRITON.with_ops(**{op: mistake}), cuts_of(limits, call.num_rows))
    assert found
    assert all(line.startswith(f"{op}: ") for line in found)
