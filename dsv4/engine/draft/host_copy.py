"""What a drafter says behind a step: launched after the draw, read when the step is collected."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dsv4.cache.transfer import HostCopy
from dsv4.engine.draft.counts import Offer
from dsv4.engine.run.bucket import Forwarded
from dsv4.engine.run.runner import Runner
from dsv4.engine.step.builder import StepInput


def launch_drafts(
    runner: Runner, forwarded: Forwarded, step: StepInput, token_ids: Tensor | None, num_drafts: int
) -> HostCopy | None:
    """The drafter's rows of the step's tokens, and `num_drafts` drafts behind what was drawn; None for 0, or where
    there is no drafter."""
    if step.fed is None:
        return None
    drafted = runner.draft(forwarded, step.batch, token_ids, step.fed, num_drafts)
    return None if drafted is None else HostCopy([part for part in drafted if part is not None], runner.cache.device)


def read_offers(drafted: HostCopy | None, num_requests: int) -> list[Offer]:
    """Those of the requests that drew, in their order; none if nothing was asked for."""
    if drafted is None:
        return []
    drafts, *confidences = (part[:num_requests].tolist() for part in drafted.wait())
    sure: Sequence[Sequence[float] | None] = confidences[0] if confidences else [None] * num_requests
    return [Offer(tuple(one), None if rates is None else tuple(rates)) for one, rates in zip(drafts, sure, strict=True)]
