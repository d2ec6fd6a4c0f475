"""The sampling kernels draw the oracle's tokens and leave the oracle's state: every mixture of settings, hostile logits
and state, any division of the work, any batch.
"""

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from sampling_cases import OFF, copied, make, make_rows, make_state, random_case, take

from dsv4.ops.lib.guard import KernelInputError, jit, tl
from dsv4.ops.sampling import (
    NOTHING_ALLOWED,
    SAMPLE_CONFIG,
    SampleConfig,
    gumbel_noise,
    launch_sample,
    resolve_tokens,
    resolve_tokens_ref,
    sample,
    sample_ref,
    sampled_logprobs,
    sampled_logprobs_ref,
)
from dsv4.ops.sampling.kernel_draw import gumbel
from dsv4.ops.sampling.kernel_row import NOISE_BLOCK, TILE
from dsv4.testing.inputs import generator, kernel_device, poison, strided, transposed
from dsv4.testing.numeric import assert_bitwise, assert_close_to_oracle

INF, NAN = float("inf"), float("nan")


def assert_draws(logits, rows, state, config=SAMPLE_CONFIG):
    """Tokens and all that is written. The oracle runs on the CPU, where the tests of the oracle ran. None of the draws
    here is a near-tie."""
    device, used, expected = kernel_device(), copied(state, kernel_device()), copied(state)
    found = launch_sample(logits.to(device), copied(rows, device), used, config)
    assert_bitwise(found.cpu(), sample_ref(logits, rows, expected), "token ids")
    for spec in fields(used):
        left, right = getattr(used, spec.name).cpu(), getattr(expected, spec.name)
        assert torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)), spec.name
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
    assert_draws(*random_case(6, vocab_size))


CHANGED = {"temperature": 0.25, "top_k": 1, "top_p": 0.25, "min_p": 0.5, "repetition_penalty": 4.0,
           "presence_penalty": 2.0, "frequency_penalty": 2.0, "seeds": 1000}  # fmt: skip


@pytest.mark.parametrize("name", OFF)
def test_every_setting_alone_changes_draws(name):
    """And as it does in the oracle: a setting that a kernel does not read is found here by its name."""
    logits = torch.randn(16, 37, generator=generator(5)) * 2
    rows = [{"seeds": seed, "counts": [0, 1, 3] * 12 + [0], "prompt": list(range(0, 37, 5))} for seed in range(16)]
    without = assert_draws(logits, *make(*rows, vocab_size=37))
    found = assert_draws(logits, *make(*({**row, name: CHANGED[name]} for row in rows), vocab_size=37))
    assert (found != without).any()


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_drafts_before_a_row(num_drafts):
    """Several rows of a slot, some with fewer drafts than others; the state stays as it is."""
    logits, rows, state = random_case(6, 37)
    drafts = torch.randint(0, 37, (6, num_drafts), generator=generator(3))
    drafts[4, 1:] = -1
    rows = take(replace(rows, drafts=drafts), torch.tensor([0, 1, 1, 3, 4, 5]))
    assert_draws(logits, rows, state)


@pytest.mark.parametrize("vocab_size", [TILE - 1, TILE, TILE + 1])
def test_one_off_a_tile(vocab_size):
    assert_draws(*random_case(3, vocab_size))


def test_many_chunks():
    logits, rows, state = random_case(3, 3 * TILE + 5)
    logits[2] = (logits[2] * 2).round() / 2  # ties across chunks
    whole = assert_draws(logits, rows, state)
    for config in (SampleConfig(max_chunks=2), SampleConfig(programs=1)):
        assert_bitwise(assert_draws(logits, rows, state, config), whole)


FILTERS = [
    {"top_p": 0.5}, {"top_p": 0.95}, {"top_p": 1e-6}, {"top_p": 0.999999}, {"top_k": 1}, {"top_k": 7}, {"top_k": 99},
    {"top_k": 100}, {"min_p": 0.3}, {"min_p": 1.0}, {"top_k": 20, "top_p": 0.9},
    {"top_k": 5, "top_p": 0.99, "min_p": 0.1},
]  # fmt: skip


@pytest.mark.parametrize("spread", [0.0, 0.01, 10.0])
def test_filters(spread):
    """Rows of a hundred tokens: equal, close together, widely spread. Halves make ties."""
    logits = torch.randn(12, 100, generator=generator(1)) * spread
    logits[::2] = (logits[::2] * 2).round() / 2
    asked = [{**row, "seeds": seed, "steps": 3 * seed} for seed, row in enumerate(FILTERS)]
    assert_draws(logits, *make(*asked, vocab_size=100))


def test_the_boundary_of_a_filter():
    """Equal tokens, of which a filter keeps some: only those are drawn, and each of them is."""
    logits = torch.zeros(16, 16)
    kept = torch.arange(16) % 3 * 2 + 2
    by_count = [{"top_k": int(count), "seeds": row} for row, count in enumerate(kept[:8])]
    # top_p * 16 lies between count - 1 and count
    by_mass = [{"top_p": (int(count) - 0.5) / 16, "seeds": row + 8} for row, count in enumerate(kept[8:])]
    found = assert_draws(logits, *make(*by_count, *by_mass, vocab_size=16))
    assert (found.cpu() < kept).all()
    assert (found.cpu() == kept - 1).any()


def rows_without_hold(vocab_size):
    """Rows in which a search finds nothing to hold on to, by name."""
    noise = torch.randn(vocab_size, generator=generator(2))
    tokens = torch.arange(vocab_size)
    one_hot = torch.zeros(vocab_size)
    one_hot[vocab_size // 2] = 3.0
    # one value further away at every byte, the others together at the end
    nested = torch.full((vocab_size,), 1.0)
    nested[:4] += torch.tensor([2.0**-22, 2.0**-15, 2.0**-7, 1.0])
    return {
        "equal": torch.zeros(vocab_size), "near": noise * 1e-3, "tiny": noise * 1e-38,
        "steps": 5 + (tokens % 7) * 2.0**-21,
        "two": (noise > 0).float(), "three": (tokens % 3).float(), "one-hot": one_hot, "nested": nested,
        "signs": torch.where(noise > 0, 1e-30, -1e-30), "zeros": torch.where(noise > 0, 0.0, -0.0),
        "low": torch.full((vocab_size,), -1e6), "forbidden": torch.where(tokens % 2 == 0, 0.25, -INF),
    }  # fmt: skip


@pytest.mark.parametrize("asked", [{"top_p": 0.63}, {"top_k": 1500}, {"top_k": 1999, "top_p": 0.41}])
def test_rows_without_hold(asked):
    vocab_size = TILE + 300
    logits = torch.stack(list(rows_without_hold(vocab_size).values()))
    settings_of_rows = [{**asked, "seeds": row} for row in range(len(logits))]
    assert_draws(logits, *make(*settings_of_rows, vocab_size=vocab_size))


def test_top_k_and_top_p_end_on_the_same_value():
    """Of equal tokens top-k keeps some, and top-p some of those, or all of them."""
    logits = torch.tensor([[2.0] + [1.0] * 30] * 9)
    asked = [{"top_k": 11, "top_p": p, "seeds": seed} for seed, p in enumerate((0.3, 0.7, *[0.999] * 7))]
    found = assert_draws(logits, *make(*asked, vocab_size=31))
    assert (found < 11).all()


def test_near_equal_values_are_told_apart():
    """Top-1 takes the larger of two neighbouring floats, wherever it stands."""
    logits = torch.full((4, 40), 20.0)
    for row in range(4):
        logits[row, 7 * row + 3] = torch.nextafter(torch.tensor(20.0), torch.tensor(INF))
    found = assert_draws(logits, *make(*({"top_k": 1, "seeds": row} for row in range(4)), vocab_size=40))
    assert found.tolist() == [3, 10, 17, 24]


def test_hostile_logits():
    logits = torch.randn(15, 40, generator=generator(3))
    logits[0:2] = NAN
    logits[2:4] = -INF
    logits[4:6, 39] = NAN
    logits[4:6, 1::3] = -INF
    logits[6:8, [5, 9]] = INF
    logits[8, 3], logits[9, 3] = 3e38, -3e38
    logits[10:12] *= 1e30
    logits[14, 2:] = -INF
    asked = [
        {"temperature": (0.0, 0.8)[row % 2], "seeds": row, "top_p": (0.7, 1.0)[row // 2 % 2], "top_k": 9 * (row % 3)}
        for row in range(15)
    ]
    asked[12] = {"temperature": 1e-45, "top_p": 0.9}
    asked[13] = {"temperature": 1e-20, "top_k": 3}
    asked[14] = {"top_k": 5, "top_p": 0.9}
    assert_draws(logits, *make(*asked, vocab_size=40))


def test_what_arithmetic_pushes_below_all_numbers_can_still_be_drawn():
    logits = torch.full((3, 5), -3e38)
    asked = [
        {"temperature": 0.0, "bias": [-3e38] * 5}, {"temperature": 0.0, "counts": [1] * 5, "repetition_penalty": 2.0},
        {"temperature": 0.0, "bias": [-INF] * 5},
    ]  # fmt: skip
    found = assert_draws(logits, *make(*asked, vocab_size=5))
    assert found.tolist() == [0, 0, NOTHING_ALLOWED]


# Short binary fractions: bias and penalties are exact in fp32. No sum of probabilities falls on a top_p.
NUMBER = st.integers(-160, 160).map(lambda n: n / 16)
LOGIT = st.one_of(NUMBER, st.sampled_from([0.0, -0.0, 1.0, -INF, 1e30, -1e30]))
VOCABULARY = 45


def row_of(values):
    return st.lists(values, min_size=VOCABULARY, max_size=VOCABULARY)


ASKED = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 4.0]), "top_k": st.integers(0, VOCABULARY + 1),
        "top_p": st.sampled_from([1e-6, 0.31, 0.87, 0.999, 1.0]), "min_p": st.sampled_from([0.0, 0.013, 1.0]),
        "seeds": st.integers(0, 2**63 - 1), "steps": st.integers(0, 2**31),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 2.0]),
        "presence_penalty": st.sampled_from([-1.5, 0.0, 0.75]), "frequency_penalty": st.sampled_from([0.0, 0.5]),
    },
    optional={
        "counts": row_of(st.integers(0, 3)), "prompt": st.lists(st.integers(0, VOCABULARY - 1), max_size=9),
        "bias": row_of(st.one_of(NUMBER, st.just(-INF))), "allowed": row_of(st.booleans()),
    },
)  # fmt: skip
SLOT = st.tuples(ASKED, st.one_of(row_of(LOGIT), NUMBER.map(lambda x: [x] * VOCABULARY)), st.booleans())


@given(st.lists(SLOT, min_size=1, max_size=3), st.randoms(use_true_random=False))
@settings(max_examples=12, phases=(Phase.explicit, Phase.reuse, Phase.generate))  # an example takes too long to shrink
def test_mixtures(slots, order):
    """Any settings beside any others; rows in any order, padding between them, NaN in a row of one."""
    asked = [one for one, _, _ in slots]
    state = make_state(asked, VOCABULARY)
    places = [*range(len(slots)), -1]
    order.shuffle(places)
    rows = make_rows(asked, state, torch.tensor(places))
    logits = torch.full((len(places), VOCABULARY), NAN)
    for row, slot in enumerate(places):
        if slot >= 0:
            logits[row] = torch.tensor(slots[slot][1])
            logits[row, 3] = NAN if slots[slot][2] and order.random() < 0.2 else logits[row, 3]
    assert_draws(logits, rows, state)


def test_a_wrong_draw_is_noticed(monkeypatch):
    """Planted: the kernel is given a neighbour's step, and a count that was not drawn."""
    logits, rows, state = random_case(5, 60)
    late, device = replace(rows, positions=rows.positions + 1), kernel_device()
    found = sample(logits.to(device), copied(late, device), copied(state, device))
    assert not torch.equal(found.cpu(), sample_ref(logits, rows, copied(state)))
    monkeypatch.setattr("dsv4.ops.sampling.op._remember", lambda *_: None)
    with pytest.raises(AssertionError, match="last_tokens"):
        assert_draws(logits, rows, state)


def test_dtypes():
    logits, rows, state = random_case(3, 70)
    assert_draws(logits.bfloat16(), rows, state)
    assert_draws(logits.double(), rows, state)


def test_padding_only():
    logits, rows, state = random_case(4, 50)
    padding = replace(rows, slots=torch.full_like(rows.slots, -1))
    assert assert_draws(poison(logits), padding, state).tolist() == [-1] * 4


def test_a_step_after_the_other():
    """Counts and last tokens feed the next step, for slots that take turns."""
    asked = [
        {"seeds": slot, "prompt": [1, 2], "frequency_penalty": 0.5, "presence_penalty": 0.25, "top_k": 4 * slot}
        for slot in range(3)
    ]
    device, oracle = kernel_device(), make_state(asked, 12)
    used = copied(oracle, device)
    logits = torch.randn(3, 12, generator=generator(8))
    for step in range(4):
        slots = torch.tensor([slot for slot in range(3) if slot != step])
        stepped = [{**row, "steps": step} for row in asked]
        rows = make_rows(stepped, oracle, slots)
        expected = sample_ref(logits[slots], rows, oracle)
        assert_bitwise(sample(logits[slots].to(device), copied(rows, device), used).cpu(), expected)
    assert_bitwise(used.token_counts.cpu(), oracle.token_counts)
    assert_bitwise(used.last_tokens.cpu(), oracle.last_tokens)


@pytest.mark.parametrize("num_tokens", [0, 1, 255, 256, 257])
def test_resolve_tokens(num_tokens):
    token_ids = torch.randint(-2, 5, (num_tokens,), generator=generator(6))
    slots = torch.randint(-1, 4, (num_tokens,), generator=generator(7))
    last = torch.tensor([100, 2**40, 0, 7])
    device = kernel_device()
    found = resolve_tokens(strided(token_ids.to(device), 0), slots.to(device), last.to(device))
    assert_bitwise(found.cpu(), resolve_tokens_ref(token_ids, slots, last))


def assert_log_probabilities(logits, token_ids, num_top, given=None):
    """The oracle's ids; its numbers by the rule for float ops where they are finite, else the same."""
    device = kernel_device()
    given = logits if given is None else given
    found = [part.cpu() for part in sampled_logprobs(given.to(device), token_ids.to(device), num_top)]
    expected = sampled_logprobs_ref(logits, token_ids, num_top)
    exact = torch.log_softmax(logits.double(), -1)
    is_none = token_ids < 0
    assert found[0][is_none].isnan().all(), "the log-probability of no token"
    found[0], token_ids = found[0][~is_none], token_ids[~is_none]
    assert_bitwise(found[1], expected[1], "top ids")
    for part, table, ids in ((0, exact[~is_none], token_ids.unsqueeze(-1)), (2, exact, expected[1])):
        values, wide = found[part].reshape(ids.shape), table.gather(-1, ids)
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


def test_log_probabilities_of_no_token():
    """Rows without a token beside one with: nothing is read outside the row."""
    logits = torch.randn(4, 20, generator=generator(9))
    logits[1] = NAN
    token_ids = torch.tensor([-2, -1, 19, -1])
    for num_top in (0, 5):
        whole = assert_log_probabilities(logits, token_ids, num_top)
        assert whole[1].shape == (4, num_top)


def test_rejects():
    logits, rows, state = random_case(3, 40)
    device = kernel_device()
    logits, rows, state = logits.to(device), copied(rows, device), copied(state, device)
    for changed, part in [
        ({"top_k": state.top_k.int()}, "top_k: expected torch.int64"),
        ({"seeds": state.seeds[:1]}, r"seeds: expected torch.int64 \(3,\)"),
        ({"token_counts": state.token_counts[:, :39]}, r"token_counts: .*found torch.int32 \(3, 39\)"),
        ({"bias": transposed(state.bias)}, "bias: expected a contiguous tensor"),
    ]:
        with pytest.raises(KernelInputError, match=part):
            sample(logits, rows, replace(state, **changed))
    for changed, part in [
        ({"positions": rows.positions[:2]}, r"positions: expected torch.int64 \(3,\)"),
        ({"mask": rows.mask.long()}, r"mask: expected torch.int32 \(3, 2\), found torch.int64"),
        ({"mask": None}, "mask and is_masked, or neither"),
    ]:
        with pytest.raises(KernelInputError, match=part):
            sample(logits, replace(rows, **changed), state)
    with pytest.raises(KernelInputError, match="2.18"):
        sample(torch.empty(3, 1 << 18, device=device), rows, state)
    with pytest.raises(KernelInputError, match="slots: expected torch.int64"):
        resolve_tokens(rows.slots, rows.slots.int(), state.last_tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [0.0, 1e-3, 0.3, 4.0])
def test_full_size(spread):
    logits, rows, state = random_case(24, 129280)
    logits = logits / 3 * spread
    state.top_p.copy_(torch.linspace(0.3, 1.0, 24))
    state.top_k.copy_(torch.arange(24) % 4 * 400)
    found = assert_draws(logits, rows, state)
    assert_bitwise(assert_draws(logits[3:4], take(rows, slice(3, 4)), state), found[3:4])
    assert_log_probabilities(logits, found.cpu(), 20)


@pytest.mark.gpu
def test_rows_without_hold_at_full_size():
    logits = torch.stack(list(rows_without_hold(129280).values()))
    for asked in ({"top_p": 0.63}, {"top_k": 70_001}, {"top_k": 100_003, "top_p": 0.41}):
        every = [{**asked, "seeds": row} for row in range(len(logits))]
        assert_draws(logits, *make(*every, vocab_size=129280))
