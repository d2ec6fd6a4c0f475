"""Rows and slots for the tests of sampling: settings as dicts, what a row leaves out is off."""

from dataclasses import fields, replace

import torch

from dsv4.ops.sampling import HAS_BIAS, HAS_PENALTIES, IN_PROMPT, SamplingRows, SamplingState
from dsv4.request import DRAW_REALS
from dsv4.testing.inputs import poison

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
       "frequency_penalty": 0.0, "seeds": 0}  # fmt: skip
assert set(OFF) == {*DRAW_REALS, "top_k", "seeds"}, "each number that a draw reads"


def make_state(settings, vocab_size):
    """One slot a dict. "counts", "prompt" (ids) and "bias" fill the slot and set its flags; without them the slot's
    counts and bias are poison. "steps" is how many tokens the request has drawn."""
    state = SamplingState.empty(len(settings), vocab_size, "cpu")
    poison(state.token_counts)
    poison(state.bias)
    state.prompt_lens.copy_(torch.arange(len(settings)) + 3)
    for slot, row in enumerate(settings):
        for name, off in OFF.items():
            getattr(state, name)[slot] = row.get(name, off)
        if "counts" in row or "prompt" in row:
            state.flags[slot] |= HAS_PENALTIES
            state.token_counts[slot] = torch.as_tensor(row.get("counts", [0] * vocab_size), dtype=torch.int32)
            state.token_counts[slot, row.get("prompt", [])] |= IN_PROMPT
        if "bias" in row:
            state.flags[slot] |= HAS_BIAS
            state.bias[slot] = torch.as_tensor(row["bias"])
    return state


def make_rows(settings, state, slots=None):
    """One row a slot, or those of `slots`. "allowed" (bool [V]) is the row's mask; without it the words are poison."""
    slots = torch.arange(len(settings)) if slots is None else slots
    steps = torch.tensor([row.get("steps", 0) for row in settings])
    positions = steps[slots.clamp(min=0)] + state.prompt_lens[slots.clamp(min=0)] - 1
    vocab_size = state.bias.shape[1]
    if not any("allowed" in row for row in settings):
        return SamplingRows(slots, positions)
    mask = poison(torch.empty(len(slots), -(-vocab_size // 32), dtype=torch.int32))
    is_masked = torch.zeros(len(slots), dtype=torch.int32)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0 and "allowed" in settings[slot]:
            is_masked[row], mask[row] = 1, pack(settings[slot]["allowed"])
    return SamplingRows(slots, positions, mask, is_masked)


def make(*settings, vocab_size):
    state = make_state(settings, vocab_size)
    return make_rows(settings, state), state


def pack(allowed):
    """bool [V] -> int32 words; the bits behind the vocabulary are set, which must not matter."""
    words = [(1 << 32) - 1] * -(-len(allowed) // 32)
    for token, is_allowed in enumerate(allowed):
        if not is_allowed:
            words[token // 32] &= ~(1 << token % 32)
    return torch.tensor([word - (word >> 31 << 32) for word in words], dtype=torch.int32)


def take(rows, which):
    """Some of the rows."""
    columns = {spec.name: getattr(rows, spec.name) for spec in fields(rows)}
    return replace(rows, **{name: None if column is None else column[which] for name, column in columns.items()})


def copied(thing, device="cpu"):
    """Rows or state, copied to a device."""
    columns = {spec.name: getattr(thing, spec.name) for spec in fields(thing)}
    return type(thing)(**{name: None if x is None else x.clone().to(device) for name, x in columns.items()})


def random_case(count, vocab_size):
    """logits, rows, state: every setting in some mixture."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(count, vocab_size, generator=generator) * 3
    settings = [
        {"temperature": (0.0, 0.7, 1.0, 1.9)[row % 4], "top_k": (0, 3, 40)[row % 3], "seeds": row * 1000003,
         "top_p": (1.0, 0.9, 0.5)[row // 2 % 3], "min_p": (0.0, 0.02)[row // 3 % 2], "steps": row}
        for row in range(count)
    ]  # fmt: skip
    for row, setting in enumerate(settings):
        counts = torch.randint(0, 3, (vocab_size,), generator=generator)
        prompt = (torch.rand(vocab_size, generator=generator) < 0.3).nonzero().flatten()
        bias = torch.randn(vocab_size, generator=generator)
        allowed = torch.rand(vocab_size, generator=generator) < 0.7
        allowed[row % vocab_size] = True
        if row % 2:
            setting |= {"counts": counts, "prompt": prompt, "repetition_penalty": 1.3,
                        "presence_penalty": 0.3 * (row % 3), "frequency_penalty": -0.2 * (row % 5)}  # fmt: skip
        if row % 3 == 1:
            setting["bias"] = bias
        if row % 5 == 2:
            setting["allowed"] = allowed
    state = make_state(settings, vocab_size)
    return logits, make_rows(settings, state), state
