"""`Flight`: a step between its launch and its end, as the engine keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dsv4.cache.transfer import OnTheWay
from dsv4.engine.bucket import Forwarded
from dsv4.engine.drafting.choice import Offer
from dsv4.engine.kept import Outcome
from dsv4.engine.plan import StepPlan
from dsv4.engine.scores import Scores
from dsv4.engine.step import StepInput


@dataclass
class Flight:
    """A step from its launch until it is collected.

    plan, own        what runs, and what of it runs in this process
    num_drafts       that the drafter is asked for behind it
    drawn            None until the draw is launched
    drafted          None if nothing was asked for
    stuck            by row that draws here, why it cannot
    stuck_elsewhere  the same on each of the other ranks
    """

    plan: StepPlan
    own: StepPlan
    step: StepInput
    num_drafts: int
    forwarded: Forwarded | None
    scores: Scores
    experts: OnTheWay | None
    drawn: OnTheWay | None = None
    drafted: OnTheWay | None = None
    stuck: dict[int, str] = field(default_factory=dict)
    stuck_elsewhere: Sequence[dict[int, str]] = ()

    @property
    def is_drafting(self) -> bool:
        """Whether the next step depends on what it drew."""
        return self.num_drafts > 0 or any(piece.num_drafts for piece in self.plan.pieces)


class Elsewhere(NamedTuple):
    """What requests on other ranks drew, in the plan's order, and what drafters there expect of them."""

    drawn: list[Outcome]
    offers: list[Offer]
