"""Sampling: filters and penalties against a naive row-by-row version, the noise, and independence of the batch."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4.ops.sampling import (
    SamplingBatch,
    apply_penalties,
    gumbel_noise,
    keep_mask,
    philox,
    sample_ref,
    token_logprobs,
)

INF, NAN = math.inf, math.nan
REALS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
       "frequency_penalty": 0.0, "seeds": 0, "steps": 0}  # fmt: skip


def make_batch(*rows, prompt_mask=None, output_counts=None):
    """One dict of settings per row; what a row leaves out is off."""
    columns = {
        name: torch.tensor(
            [{**OFF, **row}[name] for row in rows], dtype=torch.float32 if name in REALS else torch.int64
        )
        for name in OFF
    }
    return SamplingBatch(**columns, prompt_mask=prompt_mask, output_counts=output_counts)


def take(batch, rows):
    """The batch of some rows."""
    picked = {spec.name: getattr(batch, spec.name) for spec in fields(batch)}
    return SamplingBatch(**{name: None if column is None else column[rows] for name, column in picked.items()})


def same_bits(left, right):
    return torch.equal(left.contiguous().view(torch.int64), right.contiguous().view(torch.int64))


# ---- greedy ----


@pytest.mark.parametrize(
    ("logits", "chosen"),
    [
        ([1.0, 3.0, 2.0], 1),
        ([3.0, 3.0, 3.0], 0),
        ([1.0, 3.0, 3.0], 1),
        ([-INF, -5.0, -INF], 1),
        ([NAN, -5.0, NAN], 1),
        ([NAN, -INF, -1e30], 2),
        ([2.0, INF, INF], 1),
        ([0.0, -0.0], 0),
        ([7.0], 0),
    ],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_greedy_takes_the_largest_and_the_lower_id_on_a_tie(logits, chosen, seed):
    batch = make_batch({"temperature": 0.0, "seeds": seed, "top_p": 0.1, "top_k": 1, "min_p": 1.0})
    assert sample_ref(torch.tensor([logits]), batch).tolist() == [chosen]


@pytest.mark.parametrize("temperature", [0.04, 1e-20, 1e-38, 1e-45, 1e-60])
def test_a_vanishing_temperature_is_greedy(temperature):
    generator = torch.Generator().manual_seed(0)
    # logits at least 1 apart; 1 / 0.04 is more than the noise can bridge (from -2.9 to 17.4)
    logits = torch.stack([torch.randperm(23, generator=generator) for _ in range(64)]).float()
    rows = [{"temperature": temperature, "seeds": seed} for seed in range(64)]
    assert torch.equal(sample_ref(logits, make_batch(*rows)), logits.argmax(-1))


def test_temperature_zero_ignores_its_neighbours_noise():
    logits = torch.tensor([[0.0, 1.0, 0.5]]).repeat(64, 1)
    rows = [{"temperature": float(row % 2), "seeds": row} for row in range(64)]
    chosen = sample_ref(logits, make_batch(*rows))
    assert chosen[0::2].tolist() == [1] * 32
    assert set(chosen[1::2].tolist()) == {0, 1, 2}


# ---- filters ----


def naive_keep(logits, top_k, top_p, min_p):
    """Ids that may be drawn, by the words of `SamplingParams`; NaN counts as -inf, +inf as beyond everything."""
    best_first = sorted(
        (i for i, x in enumerate(logits) if not math.isnan(x) and x != -INF), key=lambda i: (-logits[i], i)
    )
    if not best_first:
        return {0}
    best_first = best_first[: top_k or None]
    top = logits[best_first[0]]
    weights = [1.0 if logits[i] == top else math.exp(logits[i] - top) if top != INF else 0.0 for i in best_first]
    total = math.fsum(weights)
    kept, reached = set(), 0.0
    for token_id, weight in zip(best_first, weights, strict=True):
        if reached >= top_p and top_p < 1:
            break
        reached += weight / total
        if weight >= min_p * weights[0]:
            kept.add(token_id)
    return kept


# No sum of up to 8 equal probabilities, nor exp of a multiple of 1/2, falls on any of these, so rounding cannot decide.
TOP_P = st.sampled_from([1e-6, 0.1, 0.3, 0.35, 0.62, 0.9, 0.97, 1.0])
MIN_P = st.sampled_from([0.0, 1e-6, 0.05, 0.2, 0.4, 0.7, 1.0])
LOGIT = st.sampled_from([-INF, -40.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 3.0, NAN, INF])
ROW = st.lists(LOGIT, min_size=8, max_size=8)
SETTINGS = st.tuples(st.integers(0, 9), TOP_P, MIN_P)


@given(st.lists(st.tuples(ROW, SETTINGS), min_size=1, max_size=5))
def test_filters_match_the_naive_version(rows):
    batch = make_batch(*({"top_k": k, "top_p": p, "min_p": m} for _, (k, p, m) in rows))
    logits = torch.tensor([row for row, _ in rows])
    numbers = logits.double().nan_to_num(nan=-INF, posinf=torch.finfo(torch.float64).max, neginf=-INF)
    keep = keep_mask(numbers, batch)
    for row, (values, settings) in enumerate(rows):
        kept = set(keep[row].nonzero().flatten().tolist())
        possible = {i for i, value in enumerate(values) if not math.isnan(value) and value != -INF} or {0}
        assert kept & possible == naive_keep(values, *settings)
    drawn = sample_ref(logits, replace(batch, seeds=torch.arange(len(rows))))
    for (values, settings), token_id in zip(rows, drawn.tolist(), strict=True):
        assert token_id in naive_keep(values, *settings), "only what the filters keep is ever drawn, and never NaN"


@given(ROW, SETTINGS, st.integers(0, 2**63 - 1), st.integers(0, 2**31))
def test_the_draw_is_the_largest_of_logit_and_noise_among_the_kept(values, settings, seed, step):
    top_k, top_p, min_p = settings
    row = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "seeds": seed, "steps": step}
    noise = gumbel_noise(torch.tensor([seed]), torch.tensor([step]), 8)[0].tolist()
    expected = max(naive_keep(values, *settings), key=lambda i: (values[i] + noise[i], -i))
    if values.count(INF) > 1:  # the noise cannot separate infinities: the lower id
        expected = values.index(INF)
    assert sample_ref(torch.tensor([values]), make_batch(row)).tolist() == [expected]


def test_top_k_of_a_large_tie_keeps_the_lower_ids():
    logits = torch.zeros(1, 5000, dtype=torch.float64)
    logits[0, 4000] = 1.0
    keep = keep_mask(logits, make_batch({"top_k": 6}))
    assert keep[0].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 4000]


def test_a_row_without_any_number_still_gives_a_token():
    logits = torch.tensor([[NAN, NAN], [-INF, -INF], [NAN, -INF]])
    for temperature in (0.0, 1.0):
        batch = make_batch(*[{"temperature": temperature, "top_p": 0.5, "min_p": 0.5}] * 3)
        assert sample_ref(logits, batch).tolist() == [0, 0, 0]


# ---- penalties ----


@given(
    st.lists(st.sampled_from([-3.0, -0.5, 0.0, 0.25, 2.0, -INF]), min_size=4, max_size=4),
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.lists(st.integers(0, 3), min_size=4, max_size=4),
    st.tuples(st.sampled_from([0.5, 1.0, 1.25]), st.sampled_from([-0.5, 0.0, 2.0]), st.sampled_from([-1.0, 0.0, 0.75])),
)
def test_penalties_match_the_naive_version(values, in_prompt, counts, penalties):
    repetition, presence, frequency = penalties
    row = {"repetition_penalty": repetition, "presence_penalty": presence, "frequency_penalty": frequency}
    batch = make_batch(
        row, {}, prompt_mask=torch.tensor([in_prompt] * 2), output_counts=torch.tensor([counts] * 2, dtype=torch.int32)
    )
    logits = torch.tensor([values, values], dtype=torch.float64)
    expected = []
    for value, prompted, count in zip(values, in_prompt, counts, strict=True):
        if prompted or count:
            value = value / repetition if value > 0 else value * repetition
        value -= frequency * count  # every number here is a short binary fraction: no rounding anywhere
        expected.append(value - presence if count else value)
    penalised = apply_penalties(logits, batch)
    assert penalised[0].tolist() == expected
    assert penalised[1].tolist() == values, "a neighbour's penalties leave a row without any alone"


def test_no_counts_no_penalty():
    logits = torch.randn(2, 5, dtype=torch.float64)
    assert apply_penalties(logits, make_batch({"repetition_penalty": 2.0}, {"presence_penalty": 1.0})) is logits


def test_penalties_move_the_draw():
    counts = torch.tensor([[0, 3, 0]], dtype=torch.int32)
    batch = make_batch(
        {"temperature": 0.0, "frequency_penalty": 1.0},
        prompt_mask=torch.zeros(1, 3, dtype=torch.bool),
        output_counts=counts,
    )
    assert sample_ref(torch.tensor([[1.0, 3.5, 0.0]]), batch).tolist() == [0]
    assert sample_ref(torch.tensor([[1.0, 4.5, 0.0]]), batch).tolist() == [1]


# ---- noise ----


def words(hexadecimal):
    return [int(word, 16) for word in hexadecimal.split()]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known answers published with Random123
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_known_answers(counter, key, expected):
    low, high = words(key)
    seed = low | high << 32
    seed -= (seed >> 63) << 64  # the same 64 bits as an int64
    out = philox(torch.tensor(seed), [torch.tensor(word) for word in words(counter)])
    assert [int(word) for word in out] == words(expected)


def test_philox_agrees_with_triton():
    triton = pytest.importorskip("triton")
    import triton.language as tl

    @triton.jit
    def kernel(out_ptr, seed, offset, SIZE: tl.constexpr):
        lanes = tl.arange(0, SIZE)
        tl.store(out_ptr + lanes, tl.randint(seed, offset + lanes))

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for seed, offset in [(0, 0), (12345, 1000), (2**62 + 17, 129280)]:
        out = torch.zeros(64, dtype=torch.int32, device=device)
        kernel[(1,)](out, seed, offset, SIZE=64)
        zero = torch.tensor(0)
        ours = philox(torch.tensor(seed), [torch.arange(offset, offset + 64), zero, zero, zero])[0]
        assert torch.equal(out.cpu().long() & 0xFFFFFFFF, ours)


def test_noise_is_gumbel_and_finite():
    noise = gumbel_noise(torch.arange(200), torch.zeros(200, dtype=torch.int64), 500)
    assert noise.isfinite().all()
    count = noise.numel()
    assert abs(noise.mean().item() - 0.5772156649) < 6 * math.sqrt(math.pi**2 / 6 / count), "mean: Euler's constant"
    uniform = torch.exp(-torch.exp(-noise)).flatten().sort().values
    steps = torch.arange(1, count + 1, dtype=torch.float64) / count
    assert (uniform - steps).abs().max() < 2.5 / math.sqrt(count), "Kolmogorov-Smirnov"


def test_every_seed_and_every_step_has_its_own_noise():
    seeds = torch.tensor([0, 1, 2, 2**31, 2**32, 2**33, 2**62, 2**63 - 1])
    by_seed = gumbel_noise(seeds, torch.zeros(8, dtype=torch.int64), 16)
    by_step = gumbel_noise(torch.full((6,), 7), torch.tensor([0, 1, 2, 1000, 2**31, 2**32 - 1]), 16)
    for noise in (by_seed, by_step):
        assert len({tuple(row.tolist()) for row in noise}) == len(noise)
        assert len(set(noise.flatten().tolist())) == noise.numel()


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 7, 8, 9, 31, 257])
def test_noise_does_not_depend_on_its_place_in_the_tensor(vocab_size):
    seeds, steps = torch.arange(13) * 7919, torch.arange(13)
    together = gumbel_noise(seeds, steps, vocab_size)
    for row in range(13):
        assert same_bits(together[row : row + 1], gumbel_noise(seeds[row : row + 1], steps[row : row + 1], vocab_size))
    wider = gumbel_noise(seeds, steps, vocab_size + 5)
    assert same_bits(wider[:, :vocab_size], together), "a token's noise does not depend on the vocabulary's size"
    assert same_bits(together, together.float().double()), "rounded, so that the last bits of a logarithm do not count"


# ---- distribution ----

PROBABILITIES = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.06, 0.04], dtype=torch.float64)


def chi_square(token_ids, probabilities):
    expected = probabilities * len(token_ids)
    observed = torch.bincount(token_ids, minlength=len(probabilities)).double()
    return ((observed - expected) ** 2 / expected).sum().item()


def is_plausible(statistic, num_outcomes):
    """Within six standard deviations of the mean of the chi-square distribution."""
    freedom = num_outcomes - 1
    return statistic < freedom + 6 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("vary", ["seeds", "steps"])
def test_draws_follow_the_probabilities(vary):
    count = 40_000
    logits = PROBABILITIES.log().repeat(count, 1)
    batch = take(make_batch({"seeds": 3, "steps": 5}), torch.zeros(count, dtype=torch.int64))
    drawn = sample_ref(logits, replace(batch, **{vary: torch.arange(count)}))
    assert is_plausible(chi_square(drawn, PROBABILITIES), 6)
    for biased in (
        torch.softmax(PROBABILITIES.log() / 1.08, -1),
        PROBABILITIES + torch.tensor([-1, 1, 0, 0, 0, 0]) * 0.02,
    ):
        assert not is_plausible(chi_square(drawn, biased), 6), "the statistic tells a biased sampler apart"


def test_draws_follow_temperature_and_filters():
    count = 40_000
    logits = PROBABILITIES.log().repeat(count, 1)
    row = {"temperature": 2.0, "top_k": 5, "min_p": 0.4}
    batch = replace(take(make_batch(row), torch.zeros(count, dtype=torch.int64)), seeds=torch.arange(count))
    flattened = PROBABILITIES.sqrt() * torch.tensor([1, 1, 1, 1, 0, 0])  # min_p: 0.06 ** 0.5 < 0.4 * 0.4 ** 0.5
    flattened /= flattened.sum()
    drawn = sample_ref(logits, batch)
    assert drawn.max() == 3
    assert is_plausible(chi_square(drawn, flattened[:4]), 4)


# ---- independence of the batch ----


def random_rows(count, vocab_size):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(count, vocab_size, generator=generator) * 3
    rows = [
        {"temperature": (0.0, 0.7, 1.0, 1.9)[row % 4], "top_k": (0, 3, 40)[row % 3], "seeds": row * 1000003,
         "top_p": (1.0, 0.9, 0.5)[row // 2 % 3], "min_p": (0.0, 0.02)[row // 3 % 2],
         "repetition_penalty": (1.0, 1.3)[row % 2],
         "presence_penalty": 0.3 * (row % 3), "frequency_penalty": -0.2 * (row % 5), "steps": row}
        for row in range(count)
    ]  # fmt: skip
    mask = torch.rand(count, vocab_size, generator=generator) < 0.3
    counts = torch.randint(0, 3, (count, vocab_size), generator=generator, dtype=torch.int32)
    return logits, make_batch(*rows, prompt_mask=mask, output_counts=counts)


@pytest.mark.parametrize("vocab_size", [5, 37, 128, 1031])
def test_a_row_draws_the_same_whatever_is_beside_it(vocab_size):
    logits, batch = random_rows(12, vocab_size)
    together = sample_ref(logits, batch)
    logprobs = token_logprobs(logits)
    alone = torch.cat([sample_ref(logits[row : row + 1], take(batch, slice(row, row + 1))) for row in range(12)])
    assert torch.equal(alone, together)
    shuffled = torch.randperm(12, generator=torch.Generator().manual_seed(2))
    assert torch.equal(sample_ref(logits[shuffled], take(batch, shuffled)), together[shuffled])
    repeated = torch.arange(12).repeat(7)
    assert torch.equal(sample_ref(logits[repeated], take(batch, repeated)), together[repeated])
    for row in range(12):
        assert torch.equal(token_logprobs(logits[row : row + 1])[0], logprobs[row])
    strided = torch.stack([logits, logits], dim=-1)[..., 0]
    assert torch.equal(sample_ref(strided, batch), together)


def test_inputs_are_left_as_they_were():
    logits, batch = random_rows(4, 9)
    before = logits.clone(), batch.prompt_mask.clone(), batch.output_counts.clone()
    sample_ref(logits, batch)
    assert torch.equal(logits, before[0])
    assert torch.equal(batch.prompt_mask, before[1])
    assert torch.equal(batch.output_counts, before[2])


def test_log_probabilities_are_the_models_own():
    logits = torch.tensor([[0.0, math.log(3.0), -INF], [1000.0, 1000.0, 1000.0]])
    probabilities = token_logprobs(logits).exp()
    assert token_logprobs(logits).dtype == torch.float32
    expected = torch.tensor([[1 / 4, 3 / 4, 0.0], [1 / 3, 1 / 3, 1 / 3]])
    # one rounding of the logarithm to fp32 each
    assert ((probabilities - expected).abs() <= 2 * torch.finfo(torch.float32).eps).all()
