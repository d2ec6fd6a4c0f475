"""From the logits of each request's last token to its next token and log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4.engine.constraint import ConstraintError
from dsv4.engine.sequence import Sequence
from dsv4.ops.sampling import SamplingBatch, token_logprobs
from dsv4.request import TokenLogprobs

_POISONED = -1
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
    sample: Callable[[Tensor, SamplingBatch], Tensor], logits: Tensor, sequences: SequenceOf[Sequence]
) -> list[Drawn | Undrawable]:
    """logits [R, vocab], one row per sequence -> what each draws, by the op `sample`. Log-probabilities are the model's
    own, before any constraint."""
    masked, stuck = _apply_constraints(logits, sequences)
    token_ids = sample(masked, _sampling_batch(sequences, logits)).to(logits.device)  # [R]
    # one copy tells both what was drawn and which rows are poisoned
    drawn_ids = token_ids.masked_fill(logits.isnan().any(-1), _POISONED).tolist()
    logprobs = _logprobs(logits, token_ids, sequences)
    drawn: list[Drawn | Undrawable] = []
    for row, (token_id, sequence) in enumerate(zip(drawn_ids, sequences, strict=True)):
        if token_id == _POISONED:
            position = len(sequence.token_ids)
            drawn.append(Undrawable(f"the model gave no numbers (NaN logits) for the token at position {position}"))
        elif row in stuck:
            drawn.append(Undrawable(stuck[row]))
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
    chosen_ids = token_ids[rows]  # [A]
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


def _sampling_batch(sequences: SequenceOf[Sequence], logits: Tensor) -> SamplingBatch:
    params = [sequence.params for sequence in sequences]
    device, vocab_size = logits.device, logits.shape[1]
    reals = _columns([[getattr(p, name) for p in params] for name in _REALS], torch.float32)
    integers = [[p.top_k for p in params], [p.seed for p in params], [sequence.num_output for sequence in sequences]]
    top_k, seeds, steps = _columns(integers, torch.int64).to(device).unbind(0)  # [R] each
    prompt_mask = output_counts = None
    if any(p.has_penalties for p in params):
        prompt_mask = torch.zeros(len(params), vocab_size, dtype=torch.bool, device=device)
        output_counts = torch.zeros(len(params), vocab_size, dtype=torch.int32, device=device)
        for row, sequence in enumerate(sequences):
            prompt_mask[row, sequence.token_ids[: sequence.prompt_len]] = True
            output = torch.tensor(sequence.output_ids, dtype=torch.int64, device=device)
            output_counts[row] = torch.bincount(output, minlength=vocab_size)
    columns = dict(zip(_REALS, reals.to(device).unbind(0), strict=True))  # [R] each
    return SamplingBatch(
        **columns, top_k=top_k, seeds=seeds, steps=steps, prompt_mask=prompt_mask, output_counts=output_counts
    )


def _columns(lists: list[list[Any]], dtype: torch.dtype) -> Tensor:
    """[C, R]. Every column begins at a multiple of 16 bytes: kernels are compiled apart for pointers that do not."""
    count = len(lists[0])
    columns = torch.zeros(len(lists), -(-count // 4) * 4, dtype=dtype)[:, :count]
    columns.copy_(torch.tensor(lists, dtype=dtype))
    return columns


def rehearse(sample: Callable[[Tensor, SamplingBatch], Tensor], logits: Tensor) -> None:
    """Draw from every row, without penalties and with some: nothing that `sample` compiles is left for a request."""
    num_rows, device = logits.shape[0], logits.device
    ones = dict.fromkeys(_REALS, torch.ones(num_rows, device=device))
    integers = dict.fromkeys(("top_k", "seeds", "steps"), torch.ones(num_rows, dtype=torch.int64, device=device))
    sample(logits, SamplingBatch(**ones, **integers))
    counts = torch.zeros(logits.shape, dtype=torch.int32, device=device)
    sample(logits, SamplingBatch(**ones, **integers, prompt_mask=counts.bool(), output_counts=counts))
