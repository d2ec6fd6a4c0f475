"""The sampling kernels draw the oracle's tokens: every filter, hostile logits, any division of the work, any batch."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from test_sampling import make_batch, random_rows, take

from dsv4.ops.lib.guard import KernelInputError, jit, tl
from dsv4.ops.sampling import (
    SampleConfig,
    SamplingBatch,
    gumbel_noise,
    launch_sample,
    sample,
    sample_ref,
    sampled_logprobs,
    sampled_logprobs_ref,
)
from dsv4.ops.sampling.kernel_sample import MAX_LISTED, NOISE_BLOCK, gumbel
from dsv4.testing.inputs import generator, kernel_device, strided, transposed
from dsv4.testing.numeric import assert_bitwise, assert_close_to_oracle

INF, NAN = float("inf"), float("nan")
SMALL = SampleConfig(tile=128)


def on_device(batch):
    columns = {spec.name: getattr(batch, spec.name) for spec in fields(batch)}
    moved = {name: None if column is None else column.to(kernel_device()) for name, column in columns.items()}
    return SamplingBatch(**moved)


def assert_draws(logits, batch, config=SMALL):
    """The oracle runs on the CPU, where the tests of the oracle ran. None of the draws here is a near-tie."""
    found = launch_sample(logits.to(kernel_device()), on_device(batch), config)
    assert_bitwise(found.cpu(), sample_ref(logits, batch), "token ids")
    return found


@jit
def _noise_kernel(seeds_ptr, steps_ptr, out_ptr, BLOCK: tl.constexpr):
    row, block = tl.program_id(0), tl.program_id(1)
    n0, n1, n2, n3 = gumbel(tl.load(seeds_ptr + row), tl.load(steps_ptr + row), block)
    places = out_ptr + (row * tl.num_programs(1) + block) * (4 * BLOCK) + tl.arange(0, BLOCK)
    tl.store(places, n0)
    tl.store(places + BLOCK, n1)
    tl.store(places + 2 * BLOCK, n2)
    tl.store(places + 3 * BLOCK, n3)


def test_noise():
    seeds = torch.tensor([0, 1, 2**31, 2**32 + 5, 2**63 - 1])
    steps = torch.tensor([0, 2**31, 2**32 - 1, 2**40 + 3, 7])
    device = kernel_device()
    out = torch.empty(5, 8 * NOISE_BLOCK, dtype=torch.float32, device=device)
    _noise_kernel[(5, 2)](seeds.to(device), steps.to(device), out, BLOCK=NOISE_BLOCK, enable_fp_fusion=False)
    exact = gumbel_noise(seeds, steps, 8 * NOISE_BLOCK)
    assert_close_to_oracle(out.cpu(), lambda dtype: exact.to(dtype))


@pytest.mark.parametrize("vocab_size", [1, 37, 129])
def test_everything_at_once(vocab_size):
    assert_draws(*random_rows(6, vocab_size))


def test_many_chunks_and_tiles():
    logits, batch = random_rows(3, 300)
    whole = assert_draws(logits, batch)
    assert_bitwise(assert_draws(logits, batch, SampleConfig(tile=64, max_chunks=2)), whole)


FILTERS = [
    {"top_p": 0.5}, {"top_p": 0.95}, {"top_p": 1e-6}, {"top_p": 0.999999}, {"top_k": 1}, {"top_k": 7}, {"top_k": 99},
    {"top_k": 100}, {"min_p": 0.3}, {"min_p": 1.0}, {"top_k": 20, "top_p": 0.9},
    {"top_k": 5, "top_p": 0.99, "min_p": 0.1},
]  # fmt: skip


@pytest.mark.parametrize("spread", [0.0, 0.01, 10.0])
def test_filters(spread):
    """Rows of a hundred tokens: equal, within one bucket, widely spread. Halves make ties."""
    logits = torch.randn(12, 100, generator=generator(1)) * spread
    logits[::2] = (logits[::2] * 2).round() / 2
    rows = [{**row, "seeds": seed, "steps": 3 * seed} for seed, row in enumerate(FILTERS)]
    assert_draws(logits, make_batch(*rows))


def test_the_boundary_of_a_filter():
    """Equal tokens, of which a filter keeps some: only those are drawn, and each of them is."""
    logits = torch.zeros(16, 16)
    kept = torch.arange(16) % 3 * 2 + 2
    by_count = [{"top_k": int(count), "seeds": row} for row, count in enumerate(kept[:8])]
    # top_p * 16 lies between count - 1 and count
    by_mass = [{"top_p": (int(count) - 0.5) / 16, "seeds": row + 8} for row, count in enumerate(kept[8:])]
    found = assert_draws(logits, make_batch(*by_count, *by_mass))
    assert (found.cpu() < kept).all()
    assert (found.cpu() == kept - 1).any()


def test_more_equal_tokens_than_the_list_holds():
    logits = torch.zeros(2, MAX_LISTED + 500)
    logits[0, 4000] = 1.0
    logits[1] = torch.randn(logits.shape[1], generator=generator(2)) * 1e-3
    rows = [{"top_k": 4300, "seeds": 5}, {"top_p": 0.5, "seeds": 6}]
    assert_draws(logits, make_batch(*rows), SampleConfig(tile=4096))


def test_hostile_logits():
    logits = torch.randn(14, 40, generator=generator(3))
    logits[0:2] = NAN
    logits[2:4] = -INF
    logits[4:6, ::3] = NAN
    logits[4:6, 1::3] = -INF
    logits[6:8, [5, 9]] = INF
    logits[8, 3], logits[9, 3] = 3e38, -3e38
    logits[10:12] *= 1e30
    rows = [
        {"temperature": (0.0, 0.8)[row % 2], "seeds": row, "top_p": (0.7, 1.0)[row // 2 % 2], "top_k": 9 * (row % 3)}
        for row in range(14)
    ]
    rows[12] = {"temperature": 1e-45, "top_p": 0.9}
    rows[13] = {"temperature": 1e-20, "top_k": 3}
    assert_draws(logits, make_batch(*rows))


def test_dtypes_and_strides():
    logits, batch = random_rows(2, 70)
    device_batch = on_device(batch)
    expected = launch_sample(logits.to(kernel_device()), device_batch, SMALL)
    for view in (lambda x: strided(x, 0), transposed):
        odd = replace(
            device_batch, prompt_mask=transposed(device_batch.prompt_mask), seeds=strided(device_batch.seeds, 0)
        )
        assert_bitwise(launch_sample(view(logits.to(kernel_device())), odd, SMALL), expected)
    assert_draws(logits.bfloat16(), batch)
    assert_draws(logits.double(), batch)


def test_a_row_does_not_depend_on_the_batch():
    logits, batch = random_rows(5, 90)
    whole = assert_draws(logits, batch)
    order = torch.tensor([3, 0, 4])
    assert_bitwise(assert_draws(logits[order], take(batch, order)), whole[order.to(whole.device)])
    assert_bitwise(assert_draws(logits[1:2], take(batch, slice(1, 2))), whole[1:2])


def test_without_penalties_and_zero_rows():
    logits, batch = random_rows(4, 50)
    plain = replace(batch, prompt_mask=None, output_counts=None)
    assert_draws(logits, plain)
    empty = sample(logits[:0].to(kernel_device()), on_device(take(batch, slice(0, 0))))
    assert empty.shape == (0,)
    assert empty.dtype == torch.int64


def assert_log_probabilities(logits, token_ids, num_top, given=None):
    """The oracle's ids; its numbers by the rule for float ops where they are finite, else the same."""
    device = kernel_device()
    given = logits if given is None else given
    found = [part.cpu() for part in sampled_logprobs(given.to(device), token_ids.to(device), num_top)]
    expected = sampled_logprobs_ref(logits, token_ids, num_top)
    exact = torch.log_softmax(logits.double(), -1)
    assert_bitwise(found[1], expected[1], "top ids")
    for part, ids in ((0, token_ids.unsqueeze(-1)), (2, expected[1])):
        values, wide = found[part].reshape(ids.shape), exact.gather(-1, ids)
        is_finite = wide.isfinite()
        assert_bitwise(values[~is_finite], wide[~is_finite].float(), "infinite or absent")
        assert_close_to_oracle(values[is_finite], lambda dtype, x=wide[is_finite]: x.to(dtype), "log-probabilities")
    return found


@pytest.mark.parametrize(("vocab_size", "num_top"), [(1, 1), (50, 0), (2049, 5), (30, 40)])
def test_log_probabilities(vocab_size, num_top):
    logits = torch.randn(4, vocab_size, generator=generator(4)) * 8
    logits[1] = logits[1].round()
    logits[2, ::2] = -INF
    token_ids = torch.arange(4) % vocab_size
    whole = assert_log_probabilities(logits, token_ids, num_top)
    for left, right in zip(assert_log_probabilities(logits[1:2], token_ids[1:2], num_top), whole, strict=True):
        assert_bitwise(left, right[1:2], "a row alone")


def test_a_wrong_log_probability_is_noticed():
    logits = torch.randn(3, 40, generator=generator(5))
    shifted = logits.clone()
    shifted[:, 7] += 0.01
    with pytest.raises(AssertionError, match="log-probabilities"):
        assert_log_probabilities(logits, torch.zeros(3, dtype=torch.int64), 0, given=shifted)


def test_log_probabilities_without_a_value():
    logits = torch.zeros(4, 20)
    logits[0, 3], logits[1, 3], logits[2] = NAN, INF, -INF
    token_ids = torch.zeros(4, dtype=torch.int64)
    found = assert_log_probabilities(logits, token_ids, 2)
    assert found[0][:3].isnan().all()
    assert found[0][3].isfinite()


def test_rejects():
    logits, batch = random_rows(2, 10)
    logits, batch = logits.to(kernel_device()), on_device(batch)
    for changed, part in [
        ({"top_k": batch.top_k.int()}, "top_k: expected torch.int64"),
        ({"seeds": batch.seeds[:1]}, r"seeds: expected torch.int64 \(2,\)"),
        ({"output_counts": batch.output_counts[:, :9]}, r"output_counts: .*found torch.int32 \(2, 9\)"),
    ]:
        with pytest.raises(KernelInputError, match=part):
            sample(logits, replace(batch, **changed))
    with pytest.raises(KernelInputError, match="2.18"):
        sample(torch.empty(2, 1 << 18, device=logits.device), batch)


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [0.0, 0.3, 4.0])
def test_full_size(spread):
    logits, batch = random_rows(24, 129280)
    logits = logits / 3 * spread
    batch = replace(batch, top_p=torch.linspace(0.3, 1.0, 24), top_k=torch.arange(24) % 4 * 400)
    found = sample(logits.cuda(), on_device(batch))
    assert_bitwise(found.cpu(), sample_ref(logits, batch))
    one = on_device(take(batch, slice(3, 4)))
    assert_bitwise(sample(logits[3:4].cuda(), one), found[3:4])
    assert_log_probabilities(logits, found.cpu(), 20)
