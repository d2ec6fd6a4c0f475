"""The small kernels of drafting against their oracles, with hostile inputs."""

import itertools

import pytest
import torch

from dsv4.ops.drafting import ACCEPT_ROWS, accept, accept_ref, confidence, confidence_ref, tap_streams, tap_streams_ref
from dsv4.ops.lib.guard import KernelInputError
from dsv4.testing.inputs import around, generator, kernel_device, normal, poison, wild
from dsv4.testing.numeric import assert_bitwise, assert_close_to_oracle

# ---- taps ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [64, 255, 257, 4096])
@pytest.mark.parametrize("rows", around(4))
def test_taps_are_the_oracles_bits(rows, width, dtype):
    streams = wild((rows, 4, width), dtype, seed=rows)
    wide = poison(torch.empty(rows, 3 * width, dtype=dtype, device=streams.device))
    expected = wide.clone()
    tap_streams(streams, wide[:, width : 2 * width])
    tap_streams_ref(streams, expected[:, width : 2 * width])
    assert wide[:, width : 2 * width].isfinite().all()
    assert wide[:, :width].isnan().all()
    assert wide[:, 2 * width :].isnan().all()
    assert_bitwise(wide[:, width : 2 * width].contiguous(), expected[:, width : 2 * width].contiguous())


def test_a_tap_rounds_once_and_keeps_a_nan_in_its_row():
    streams = torch.tensor([1.0, 2.0**-8, 2.0**-8, 2.0**-8], device=kernel_device()).to(torch.bfloat16)
    streams = streams.view(1, 4, 1).repeat(3, 1, 8)
    streams[1, 2, 5] = float("nan")
    out = torch.empty(3, 8, dtype=torch.bfloat16, device=streams.device)
    tap_streams(streams, out)
    assert out[0].unique().item() == torch.tensor((1 + 3 * 2.0**-8) / 4).to(torch.bfloat16).item()
    assert out[1].isnan().nonzero().flatten().tolist() == [5]
    assert_bitwise(out[2], out[0])


def test_taps_that_do_not_fit():
    streams = normal((3, 4, 64))
    for out in (normal((3, 63)), normal((2, 64)), normal((3, 64), torch.float32), normal((64, 3)).t()):
        with pytest.raises(KernelInputError, match=r"expected out \[3, 64\]"):
            tap_streams(streams, out)


# ---- confidence ----


@pytest.mark.parametrize(("rows", "width", "rank"), [(1, 64, 16), (5, 1000, 63), (7, 4096, 256), (3, 7168, 512)])
def test_confidence_follows_the_oracle(rows, width, rank):
    hidden, embedded = normal((rows, width), seed=rows), normal((rows, rank), seed=1)
    weight = (normal((1, width + rank), torch.float32, seed=2) * width**-0.5).to(torch.bfloat16)
    found = confidence(hidden, embedded, weight)
    assert ((found > 0) & (found < 1)).all()

    def oracle(dtype):
        return confidence_ref(hidden.to(dtype), embedded.to(dtype), weight.to(dtype))

    # one value a row, a sum of up to 7,680 products in another order: measured 3.1e-7 of it on an H200
    assert_close_to_oracle(found.unsqueeze(-1), lambda dtype: oracle(dtype).unsqueeze(-1), step=2.0**-22)
    assert_bitwise(confidence(hidden[rows - 1 :], embedded[rows - 1 :], weight), found[rows - 1 :], "alone")


def test_confidence_of_far_scores_and_of_nan():
    hidden = torch.tensor([[1000.0, 0], [-1000.0, 0], [0, 0], [float("nan"), 0]], device=kernel_device())
    embedded, weight = torch.zeros(4, 1, device=kernel_device()), torch.ones(1, 3, device=kernel_device())
    found = confidence(hidden, embedded, weight)
    assert found[:3].tolist() == [1.0, 0.0, 0.5]
    assert found[3].isnan()
    with pytest.raises(KernelInputError, match=r"a weight \[1, 2 \+ r\]"):
        confidence(hidden, embedded, weight[:, :2])


# ---- acceptance ----


def naive(drafts, num_drafts, drawn, position):
    """One request at a time, as one would say it."""
    if num_drafts < 0:
        return 0, position, -1
    count = 0
    while count < num_drafts and drafts[count] == drawn[count] and drafts[count] >= 0:
        count += 1
    return count, position + count + 1, drawn[count]


def assert_accepts(drafts, num_drafts, drawn, positions):
    arguments = [x.to(kernel_device()) for x in (drafts, num_drafts, drawn, positions)]
    expected = [
        naive(*row)
        for row in zip(drafts.tolist(), num_drafts.tolist(), drawn.tolist(), positions.tolist(), strict=True)
    ]
    for op in (accept, accept_ref):
        found = op(*arguments)
        assert list(zip(*(column.tolist() for column in found), strict=True)) == expected, op.__name__


@pytest.mark.parametrize("most", [0, 1, 2, 3])
def test_every_case_of_few_drafts(most):
    """All pairs of drafts and draws over two tokens and none, for every number of drafts and for padding."""
    values = (-1, 4, 7)
    cases = [
        (drafts, count, drawn)
        for drafts in itertools.product(values, repeat=most)
        for drawn in itertools.product(values[1:], repeat=most + 1)
        for count in range(-1, most + 1)
    ]
    drafts = torch.tensor([case[0] for case in cases], dtype=torch.int64).view(len(cases), most)
    drawn = torch.tensor([case[2] for case in cases])
    assert_accepts(drafts, torch.tensor([case[1] for case in cases]), drawn, torch.arange(len(cases)))


@pytest.mark.parametrize("num_requests", around(ACCEPT_ROWS))
def test_rows_around_the_tile(num_requests):
    source = generator(num_requests)
    drafts, drawn = (torch.randint(0, 2, (num_requests, n), generator=source) for n in (5, 6))
    num_drafts = torch.randint(-1, 6, (num_requests,), generator=source)
    positions = torch.randint(0, 1 << 20, (num_requests,), generator=source)
    assert_accepts(drafts, num_drafts, drawn, positions)


def test_a_poisoned_draw_ends_the_run_and_is_handed_on():
    drafts, drawn = torch.tensor([[3, -1, 5]]), torch.tensor([[3, -1, 5, 6]])
    assert_accepts(drafts, torch.tensor([3]), drawn, torch.tensor([10]))
    assert accept_ref(drafts, torch.tensor([3]), drawn, torch.tensor([10])).token_ids.tolist() == [-1]


def test_acceptance_of_what_does_not_fit():
    drafts, drawn, ones = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int64), torch.ones(2)
    device = kernel_device()
    for wrong in ((drafts, ones.long(), drawn[:, :3], ones.long()), (drafts, ones, drawn, ones.long())):
        with pytest.raises(KernelInputError, match=r"expected drafts \[R, k\]"):
            accept(*(x.to(device) for x in wrong))
