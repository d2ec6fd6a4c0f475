"""One rank's share of a step: `RankExecutor` repeats what rank 0's books say, runs the tokens and draws.

Rank 0 has one for its own share and hears it directly; every other rank has one in `follow`, which takes work from
rank 0 until the end. A rank with nothing to run pads: its experts serve the others.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from enum import IntEnum

import torch
from torch import Tensor

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.transfer import OnTheWay, to_device
from dsv4.dist.control import Follower
from dsv4.dist.errors import RanksDiverged
from dsv4.dist.messages import pack, unpack
from dsv4.engine.bucket import padding_batch
from dsv4.engine.rank_wire import (
    DrawnToken,
    RankAnswer,
    RankShare,
    decode_plan,
    encode_answer,
)
from dsv4.engine.runner import Runner
from dsv4.engine.sampler import Undrawable, num_top_for, outcomes
from dsv4.engine.scheduler import Piece, StepPlan
from dsv4.engine.scores import Scores
from dsv4.engine.sequence import Sequence
from dsv4.engine.step import StepBuilder, StepInput
from dsv4.model.transformer import Transformer
from dsv4.ops.sampling import SamplingRows
from dsv4.request import TokenLogprobs

_NO_EOS = -1  # rank 0 decides when a request is over


class Work(IntEnum):
    """The first number of what rank 0 asks for."""

    STEP = 0  # a plan: run this rank's share
    FORWARD = 1  # so many rows of padding through all layers
    BLOCK = 2  # through one layer
    MTP = 3  # through an MTP block


class RankExecutor:
    """The requests that live on one rank, as far as drawing needs them.

    on_experts  as `Engine.on_experts`, of this rank's own tokens
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.cache = runner.cache
        self.on_experts: Callable[[Tensor], None] | None = None
        self._builder = StepBuilder(self.cache)
        self._requests: dict[int, Sequence] = {}  # by slot

    def run(self, share: RankShare, num_rows: int) -> RankAnswer:
        """The share's tokens, padded to `num_rows`; what those of its pieces drew that draw."""
        self.follow_books(share)
        pieces = []
        for one in share.pieces:
            sequence = self._request(one.slot)
            if one.start + one.length > len(sequence.token_ids):
                raise RanksDiverged(f"slot {one.slot} knows {len(sequence.token_ids)} tokens, the plan runs to more")
            pieces.append(Piece(sequence, one.slot, one.start, one.length, one.draws))
        plan = StepPlan(tuple(pieces), ())
        step = self._builder.build(plan, pad_to=num_rows)
        self.runner.slots.take(plan.pieces)
        forwarded = self.runner.forward(step.batch, step.draw_rows)
        scores = Scores.launch(self.runner, forwarded, plan)
        if self.on_experts is not None and step.num_tokens:
            self.on_experts(torch.stack(forwarded.experts)[:, : step.num_tokens].cpu())
        drawn: list[DrawnToken] = []
        if step.drawing:
            num_top = num_top_for([sequence.params.logprobs for sequence in step.drawing])
            draws = self.runner.draw(forwarded, self._rows(step, share.masks), num_top)
            token_ids, *logprobs = OnTheWay([draws.token_ids, *draws.logprobs]).wait()
            for sequence, outcome in zip(
                step.drawing, outcomes(token_ids.tolist(), logprobs, step.drawing, {}), strict=True
            ):
                if isinstance(outcome, Undrawable):
                    drawn.append(DrawnToken(0, None, outcome.reason))
                else:
                    sequence.token_ids.append(outcome.token_id)
                    drawn.append(DrawnToken(outcome.token_id, outcome.logprobs))
        scores.read()
        return RankAnswer(tuple(drawn), tuple(self._take_scores(pieces)))

    def follow_books(self, share: RankShare) -> None:
        """What rank 0's books say happened to this cache, and the requests that are new here."""
        for slot, max_tokens in share.changes:
            if max_tokens == 0:
                self.cache.release(slot)
                self._requests.pop(slot, None)
            elif (given := self.cache.admit(max_tokens)) != slot:
                raise RanksDiverged(f"the cache gave slot {given} where rank 0's books gave {slot}")
        for opening in share.openings:
            self._requests[opening.slot] = Sequence(
                params=opening.params, token_ids=list(opening.token_ids), prompt_len=opening.prompt_len,
                max_len=opening.max_len, eos_token_id=_NO_EOS, slot=opening.slot, num_scored=opening.num_scored,
            )  # fmt: skip

    def _request(self, slot: int) -> Sequence:
        if slot not in self._requests:
            raise RanksDiverged(f"the plan runs slot {slot}, which holds no request here")
        return self._requests[slot]

    def _rows(self, step: StepInput, masks: SequenceOf[tuple[int, tuple[int, ...]]]) -> SamplingRows:
        """The rows to draw from, with what rank 0 says their rules allow."""
        rows = SamplingRows(step.draw_slots, step.draw_positions)
        if not masks:
            return rows
        given, slots = dict(masks), [sequence.slot for sequence in step.drawing]
        nothing = [0] * len(masks[0][1])
        bits = torch.tensor([given.get(slot, nothing) for slot in slots if slot is not None], dtype=torch.int32)
        is_masked = torch.tensor([slot in given for slot in slots], dtype=torch.int32)
        device = self.cache.device
        return replace(rows, mask=to_device(bits, device), is_masked=to_device(is_masked, device))

    def _take_scores(self, pieces: SequenceOf[Piece]) -> Iterator[tuple[int, tuple[TokenLogprobs, ...]]]:
        """What was scored in this step; the requests here keep nothing of it."""
        for piece in pieces:
            found, piece.sequence.prompt_logprobs = piece.sequence.prompt_logprobs, []
            if found:
                yield piece.slot, tuple(one for one in found if one is not None)


class RollingChecksum:
    """Of every plan and of what one rank drew: rank 0 and that rank must come to the same number in every step."""

    def __init__(self) -> None:
        self._value = 0

    def add(self, payload: bytes) -> None:
        self._value = zlib.crc32(payload, self._value)

    def add_answer(self, answer: RankAnswer) -> int:
        self.add(pack(encode_answer(0, 0, answer)))
        return self._value


def follow(
    executor: RankExecutor, link: Follower, rank: int, make_drafts: Callable[[], KVCacheManager]
) -> None:  # fmt: skip
    """Do what rank 0 says until it ends."""
    last_step, checksum = 0, RollingChecksum()
    while (payload := link.work()) is not None:
        kind, *numbers = unpack(payload)
        if kind != Work.STEP:
            serve_padding(executor.runner.model, executor.cache, make_drafts, Work(kind), numbers)
            link.answer(b"")
            continue
        step, num_rows, share = decode_plan(numbers, rank)
        if step != last_step + 1:
            raise RanksDiverged(f"plan {step} arrived after plan {last_step}")
        last_step = step
        checksum.add(payload)
        answer = executor.run(share, num_rows)
        link.answer(pack(encode_answer(step, checksum.add_answer(answer), answer)))


@torch.no_grad()
def serve_padding(
    model: Transformer, cache: KVCacheManager, make_drafts: Callable[[], KVCacheManager], work: Work, numbers: list[int]
) -> None:
    """Rows of padding through the same layers as rank 0's rows: for calls outside the engine. `make_drafts` makes a
    cache that has the MTP block's layer."""
    num_rows, layer_idx = numbers
    _, batch = padding_batch(num_rows, cache.block_table)
    if work is Work.FORWARD:
        model.forward(batch, cache.handle)
        return
    streams = model.context.window_freqs.new_zeros(
        (num_rows, model.config.hc_mult, model.config.hidden_size), dtype=model.context.dtype
    )
    if work is Work.BLOCK:
        model.block(layer_idx, streams, cache.handle(layer_idx), batch)
        return
    drafts = make_drafts()
    handle = drafts.handle(model.config.num_hidden_layers + layer_idx)
    model.mtp(layer_idx, streams, padding_batch(num_rows, drafts.block_table)[1], handle)
