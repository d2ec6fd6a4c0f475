"""`InFlightStep`: a step between its launch and its end, on any rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from dsv4.cache.transfer import HostCopy, to_device
from dsv4.engine.draft.counts import Offer
from dsv4.engine.draft.host_copy import launch_drafts
from dsv4.engine.ranks.scheduler import StepSize
from dsv4.engine.run.bucket import Forwarded
from dsv4.engine.run.runner import Runner
from dsv4.engine.schedule.kept import Outcome
from dsv4.engine.schedule.plan import StepPlan
from dsv4.engine.step.builder import StepBuilder, StepInput
from dsv4.engine.step.sampler import Masks, num_top_for
from dsv4.engine.step.scores import Scores
from dsv4.ops.sampling import SamplingRows


@dataclass
class InFlightStep:
    """A step from its launch until it is collected.

    plan, own        what runs, and what of it runs in this process
    num_drafts       that the drafter is asked for behind it
    forwarded        None once the draw is launched
    drawn            None until then
    drafted          None if nothing was asked for
    experts          those chosen, where somebody wants to know
    number           of its plan, where rank 0 counts them
    stuck            by row that draws here, why it cannot
    stuck_elsewhere  the same on each of the other ranks
    """

    plan: StepPlan
    own: StepPlan
    step: StepInput
    num_drafts: int
    forwarded: Forwarded | None
    scores: Scores
    drawn: HostCopy | None = None
    drafted: HostCopy | None = None
    experts: HostCopy | None = None
    number: int = 0
    stuck: dict[int, str] = field(default_factory=dict)
    stuck_elsewhere: Sequence[dict[int, str]] = ()

    @classmethod
    def launch(cls, runner: Runner, builder: StepBuilder, plan: StepPlan, size: StepSize) -> InFlightStep:
        """The forward call of a plan whose pieces are all this process's."""
        step = builder.build(plan, pad_to=size.num_rows, num_requests=size.num_requests)
        runner.slots.take(plan.pieces)
        forwarded = runner.forward(step.batch, step.draw_rows)
        return cls(plan, plan, step, size.num_drafts, forwarded, Scores.launch(runner, forwarded, plan))

    def draw(self, runner: Runner, masks: Masks) -> None:
        """The draw, and the drafter behind it. Whatever its requests drew before is known to them, or does not matter
        to them."""
        assert self.forwarded is not None
        step, device = self.step, runner.cache.device
        rows = SamplingRows(step.draw_slots, step.draw_positions, drafts=step.draw_drafts)
        if masks.bits is not None and masks.is_masked is not None:
            bits, is_masked = to_device(masks.bits, device), to_device(masks.is_masked, device)
            rows = replace(rows, mask=bits, is_masked=is_masked)
        num_top = num_top_for([request.params.logprobs for request in step.drawing])
        drawn = runner.draw(self.forwarded, rows, num_top) if step.drawing else None
        token_ids = None if drawn is None else drawn.token_ids
        # before the drafter: the host need not wait for it
        self.drawn = HostCopy([] if drawn is None else [drawn.token_ids, *drawn.logprobs])
        self.drafted = launch_drafts(runner, self.forwarded, step, token_ids, self.num_drafts)
        self.stuck = masks.stuck
        self.forwarded = None  # its memory may be used again

    @property
    def is_drafting(self) -> bool:
        """Whether the next step depends on what it drew."""
        return self.num_drafts > 0 or any(piece.num_drafts for piece in self.plan.pieces)


class RemoteResults(NamedTuple):
    """What requests on other ranks drew, in the plan's order, and what drafters there expect of them."""

    drawn: list[Outcome]
    offers: list[Offer]
