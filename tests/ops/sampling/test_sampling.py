"""Sampling: filters and penalties against a naive row-by-row version, the noise, and independence of the batch."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from sampling_cases import copied, make, make_rows, make_state, random_case, take

from dsv4.ops.sampling import (
    HAS_PENALTIES,
    IN_PROMPT,
    NOTHING_ALLOWED,
    POISONED,
    SamplingState,
    apply_penalties,
    gumbel_noise,
    keep_mask,
    philox,
    resolve_tokens_ref,
    sample_ref,
    sampled_logprobs_ref,
    token_logprobs,
)

INF, NAN = math.inf, math.nan


def draw(logits, *settings):
    """Token ids of rows of logits, one dict of settings each."""
    logits = torch.as_tensor(logits)
    return sample_ref(logits, *make(*settings, vocab_size=logits.shape[1])).tolist()


def filters(*rows):
    """top_k, top_p, min_p of (k, p, m) triples, as `keep_mask` takes them."""
    top_k, top_p, min_p = zip(*rows, strict=True)
    return torch.tensor(top_k), torch.tensor(top_p, dtype=torch.float32), torch.tensor(min_p, dtype=torch.float32)


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
        ([-INF, -INF, -1e30], 2),
        ([2.0, INF, INF], 1),
        ([0.0, -0.0], 0),
        ([7.0], 0),
    ],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_greedy_takes_the_largest_and_the_lower_id_on_a_tie(logits, chosen, seed):
    settings = {"temperature": 0.0, "seeds": seed, "top_p": 0.1, "top_k": 1, "min_p": 1.0}
    assert draw([logits], settings) == [chosen]


@pytest.mark.parametrize("temperature", [0.04, 1e-20, 1e-38, 1e-45, 1e-60])
def test_a_vanishing_temperature_is_greedy(temperature):
    generator = torch.Generator().manual_seed(0)
    # logits at least 1 apart; 1 / 0.04 is more than the noise can bridge (from -2.9 to 17.4)
    logits = torch.stack([torch.randperm(23, generator=generator) for _ in range(64)]).float()
    rows = [{"temperature": temperature, "seeds": seed} for seed in range(64)]
    assert draw(logits, *rows) == logits.argmax(-1).tolist()


def test_temperature_zero_ignores_its_neighbours_noise():
    logits = torch.tensor([[0.0, 1.0, 0.5]]).repeat(64, 1)
    rows = [{"temperature": float(row % 2), "seeds": row} for row in range(64)]
    chosen = draw(logits, *rows)
    assert chosen[0::2] == [1] * 32
    assert set(chosen[1::2]) == {0, 1, 2}


# ---- filters ----


def naive_keep(logits, top_k, top_p, min_p):
    """Ids that may be drawn, by the words of `SamplingParams`; +inf counts as beyond everything."""
    best_first = sorted((i for i, x in enumerate(logits) if x != -INF), key=lambda i: (-logits[i], i))
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
LOGIT = st.sampled_from([-INF, -40.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 3.0, INF])
ROW = st.lists(LOGIT, min_size=8, max_size=8)
SETTINGS = st.tuples(st.integers(0, 9), TOP_P, MIN_P)


@given(st.lists(st.tuples(ROW, SETTINGS), min_size=1, max_size=5))
def test_filters_match_the_naive_version(rows):
    logits = torch.tensor([row for row, _ in rows])
    numbers = logits.double().nan_to_num(nan=-INF, posinf=torch.finfo(torch.float64).max, neginf=-INF)
    keep = keep_mask(numbers, *filters(*(settings for _, settings in rows)))
    for row, (values, settings) in enumerate(rows):
        kept = set(keep[row].nonzero().flatten().tolist())
        possible = {i for i, value in enumerate(values) if value != -INF} or {0}
        assert kept & possible == naive_keep(values, *settings)
    given = [{"top_k": k, "top_p": p, "min_p": m, "seeds": seed} for seed, (_, (k, p, m)) in enumerate(rows)]
    for (values, settings), token_id in zip(rows, draw(logits, *given), strict=True):
        if set(values) == {-INF}:
            assert token_id == NOTHING_ALLOWED
        else:
            assert token_id in naive_keep(values, *settings), "only what the filters keep is ever drawn"


@given(ROW, SETTINGS, st.integers(0, 2**63 - 1), st.integers(0, 2**31))
def test_the_draw_is_the_largest_of_logit_and_noise_among_the_kept(values, settings, seed, step):
    top_k, top_p, min_p = settings
    assume(set(values) != {-INF})
    row = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "seeds": seed, "steps": step}
    noise = gumbel_noise(torch.tensor([seed]), torch.tensor([step]), 8)[0].tolist()
    expected = max(naive_keep(values, *settings), key=lambda i: (values[i] + noise[i], -i))
    if values.count(INF) > 1:  # the noise cannot separate infinities: the lower id
        expected = values.index(INF)
    assert draw([values], row) == [expected]


def test_top_k_of_a_large_tie_keeps_the_lower_ids():
    logits = torch.zeros(1, 5000, dtype=torch.float64)
    logits[0, 4000] = 1.0
    keep = keep_mask(logits, *filters((6, 1.0, 0.0)))
    assert keep[0].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 4000]


# ---- rows without a token ----


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_token(temperature):
    """Poison, nothing allowed by logits, bias, mask or by both together, padding; beside a row that draws."""
    free = {"temperature": temperature, "top_p": 0.5, "min_p": 0.5, "counts": [1, 2, 3]}
    settings = [
        free, free, {**free, "bias": [-INF] * 3}, {**free, "allowed": [False] * 3},
        {**free, "bias": [-INF, 0.0, 0.0], "allowed": [True, False, False]}, free, {**free, "allowed": [False] * 3},
    ]  # fmt: skip
    logits = torch.zeros(8, 3)
    logits[0, 1], logits[1], logits[6, 2], logits[7] = NAN, -INF, NAN, NAN
    state = make_state(settings, 3)
    state.last_tokens.fill_(2)
    rows = make_rows(settings, state, torch.tensor([0, 1, 2, 3, 4, 5, 6, -1]))
    before = copied(state)
    token_ids = sample_ref(logits, rows, state).tolist()
    assert token_ids[5] >= 0
    token_ids[5] = 0
    nothing = NOTHING_ALLOWED
    assert token_ids == [POISONED, nothing, nothing, nothing, nothing, 0, POISONED, -1]
    assert state.last_tokens.tolist()[:5] == [0] * 5
    others = [0, 1, 2, 3, 4, 6]
    assert torch.equal(state.token_counts[others], before.token_counts[others]), "only a draw counts"


def test_a_poisoned_row_is_poisoned_whatever_its_mask_and_bias_say():
    settings = {"bias": [0.0, -INF], "allowed": [True, False]}
    assert draw([[0.0, NAN]], settings) == [POISONED]


# ---- bias, mask, memory ----


def test_bias_and_mask_move_the_draw():
    greedy = {"temperature": 0.0}
    logits = [[1.0, 2.0, 4.0]] * 5
    settings = [
        greedy, {**greedy, "bias": [0.0, 3.0, 0.0]}, {**greedy, "bias": [0.0, 0.0, -INF]},
        {**greedy, "allowed": [True, False, False]},
        {**greedy, "bias": [9.0, 0.0, 0.0], "allowed": [False, True, True]},
    ]  # fmt: skip
    assert draw(logits, *settings) == [2, 1, 1, 0, 2]
    assert draw([[1.0, INF]], {**greedy, "bias": [0.0, -INF]}) == [0], "-inf forbids even infinity"


def test_bias_comes_before_penalties_and_filters_see_the_mask():
    row = {"temperature": 0.0, "bias": [4.0, 0.0], "repetition_penalty": 2.0, "counts": [1, 0]}
    assert draw([[1.0, 3.0]], row) == [1], "(1 + 4) / 2 < 3"
    assert draw([[1.0, 2.0]], row) == [0], "(1 + 4) / 2 > 2"
    allowed = {"top_k": 1, "allowed": [False, True, True]}
    assert set(draw([[9.0, 1.0, 0.0]] * 20, *({**allowed, "seeds": seed} for seed in range(20)))) == {1}


def test_a_mask_of_more_than_one_word():
    logits = torch.zeros(1, 70)
    for token in (0, 31, 32, 63, 64, 69):
        allowed = [other == token for other in range(70)]
        assert draw(logits, {"allowed": allowed}) == [token]


def test_counts_grow_as_tokens_are_drawn():
    """What is kept step by step is what a count over all tokens gives, and a slot without penalties keeps nothing."""
    settings = [
        {"seeds": 5, "frequency_penalty": 0.5, "presence_penalty": 0.2, "repetition_penalty": 1.2, "prompt": [1, 4]},
        {"seeds": 6},
    ]
    state, drawn = make_state(settings, 9), []
    untouched = state.token_counts[1].clone()
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(3))
    for step in range(12):
        recounted = make_state(settings, 9)
        for token_ids in drawn:
            recounted.token_counts[0, token_ids[0]] += 1
        stepped = [{**row, "steps": step} for row in settings]
        rows = make_rows(stepped, state)
        expected = sample_ref(logits, rows, recounted)
        drawn.append(sample_ref(logits, rows, state).tolist())
        assert drawn[-1] == expected.tolist()
        assert state.last_tokens.tolist() == drawn[-1]
    assert torch.equal(state.token_counts[1], untouched)
    counts = torch.bincount(torch.tensor(drawn)[:, 0], minlength=9)
    counts[[1, 4]] |= IN_PROMPT
    assert state.token_counts[0].tolist() == counts.tolist()


def test_an_empty_state_draws_greedily():
    state = SamplingState.empty(3, 5, "cpu")
    rows = make_rows([{}] * 3, state)
    assert sample_ref(torch.eye(3, 5), rows, state).tolist() == [0, 1, 2]


def test_resolve_tokens():
    last = torch.tensor([10, 11, 12])
    token_ids, slots = torch.tensor([-1, 7, 0, -1, -1, 5]), torch.tensor([2, 2, 1, 0, -1, -1])
    assert resolve_tokens_ref(token_ids, slots, last).tolist() == [12, 7, 0, 10, 0, 0]


# ---- penalties ----


@given(
    st.lists(st.sampled_from([-3.0, -0.5, 0.0, 0.25, 2.0, -INF]), min_size=4, max_size=4),
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.lists(st.integers(0, 3), min_size=4, max_size=4),
    st.tuples(st.sampled_from([0.5, 1.0, 1.25]), st.sampled_from([-0.5, 0.0, 2.0]), st.sampled_from([-1.0, 0.0, 0.75])),
)
def test_penalties_match_the_naive_version(values, in_prompt, counts, penalties):
    repetition, presence, frequency = penalties
    words = torch.tensor(counts, dtype=torch.int32) | torch.tensor(in_prompt).int() * IN_PROMPT
    columns = torch.tensor([[repetition, 1.0], [presence, 0.0], [frequency, 0.0]])
    logits = torch.tensor([values, values], dtype=torch.float64)
    expected = []
    for value, prompted, count in zip(values, in_prompt, counts, strict=True):
        if prompted or count:
            value = value / repetition if value > 0 else value * repetition
        value -= frequency * count  # every number here is a short binary fraction: no rounding anywhere
        expected.append(value - presence if count else value)
    penalised = apply_penalties(logits, words.repeat(2, 1), *columns)
    assert penalised[0].tolist() == expected
    assert penalised[1].tolist() == values, "a neighbour's penalties leave a row without any alone"


def test_penalties_move_the_draw():
    row = {"temperature": 0.0, "frequency_penalty": 1.0, "counts": [0, 3, 0]}
    assert draw([[1.0, 3.5, 0.0]], row) == [0]
    assert draw([[1.0, 4.5, 0.0]], row) == [1]
    assert draw([[1.0, 3.5, 0.0]], {**row, "counts": [0, 0, 0], "prompt": [1]}) == [1], "a prompt is not an answer"


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


def draw_many(logits, row, vary):
    """A slot a row, all of the same settings but for one that counts up."""
    settings = [row] * len(logits)
    state = make_state(settings[:1], logits.shape[1])
    state = SamplingState(**{name: column.repeat_interleave(len(logits), 0) for name, column in vars(state).items()})
    rows = make_rows(settings, state)
    if vary == "seeds":
        state.seeds.copy_(torch.arange(len(logits)))
    else:
        rows.positions.copy_(state.prompt_lens - 1 + torch.arange(len(logits)))
    return sample_ref(logits, rows, state).tolist()


@pytest.mark.parametrize("vary", ["seeds", "steps"])
def test_draws_follow_the_probabilities(vary):
    count = 40_000
    logits = PROBABILITIES.log().repeat(count, 1)
    drawn = torch.tensor(draw_many(logits, {"seeds": 3, "steps": 5}, vary))
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
    flattened = PROBABILITIES.sqrt() * torch.tensor([1, 1, 1, 1, 0, 0])  # min_p: 0.06 ** 0.5 < 0.4 * 0.4 ** 0.5
    flattened /= flattened.sum()
    drawn = torch.tensor(draw_many(logits, row, "seeds"))
    assert drawn.max() == 3
    assert is_plausible(chi_square(drawn, flattened[:4]), 4)


# ---- independence of the batch ----


@pytest.mark.parametrize("vocab_size", [5, 37, 128, 1031])
def test_a_row_draws_the_same_whatever_is_beside_it(vocab_size):
    logits, rows, state = random_case(12, vocab_size)
    after = copied(state)
    together = sample_ref(logits, rows, after)
    assert (together >= 0).all()
    logprobs = token_logprobs(logits)

    def draws(which):
        used = copied(state)
        found = sample_ref(logits[which], take(rows, which), used)
        touched = rows.slots[which]
        assert torch.equal(used.token_counts[touched], after.token_counts[touched])
        assert torch.equal(used.last_tokens[touched], after.last_tokens[touched])
        return found

    for row in range(12):
        assert torch.equal(draws(torch.tensor([row])), together[row : row + 1])
    shuffled = torch.randperm(12, generator=torch.Generator().manual_seed(2))
    assert torch.equal(draws(shuffled), together[shuffled])
    for row in range(12):
        assert torch.equal(token_logprobs(logits[row : row + 1])[0], logprobs[row])
    strided = torch.stack([logits, logits], dim=-1)[..., 0]
    assert torch.equal(sample_ref(strided, rows, copied(state)), together)


def test_inputs_are_left_as_they_were():
    logits, rows, state = random_case(4, 9)
    before = logits.clone(), copied(rows), copied(state)
    sample_ref(logits, rows, state)
    assert torch.equal(logits, before[0])
    written = ("last_tokens", "token_counts")
    for found, wanted in ((rows, before[1]), (state, before[2])):
        for name, column in vars(found).items():
            if name not in written and column is not None:
                same = torch.equal(column.nan_to_num(), getattr(wanted, name).nan_to_num())
                assert same, name


@pytest.mark.parametrize("k", [0, 1, 3, 20, 100, 200])
def test_the_likeliest_are_those_of_a_sorted_row(k):
    """Equal ones by their ids, NaN and -inf last, whatever way they are found."""
    few = torch.randn(40, 160).mul(2).round()
    few[::3, ::5], few[1::3, 1::2], few[5], few[6, 0] = float("-inf"), float("nan"), 0.0, float("inf")
    wide = torch.randn(8, 4000)
    for logits in (few, wide, wide.double()):
        rows = [
            sorted(range(len(row)), key=lambda place: (-row[place], place))[:k]
            for row in logits.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf")).tolist()
        ]
        assert sampled_logprobs_ref(logits, torch.zeros(len(logits), dtype=torch.int64), k)[1].tolist() == rows


def test_log_probabilities_of_no_token():
    logits = torch.tensor([[0.0, 1.0, 0.0], [NAN, 0.0, 0.0], [2.0, 1.0, 0.0]])
    chosen, top_ids, top = sampled_logprobs_ref(logits, torch.tensor([-2, -1, 0]), 2)
    assert chosen[:2].isnan().all()
    assert chosen[2].isfinite()
    assert top_ids[0].tolist() == [1, 0]
    assert top[0].isfinite().all()
    assert top[1].isnan().all()


def test_log_probabilities_are_the_models_own():
    logits = torch.tensor([[0.0, math.log(3.0), -INF], [1000.0, 1000.0, 1000.0]])
    probabilities = token_logprobs(logits).exp()
    assert token_logprobs(logits).dtype == torch.float32
    expected = torch.tensor([[1 / 4, 3 / 4, 0.0], [1 / 3, 1 / 3, 1 / 3]])
    # one rounding of the logarithm to fp32 each
    assert ((probabilities - expected).abs() <= 2 * torch.finfo(torch.float32).eps).all()


@pytest.mark.parametrize("num_drafts", [0, 1, 2, 5])
def test_drafts_count_as_if_they_had_been_drawn(num_drafts):
    """Penalties see the slot's tokens and the row's drafts; what a slot remembers does not change."""
    logits, rows, state = random_case(8, 40)
    drafts = torch.randint(0, 40, (8, num_drafts), generator=torch.Generator().manual_seed(2))
    drafts[3, num_drafts // 2 :] = -1
    told = copied(state)
    for slot, row in enumerate(drafts.tolist()):
        for token in row:
            if token >= 0 and told.flags[slot] & HAS_PENALTIES:
                told.token_counts[slot, token] += 1
    expected, before = sample_ref(logits, rows, told), copied(state)
    found = sample_ref(logits, replace(rows, drafts=drafts), state)
    assert torch.equal(found, expected)
    assert torch.equal(state.token_counts, before.token_counts)
    assert torch.equal(state.last_tokens, before.last_tokens)
