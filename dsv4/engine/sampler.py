"""From the logits of each request's last token to its next token and log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dsv4.engine.constraint import ConstraintError
from dsv4.engine.sequence import Sequence
from dsv4.ops.sampling import (
    HAS_PENALTIES,
    IN_PROMPT,
    NOTHING_ALLOWED,
    POISONED,
    SamplingRows,
    SamplingState,
    token_logprobs,
)
from dsv4.request import TokenLogprobs

_REALS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True)
class Drawn:
    """A request's next token, and its log-probabilities where it asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class Undrawable:
    """A request that has no next token, and why. It says nothing about the others of the call."""

    reason: str


def draw(
    sample: Callable[[Tensor, SamplingRows, SamplingState], Tensor], logits: Tensor, sequences: SequenceOf[Sequence]
) -> list[Drawn | Undrawable]:
    """logits [R, vocab], one row per sequence -> what each draws, by the op `sample`. Log-probabilities are the model's
    own, before any constraint."""
    masked, stuck = _apply_constraints(logits, sequences)
    token_ids = sample(masked, *_sampling_state(sequences, logits)).to(logits.device)  # [R]
    # one copy tells both what was drawn and which rows are poisoned
    drawn_ids = token_ids.masked_fill(logits.isnan().any(-1), POISONED).tolist()
    logprobs = _logprobs(logits, token_ids, sequences)
    drawn: list[Drawn | Undrawable] = []
    for row, (token_id, sequence) in enumerate(zip(drawn_ids, sequences, strict=True)):
        if token_id == POISONED:
            position = len(sequence.token_ids)
            drawn.append(Undrawable(f"the model gave no numbers (NaN logits) for the token at position {position}"))
        elif row in stuck:
            drawn.append(Undrawable(stuck[row]))
        elif token_id == NOTHING_ALLOWED:
            drawn.append(Undrawable("no token has a probability above 0"))
        else:
            drawn.append(Drawn(token_id, logprobs.get(row)))
    return drawn


def _apply_constraints(logits: Tensor, sequences: SequenceOf[Sequence]) -> tuple[Tensor, dict[int, str]]:
    """The logits with every forbidden token at -inf, and the rows that cannot go on with the reason."""
    stuck: dict[int, str] = {}
    masked = logits
    for row, sequence in enumerate(sequences):
        if sequence.constraint is None:
            continue
        try:
            allowed = sequence.constraint.allowed()  # [vocab]
        except Exception as error:  # a rule is not our code: whatever it does, it does to its own request
            stuck[row] = constraint_failure(error)
            continue
        if allowed.dtype != torch.bool or allowed.shape != logits.shape[1:]:
            stuck[row] = f"the constraint gave {allowed.dtype} {list(allowed.shape)}, not bool {list(logits.shape[1:])}"
            continue
        if not allowed.any():
            stuck[row] = "the constraint allows no token"
            continue
        if masked is logits:
            masked = logits.clone()
        masked[row].masked_fill_(~allowed.to(logits.device), float("-inf"))
    return masked, stuck


def constraint_failure(error: Exception) -> str:
    """What to say of a request whose rule raised."""
    if isinstance(error, ConstraintError):
        return str(error)
    return f"the constraint raised {type(error).__name__}: {error}"


def _logprobs(logits: Tensor, token_ids: Tensor, sequences: SequenceOf[Sequence]) -> dict[int, TokenLogprobs]:
    """By row, for the requests that asked."""
    asked = [row for row, sequence in enumerate(sequences) if sequence.params.logprobs is not None]
    if not asked:
        return {}
    num_top = max(sequences[row].params.logprobs or 0 for row in asked)
    rows = torch.tensor(asked, device=logits.device)
    table = token_logprobs(logits[rows])  # [A, vocab]
    chosen_ids = token_ids[rows].clamp(min=0)  # [A]
    chosen = table.gather(-1, chosen_ids.unsqueeze(-1)).squeeze(-1)  # [A]
    order = table.sort(dim=-1, descending=True, stable=True)
    columns = zip(
        asked, chosen_ids.tolist(), chosen.tolist(), order.indices[:, :num_top].tolist(),
        order.values[:, :num_top].tolist(), strict=True,
    )  # fmt: skip
    logprobs = {}
    for row, token_id, logprob, top_ids, top in columns:
        count = sequences[row].params.logprobs or 0
        logprobs[row] = TokenLogprobs(token_id, logprob, tuple(zip(top_ids[:count], top[:count], strict=True)))
    return logprobs


def _sampling_state(sequences: SequenceOf[Sequence], logits: Tensor) -> tuple[SamplingRows, SamplingState]:
    """A slot for every row, filled from what the requests ask for and have drawn."""
    params = [sequence.params for sequence in sequences]
    num_rows, vocab_size = logits.shape
    state = SamplingState.empty(num_rows, vocab_size, "cpu")
    for name in _REALS:
        getattr(state, name).copy_(torch.tensor([getattr(p, name) for p in params]))
    for name, values in (
        ("top_k", [p.top_k for p in params]), ("seeds", [p.seed for p in params]),
        ("prompt_lens", [sequence.prompt_len for sequence in sequences]),
        ("flags", [HAS_PENALTIES if p.has_penalties else 0 for p in params]),
    ):  # fmt: skip
        getattr(state, name).copy_(torch.tensor(values))
    for row, sequence in enumerate(sequences):
        if params[row].has_penalties:
            output = torch.tensor(sequence.output_ids, dtype=torch.int64)
            state.token_counts[row] = torch.bincount(output, minlength=vocab_size)
            state.token_counts[row, sequence.token_ids[: sequence.prompt_len]] |= IN_PROMPT
    on_device = {spec.name: getattr(state, spec.name).to(logits.device) for spec in fields(state)}
    positions = torch.tensor([len(sequence.token_ids) - 1 for sequence in sequences])
    slots = torch.arange(num_rows, device=logits.device)
    return SamplingRows(slots, positions.to(logits.device)), SamplingState(**on_device)


def rehearse(sample: Callable[[Tensor, SamplingRows, SamplingState], Tensor], logits: Tensor) -> None:
    """Draw from every row: nothing that `sample` compiles is left for a request."""
    num_rows, vocab_size = logits.shape
    slots = torch.arange(num_rows, device=logits.device)
    sample(logits, SamplingRows(slots, slots), SamplingState.empty(num_rows, vocab_size, logits.device))
