"""Choosing the next token: bias, penalties, mask, temperature, top-k, top-p, min-p, then the Gumbel-max trick with
counted noise.

The noise of token v at step i of a request is a pure function of (seed, i, v), so a request draws the same tokens
whatever is batched beside it, on any device.

What a request asks for lies in a slot of `SamplingState`, in tensors that never move: a CUDA graph reads them,
admission writes a slot, a draw updates its last token and its counts. A call names its rows' slots and positions.

Computed in fp64; ops/sampling/launch.py says how close the kernels come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.ops.lib.waiting import waits_for_device
from dsv4.ops.sampling.kernel_row import NOISE_BLOCK
from dsv4.ops.select import topk_select_ref
from dsv4.request import DRAW_REALS

# what `sample` returns instead of a token
POISONED = -1  # a logit is NaN; or the row is padding
NOTHING_ALLOWED = -2  # bias and mask leave no token

HAS_PENALTIES, HAS_BIAS = 1, 2  # bits of `SamplingState.flags`
IN_PROMPT = 1 << 30  # bit of `SamplingState.token_counts`

_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_LARGEST = torch.finfo(torch.float64).max


@dataclass(frozen=True)
class SamplingState:
    """What requests ask for and what they have drawn, by slot. S slots, vocabulary V; contiguous, never replaced.

    temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty: fp32 [S]; top_k, seeds,
    prompt_lens: int64 [S]. `flags` int32 [S]: HAS_PENALTIES, HAS_BIAS. `last_tokens` int64 [S]: the token drawn last.
    `token_counts` int32 [S, V]: how often a token was drawn, with the bit IN_PROMPT if it stands in the prompt; read
    and kept only in slots with HAS_PENALTIES. `bias` fp32 [S, V]: added to the logits, -inf forbids a token; read only
    in slots with HAS_BIAS.
    """

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    top_k: Tensor
    seeds: Tensor
    prompt_lens: Tensor
    flags: Tensor
    last_tokens: Tensor
    token_counts: Tensor
    bias: Tensor

    @classmethod
    def empty(cls, num_slots: int, vocab_size: int, device: torch.device | str) -> SamplingState:
        """Slots that draw greedily: temperature 0, everything else off."""
        columns = {name: torch.zeros(num_slots, device=device) for name in DRAW_REALS}
        columns["top_p"].fill_(1.0)
        columns["repetition_penalty"].fill_(1.0)

        def integers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            **columns, top_k=integers(num_slots), seeds=integers(num_slots), prompt_lens=integers(num_slots),
            flags=integers(num_slots, dtype=torch.int32), last_tokens=integers(num_slots),
            token_counts=integers(num_slots, vocab_size, dtype=torch.int32),
            bias=torch.zeros(num_slots, vocab_size, device=device),
        )  # fmt: skip


@dataclass(frozen=True)
class SamplingRows:
    """Which request each row of logits belongs to. R rows; without `drafts`, at most one of a slot.

    `slots` int64 [R], -1 where a row is padding; `positions` int64 [R]: that of the token whose logits the row has, so
    the token drawn is number positions + 1 - prompt_lens of its request. `mask` int32 [R, ceil(V / 32)], bit v % 32 of
    word v // 32 set where token v is allowed, read only where `is_masked` int32 [R] is not 0. Both or neither.

    `drafts` int64 [R, k]: tokens between what the slot has counted and the row, none of them certain; below 0 where
    there are fewer. Penalties count them. The state is then left as it is: which rows count is known later.
    """

    slots: Tensor
    positions: Tensor
    mask: Tensor | None = None
    is_masked: Tensor | None = None
    drafts: Tensor | None = None

    def steps(self, state: SamplingState) -> Tensor:
        """int64 [R]: how many tokens each row's request has drawn before; any number for padding."""
        return self.positions + 1 - state.prompt_lens[self.slots.clamp(min=0)]


@waits_for_device
def sample_ref(logits: Tensor, rows: SamplingRows, state: SamplingState) -> Tensor:
    """logits [R, V] (fp32 or wider) -> token ids int64 [R]. Temperature 0 takes the largest logit, lower id on a tie.

    In this order: bias, penalties, mask, temperature, top-k, top-p within what top-k kept, min-p, noise. Rows do not
    see each other. +inf wins over every number. A row with a NaN among its logits gives POISONED, one in which nothing
    above -inf is left NOTHING_ALLOWED, padding -1.

    Written in place, except by padding and by rows with drafts: last_tokens[slot], to the token or to 0 where there is
    none, and with HAS_PENALTIES token_counts[slot, token] + 1.
    """
    wide = allowed_logits(logits, rows, state)
    is_greedy = (state.temperature[rows.slots.clamp(min=0)] == 0).unsqueeze(-1)
    noisy = wide if bool(is_greedy.all()) else _with_noise(wide, rows, state)
    token_ids = torch.where(is_greedy, wide, noisy).argmax(-1)  # the first of several
    token_ids = token_ids.masked_fill((wide == float("-inf")).all(-1), NOTHING_ALLOWED)
    token_ids = token_ids.masked_fill(logits.isnan().any(-1) | (rows.slots < 0), POISONED)
    if rows.drafts is None:
        _remember(token_ids, rows.slots, state)
    return token_ids


def _with_noise(wide: Tensor, rows: SamplingRows, state: SamplingState) -> Tensor:
    """Allowed logits fp64 [R, V] -> what the largest is drawn of: over temperature, filtered, with noise."""
    slots = rows.slots.clamp(min=0)
    temperature = state.temperature[slots].double().unsqueeze(-1)
    scaled = _numbers(wide / torch.where(temperature == 0, 1.0, temperature))
    keep = keep_mask(scaled, state.top_k[slots], state.top_p[slots], state.min_p[slots])
    noise = gumbel_noise(state.seeds[slots], rows.steps(state), wide.shape[-1])
    largest = scaled.amax(-1, keepdim=True)
    noise = noise.masked_fill(largest == _LARGEST, 0.0)  # which cannot tell infinities apart
    return (scaled - largest + noise).masked_fill(~keep, float("-inf"))


def allowed_logits(logits: Tensor, rows: SamplingRows, state: SamplingState) -> Tensor:
    """fp64 [R, V] after bias, penalties and mask, without NaN and +inf; -inf where a token may not be drawn."""
    slots = rows.slots.clamp(min=0)
    flags = state.flags[slots].unsqueeze(-1)
    has_bias, has_penalties = (flags & HAS_BIAS) != 0, (flags & HAS_PENALTIES) != 0
    wide = logits.double()
    if bool(has_bias.any()):
        wide = torch.where(has_bias, wide + state.bias[slots].double(), wide)
    if bool(has_penalties.any()):
        penalised = apply_penalties(
            wide, _token_counts(rows, state), state.repetition_penalty[slots], state.presence_penalty[slots],
            state.frequency_penalty[slots],
        )  # fmt: skip
        wide = torch.where(has_penalties, penalised, wide)
    wide = _numbers(wide)
    if rows.mask is None or rows.is_masked is None:
        return wide
    tokens = torch.arange(logits.shape[-1], device=logits.device)
    is_allowed = (rows.mask[:, tokens // 32] >> (tokens % 32)) & 1 != 0
    return wide.masked_fill((rows.is_masked != 0).unsqueeze(-1) & ~is_allowed, float("-inf"))


def _token_counts(rows: SamplingRows, state: SamplingState) -> Tensor:
    """int32 [R, V]: those of the rows' slots, and their drafts."""
    counts = state.token_counts[rows.slots.clamp(min=0)]
    if rows.drafts is None:
        return counts
    return counts.scatter_add(1, rows.drafts.clamp(min=0), (rows.drafts >= 0).to(counts.dtype))


def _remember(token_ids: Tensor, slots: Tensor, state: SamplingState) -> None:
    is_row = slots >= 0
    held, drawn = slots[is_row], token_ids[is_row]
    state.last_tokens[held] = drawn.clamp(min=0)
    counted = (drawn >= 0) & ((state.flags[held] & HAS_PENALTIES) != 0)
    state.token_counts[held[counted], drawn[counted]] += 1


def _numbers(logits: Tensor) -> Tensor:
    """NaN as -inf, and +inf as the largest number, so that a softmax over the row has a value."""
    return logits.nan_to_num(nan=float("-inf"), posinf=_LARGEST, neginf=float("-inf"))


def apply_penalties(
    logits: Tensor, token_counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Repetition (prompt and output), presence and frequency (output only). logits, token_counts [R, V]; others [R]."""
    repetition, presence, frequency = (x.to(logits.dtype).unsqueeze(-1) for x in (repetition, presence, frequency))
    counts = (token_counts & (IN_PROMPT - 1)).to(logits.dtype)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    penalised = torch.where(token_counts != 0, repeated, logits)
    return penalised - frequency * counts - presence * (counts > 0)


def keep_mask(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """bool [R, V]: the tokens that may be drawn of logits over temperature, without NaN or +inf; at least the best."""
    top_k, top_p, min_p = (x.unsqueeze(-1) for x in (top_k, top_p.double(), min_p.double()))
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    keep = rank < torch.where(top_k == 0, scaled.shape[-1], top_k)
    probs = torch.softmax(ordered.masked_fill(~keep, float("-inf")), -1)
    before = probs.cumsum(-1) - probs  # probability of everything more likely
    keep = keep & ((before < top_p) | (top_p >= 1))
    keep = keep & (probs >= min_p * probs[:, :1])
    keep = keep | (rank == 0)
    return torch.zeros_like(keep).scatter(-1, order, keep)


def resolve_tokens_ref(token_ids: Tensor, slots: Tensor, last_tokens: Tensor) -> Tensor:
    """token_ids, slots int64 [T], last_tokens int64 [S] -> int64 [T]: a negative id stands for the slot's last token.

    Padding (slot -1) gives 0.
    """
    resolved = torch.where(token_ids < 0, last_tokens[slots.clamp(min=0)], token_ids)
    return resolved.masked_fill(slots < 0, 0)


def token_logprobs(logits: Tensor) -> Tensor:
    """Log-probabilities under the model itself, before penalties, temperature and filters. fp32 [R, V]."""
    return torch.log_softmax(logits.double(), -1).float()


def sampled_logprobs_ref(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """logits [R, V], chosen ids [R] -> their log-probabilities fp32 [R], NaN where an id is negative; the num_top
    likeliest ids int64 [R, min(num_top, V)], best first, lower id on a tie, and their log-probabilities fp32. As
    `token_logprobs`: under the model itself. A row with a NaN has NaN everywhere, and some ids.
    """
    table = token_logprobs(logits)
    top_ids = topk_select_ref(logits, num_top)
    chosen = table.gather(-1, token_ids.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return chosen.masked_fill(token_ids < 0, float("nan")), top_ids, table.gather(-1, top_ids)


def gumbel_noise(seeds: Tensor, steps: Tensor, vocab_size: int) -> Tensor:
    """[R, V]: -log(-log u) with u in (0, 1) from Philox 4x32-10 with key seed, whose four words serve four tokens.

    A run of 4 * NOISE_BLOCK tokens takes the words 0 of NOISE_BLOCK counters (c, step, 0, 0), then their words 1, 2, 3.
    Values of fp32 in fp64: a vectorised log may differ in its last fp64 bit with an element's place in the tensor, and
    the rounding takes that away.
    """
    num_runs = -(-vocab_size // (4 * NOISE_BLOCK))
    run_len = min(NOISE_BLOCK, vocab_size)  # a vocabulary that its first words cover needs no more counters
    counters = torch.arange(num_runs * run_len, device=seeds.device).unsqueeze(0)
    steps = steps.unsqueeze(-1)
    words = philox(seeds.unsqueeze(-1), (counters, steps, torch.zeros_like(steps), torch.zeros_like(steps)))
    runs = [word.unflatten(-1, (num_runs, run_len)) for word in words]  # [R, runs, run_len] each
    bits = torch.stack(runs, 2).flatten(1)[:, :vocab_size]
    uniform = ((bits >> 8).double() + 0.5) * 2.0**-24
    return -torch.log(-torch.log(uniform)).float().double()


def philox(seed: Tensor, counter: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox 4x32-10 in int64 arithmetic: four 32-bit words from a 64-bit key and four counter words; all broadcast.

    Words 0 and 2 are one tensor and words 1 and 3 another: a round does the same to both of a pair. A 64-bit product
    that leaves int64 has its right bits.
    """
    *words, seed = torch.broadcast_tensors(*(word & _MASK for word in counter), seed)
    even, odd = torch.stack(words[0::2]), torch.stack(words[1::2])  # [2, ...]
    key = torch.stack((seed & _MASK, (seed >> 32) & _MASK))
    multipliers, weyl = (
        torch.tensor(pair, device=seed.device).view(2, *(1,) * seed.dim())
        for pair in (_PHILOX_MULTIPLIERS, _PHILOX_WEYL)
    )
    for _ in range(10):
        product = multipliers * even
        high, low = (product >> 32) & _MASK, product & _MASK
        even, odd = high.flip(0) ^ odd ^ key, low.flip(0)
        key = (key + weyl) & _MASK
    return even[0], odd[0], even[1], odd[1]
