"""From the streams of each request's last token to its next token and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.engine.constraint import ConstraintError
from dsv4.engine.sequence import Sequence
from dsv4.model.transformer import Transformer
from dsv4.ops.sampling import SamplingBatch, token_logprobs
from dsv4.request import TokenLogprobs


@dataclass(frozen=True)
class Drawn:
    """A request's next token, and its log-probabilities where it asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class Undrawable:
    """A request that has no next token, and why. It says nothing about the others of the call."""

    reason: str


def draw(model: Transformer, streams: Tensor, sequences: SequenceOf[Sequence]) -> list[Drawn | Undrawable]:
    """streams [R, n, D], one row per sequence -> what each draws. Log-probabilities are the model's own, before any
    constraint."""
    logits = model.logits(streams)  # [R, vocab]
    poisoned = logits.isnan().any(-1).tolist()
    masked, stuck = _apply_constraints(logits, sequences)
    token_ids = model.context.ops.sample(masked, _sampling_batch(sequences, logits)).tolist()
    asked = [row for row, sequence in enumerate(sequences) if sequence.params.logprobs is not None]
    logprobs: dict[int, TokenLogprobs] = {}
    if asked:
        table = token_logprobs(logits[asked])
        for row, row_logprobs in zip(asked, table, strict=True):
            logprobs[row] = _top(row_logprobs, token_ids[row], sequences[row].params.logprobs or 0)
    drawn: list[Drawn | Undrawable] = []
    for row, token_id in enumerate(token_ids):
        if poisoned[row]:
            position = len(sequences[row].token_ids)
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
        except ConstraintError as error:
            stuck[row] = str(error)
            continue
        if not allowed.any():
            stuck[row] = "the constraint allows no token"
            continue
        if masked is logits:
            masked = logits.clone()
        masked[row].masked_fill_(~allowed.to(logits.device), float("-inf"))
    return masked, stuck


def _top(logprobs: Tensor, token_id: int, count: int) -> TokenLogprobs:
    order = logprobs.sort(dim=-1, descending=True, stable=True)
    top = tuple(zip(order.indices[:count].tolist(), order.values[:count].tolist(), strict=True))
    return TokenLogprobs(token_id, float(logprobs[token_id]), top)


def _sampling_batch(sequences: SequenceOf[Sequence], logits: Tensor) -> SamplingBatch:
    params = [sequence.params for sequence in sequences]
    device, vocab_size = logits.device, logits.shape[1]

    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(p, name) for p in params], dtype=dtype, device=device)

    prompt_mask = output_counts = None
    if any(p.has_penalties for p in params):
        prompt_mask = torch.zeros(len(params), vocab_size, dtype=torch.bool, device=device)
        output_counts = torch.zeros(len(params), vocab_size, dtype=torch.int32, device=device)
        for row, sequence in enumerate(sequences):
            prompt_mask[row, sequence.token_ids[: sequence.prompt_len]] = True
            output = torch.tensor(sequence.output_ids, dtype=torch.int64, device=device)
            output_counts[row] = torch.bincount(output, minlength=vocab_size)
    return SamplingBatch(
        temperature=column("temperature", torch.float32),
        top_k=column("top_k", torch.int64),
        top_p=column("top_p", torch.float32),
        min_p=column("min_p", torch.float32),
        repetition_penalty=column("repetition_penalty", torch.float32),
        presence_penalty=column("presence_penalty", torch.float32),
        frequency_penalty=column("frequency_penalty", torch.float32),
        seeds=column("seed", torch.int64),
        steps=torch.tensor([sequence.num_output for sequence in sequences], device=device),
        prompt_mask=prompt_mask,
        output_counts=output_counts,
    )
