"""`InFlightStep`: a step between its launch and its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4.cache.transfer import HostCopy, to_device
from dsv4.engine.draft.counts import Offer
from dsv4.engine.run.bucket import Forwarded
from dsv4.engine.run.runner import Runner
from dsv4.engine.schedule.kept import Outcome, kept_rows
from dsv4.engine.schedule.plan import StepPlan
from dsv4.engine.step.builder import StepBuilder, StepInput
from dsv4.engine.step.masks import Masks
from dsv4.engine.step.replays import Replays
from dsv4.engine.step.sampler import Undrawable, num_top_for, outcomes, undrawable
from dsv4.engine.step.scores import Scores
from dsv4.engine.step.size import StepSize
from dsv4.ops.sampling import NOTHING_ALLOWED, SamplingRows


@dataclass
class InFlightStep:
    """A step from its launch until it is collected.

    plan        what runs
    num_drafts  that the drafter is asked for behind it
    launched    the clock (`time.perf_counter`) then
    forwarded   None once the draw is launched
    drawn       None until then
    drafted     None if nothing was asked for
    experts     those chosen, where an observer wants to know
    replays     experts and entries of the requests that asked for them
    stuck       by row that draws, why it cannot
    """

    plan: StepPlan
    step: StepInput
    num_drafts: int
    launched: float
    forwarded: Forwarded | None
    scores: Scores
    drawn: HostCopy | None = None
    drafted: HostCopy | None = None
    experts: HostCopy | None = None
    replays: Replays | None = None
    stuck: dict[int, str] = field(default_factory=dict)

    @classmethod
    def launch(
        cls, runner: Runner, builder: StepBuilder, plan: StepPlan, size: StepSize, *, tells_experts: bool = False
    ) -> InFlightStep:  # fmt: skip
        """The forward call of a plan, padded to a size."""
        runner.capture_next(is_idle=False)  # all that was launched before has been drawn
        num_rows = max(plan.num_tokens, size.num_rows)
        target = None if size.is_direct else runner.step_buffer(num_rows, plan.num_drawing)
        step = builder.build(plan, pad_to=size.num_rows, num_requests=size.num_requests, target=target)
        runner.slots.take(plan.others)  # a row was one of these when it was launched first
        forward = runner.forward_with_picks if size.is_direct else runner.forward
        forwarded = forward(step.batch, step.draw_rows)
        made = cls(plan, step, size.num_drafts, time.perf_counter(), forwarded, Scores.launch(runner, forwarded, plan))
        made.replays = Replays.launch(runner, forwarded, plan)
        if tells_experts:
            made.experts = HostCopy([torch.stack(forwarded.experts)[:, : step.num_tokens]], runner.cache.device)
        return made

    def draw(self, runner: Runner, masks: Masks) -> None:
        """The draw, and the drafter behind it. Precondition: earlier tokens of requests with rules have been read."""
        assert self.forwarded is not None
        step, device = self.step, runner.cache.device
        rows = SamplingRows(step.draw_slots, step.draw_positions, drafts=step.draw_drafts)
        if masks.rows is not None and masks.words is not None:
            rows = replace(rows, **_masks_of_rows(len(step.drawing), masks.rows, masks.words, device))
        asked = [piece.request.params.logprobs for piece in self.plan.others if piece.draws]
        num_top = num_top_for([*asked, *(self.plan.rows.counts or ())])
        drawn = runner.draw(self.forwarded, rows, num_top) if step.drawing else None
        token_ids = None if drawn is None else drawn.token_ids
        # before the drafter: the host need not wait for it
        self.drawn = HostCopy([] if drawn is None else [drawn.token_ids, *drawn.logprobs], device)
        if step.fed is not None:
            drafted = runner.draft(self.forwarded, step.batch, token_ids, step.fed, self.num_drafts)
            parts = [] if drafted is None else [part for part in drafted if part is not None]
            self.drafted = HostCopy(parts, device) if parts else None
        self.stuck = masks.stuck
        self.forwarded = None  # its memory may be used again

    def tell_experts(self, observers: Sequence[Callable[[Tensor], None]], drawn: Sequence[Outcome]) -> None:
        """To each observer, and to requests, of the tokens that count. `drawn`: what pieces besides rows drew."""
        if self.replays is not None:
            self.replays.read(self.plan.others, drawn)
        if self.experts is None or not observers:
            return
        chosen = self.experts.wait()[0]
        if any(piece.num_drafts for piece in self.plan.others):
            num_rows = len(self.plan.rows)
            kept = [*range(num_rows), *(num_rows + row for row in kept_rows(self.plan.others, drawn))]
            chosen = chosen[:, kept]
        for observer in tuple(observers):  # one may remove itself
            observer(chosen)

    def without_stuck(self, token_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Draws of rows that decode, where those of rows that cannot draw are no tokens; changed in place."""
        if self.stuck:
            token_ids[[row for row in self.stuck if row < len(token_ids)]] = NOTHING_ALLOWED
        return token_ids

    def undrawable(self, row: int, code: int) -> Undrawable:
        """Why a row that decodes drew no token."""
        if row in self.stuck:
            return Undrawable(self.stuck[row])
        return undrawable(code, len(self.plan.rows.requests[row].token_ids))

    def outcomes(self, found: Sequence[Tensor]) -> list[Outcome]:
        """What the pieces besides rows drew; `found` is what `drawn` brought."""
        num_rows, requests = len(self.plan.rows), self.step.drawing[len(self.plan.rows) :]
        if not requests:
            return []
        stuck = {row - num_rows: reason for row, reason in self.stuck.items()}
        token_ids, *logprobs = (part[num_rows:] for part in found)
        return outcomes(token_ids.tolist(), logprobs, requests, stuck)

    @property
    def is_drafting(self) -> bool:
        """Whether the next step depends on what it drew."""
        return self.num_drafts > 0 or any(piece.num_drafts for piece in self.plan.others)


def _masks_of_rows(num_rows: int, masked: Tensor, words: Tensor, device: torch.device) -> dict[str, Tensor]:
    """The parts of `SamplingRows` that say what its rows may draw; `masked` [M] of them have a rule."""
    places = to_device(masked, device)
    mask = torch.empty((num_rows, words.shape[1]), dtype=torch.int32, device=device)  # read where `is_masked` says so
    is_masked = torch.zeros(num_rows, dtype=torch.int32, device=device)
    return {
        "mask": mask.index_copy_(0, places, to_device(words, device)), "is_masked": is_masked.index_fill_(0, places, 1)
    }  # fmt: skip


def read_offers(drafted: HostCopy | None, num_requests: int) -> list[Offer]:
    """Those of the requests that drew, in their order; none if nothing was asked for."""
    if drafted is None:
        return []
    drafts, *confidences = (part[:num_requests].tolist() for part in drafted.wait())
    sure: Sequence[Sequence[float] | None] = confidences[0] if confidences else [None] * num_requests
    return [Offer(tuple(one), None if rates is None else tuple(rates)) for one, rates in zip(drafts, sure, strict=True)]
