"""`Scores`: log-probabilities of a step's prompt tokens, for the requests that asked for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsv4.cache.transfer import HostCopy, to_device
from dsv4.engine.request import Request
from dsv4.engine.run.bucket import Forwarded
from dsv4.engine.run.runner import Runner
from dsv4.engine.schedule.plan import StepPlan
from dsv4.engine.step.sampler import num_top_for, scored_rows
from dsv4.request import TokenLogprobs


class Scores:
    """Launched after a step's forward call, read when it is collected.

    The row of the token at position p says how likely the one at p + 1 was. It is the function a draw uses, on the same
    row: a text that was generated has, as a prompt, the log-probabilities it had then.
    """

    def __init__(self) -> None:
        self._asked: list[tuple[Request, list[int]]] = []  # with the tokens scored here
        self._num_top = 0
        self._parts: list[tuple[int, HostCopy]] = []  # each with its number of tokens, in order

    @classmethod
    def launch(cls, runner: Runner, forwarded: Forwarded, plan: StepPlan) -> Scores:
        made, rows = cls(), list[int]()
        first_row = len(plan.rows)
        for piece in plan.others:
            if piece.request.params.prompt_logprobs is not None:
                rows += made._ask(piece.request, first_row - piece.start, piece.start + piece.length)
            first_row += piece.length
        made._launch(runner, forwarded, rows)
        return made

    def _ask(self, request: Request, offset: int, end: int) -> range:
        """The batch's rows of positions that were not scored before, up to `end`; `offset` is that of position 0."""
        end = min(end, request.prompt_len - 1)
        positions = range(request.num_scored, end)
        if positions:
            self._asked.append((request, request.token_ids[positions.start + 1 : end + 1].tolist()))
            self._num_top = max(self._num_top, num_top_for([request.params.prompt_logprobs or None]) or 0)
        request.num_scored = max(request.num_scored, end)
        return range(positions.start + offset, end + offset)

    def _launch(self, runner: Runner, forwarded: Forwarded, rows: Sequence[int]) -> None:
        token_ids = [token_id for _, ids in self._asked for token_id in ids]
        device, start = runner.cache.device, 0
        while start < len(rows):
            size = scored_rows(len(rows) - start)
            here = slice(start, start + size)
            numbers = torch.zeros(2, size, dtype=torch.int64)
            num_here = len(rows[here])
            numbers[:, :num_here] = torch.tensor([rows[here], token_ids[here]])
            score_rows, score_ids = to_device(numbers, device).unbind(0)  # [size] each
            scores = runner.score(forwarded, score_rows, score_ids, self._num_top)
            self._parts.append((num_here, HostCopy(scores, device)))
            start += size

    def read(self) -> None:
        """Wait for them, and give each request its own."""
        found: list[tuple[float, list[int], list[float]]] = []
        for num_here, part in self._parts:
            found += zip(*(scores[:num_here].tolist() for scores in part.wait()), strict=True)
        start = 0
        for request, token_ids in self._asked:
            count, own = request.params.prompt_logprobs or 0, found[start : start + len(token_ids)]
            start += len(token_ids)
            request.prompt_logprobs += [
                TokenLogprobs(token_id, logprob, tuple(zip(top_ids[:count], top[:count], strict=True)))
                for token_id, (logprob, top_ids, top) in zip(token_ids, own, strict=True)
            ]
