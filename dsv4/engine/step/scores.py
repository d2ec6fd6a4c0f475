"""`Scores`: log-probabilities of a step's prompt tokens, for the requests that asked for them."""

from __future__ import annotations

import torch

from dsv4.cache.transfer import HostCopy, to_device
from dsv4.engine.request import Request
from dsv4.engine.run.bucket import Forwarded
from dsv4.engine.run.runner import Runner
from dsv4.engine.schedule.plan import StepPlan
from dsv4.engine.step.sampler import SCORED_ROWS, num_top_for, token_logprobs


class Scores:
    """Launched after a step's forward call, read when it is collected.

    The row of the token at position p says how likely the one at p + 1 was. It is the function a draw uses, on the same
    row: a text that was generated has, as a prompt, the log-probabilities it had then.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[Request, list[int], HostCopy]] = []

    @classmethod
    def launch(cls, runner: Runner, forwarded: Forwarded, plan: StepPlan) -> Scores:
        made = cls()
        first_row = len(plan.rows)
        for piece in plan.others:
            if piece.request.params.prompt_logprobs is not None:
                made._score(runner, forwarded, piece.request, first_row - piece.start, piece.start + piece.length)
            first_row += piece.length
        return made

    def _score(self, runner: Runner, forwarded: Forwarded, request: Request, offset: int, end: int) -> None:
        """Positions that were not scored before, up to `end`; position p is the batch's row p + `offset`."""
        num_top = num_top_for([request.params.prompt_logprobs])
        assert num_top is not None
        end, device = min(end, request.prompt_len - 1), runner.cache.device
        for start in range(request.num_scored, end, SCORED_ROWS):
            positions = range(start, min(start + SCORED_ROWS, end))
            token_ids = [request.token_ids[position + 1] for position in positions]
            padding = [0] * (SCORED_ROWS - len(positions))
            numbers = torch.tensor([[*(position + offset for position in positions), *padding], [*token_ids, *padding]])
            rows, ids = to_device(numbers, device).unbind(0)  # [SCORED_ROWS] each
            self._parts.append((request, token_ids, HostCopy(runner.score(forwarded, rows, ids, num_top), device)))
        request.num_scored = max(request.num_scored, end)

    def read(self) -> None:
        """Wait for them, and give each request its own."""
        for request, token_ids, part in self._parts:
            scores, count = part.wait(), request.params.prompt_logprobs or 0
            request.prompt_logprobs += [
                token_logprobs(token_id, row, scores, count) for row, token_id in enumerate(token_ids)
            ]
