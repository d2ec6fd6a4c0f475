"""`Replays`: which experts and entries a step's tokens were computed with, for the requests that asked for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dsv4.cache.transfer import HostCopy, to_device
from dsv4.config import CSA_RATIO
from dsv4.engine.run.bucket import Forwarded
from dsv4.engine.run.runner import Runner
from dsv4.engine.schedule.kept import Outcome, by_piece, num_accepted
from dsv4.engine.schedule.plan import Piece, StepPlan
from dsv4.replay import Rows


class Replays:
    """Launched after a step's forward call, read when its draws are known. As small as the numbers are: one byte for
    each of up to 256 experts, two for an entry of up to 2^16."""

    def __init__(self, runner: Runner, forwarded: Forwarded, plan: StepPlan) -> None:
        self._pieces: list[Piece] = []
        rows: list[int] = []
        first_row = len(plan.rows)
        for piece in plan.others:
            if piece.request.replay is not None:
                self._pieces.append(piece)
                rows += range(first_row, first_row + piece.length)
            first_row += piece.length
        config, device = runner.model.config, runner.cache.device
        chosen = to_device(torch.tensor(rows), device)
        self._types = ("uint8" if config.n_routed_experts <= 1 << 8 else "uint16", "uint16")
        experts = torch.stack(forwarded.experts, 1).index_select(0, chosen)  # [N, layers, k]: few launches
        kept = [experts.to(torch.uint8 if self._types[0] == "uint8" else torch.int16)]
        if forwarded.picks:
            most = max(piece.start + piece.length for piece in self._pieces) // CSA_RATIO
            is_short = runner.cache.limits.max_context_tokens // CSA_RATIO < 1 << 16
            self._types = (self._types[0], "uint16" if is_short else "uint32")
            picks = [one[:, :most] for one in forwarded.picks]
            narrow = torch.int16 if is_short else torch.int32
            # layer by layer: those of a long chunk are large
            kept.append(torch.stack([one.index_select(0, chosen).to(narrow) for one in picks], 1))
        self._copy = HostCopy(kept, device)

    @classmethod
    def launch(cls, runner: Runner, forwarded: Forwarded, plan: StepPlan) -> Replays | None:
        """None if no request of the plan asks for them."""
        is_wanted = any(piece.request.replay is not None for piece in plan.others)
        return cls(runner, forwarded, plan) if is_wanted else None

    def read(self, pieces: Sequence[Piece], drawn: Sequence[Outcome]) -> None:
        """Give each request those of its tokens, without drafts that did not come true. `pieces` drew `drawn`."""
        tables: list[Rows] = [
            part.numpy().view(dtype) for part, dtype in zip(self._copy.wait(), self._types, strict=False)
        ]
        experts = tables[0]
        # a model without CSA layers picks nothing
        picks = tables[1] if tables[1:] else np.zeros((len(experts), 0, 0), dtype=self._types[1])
        found = {id(piece.request): outcomes for piece, outcomes in by_piece(pieces, drawn)}
        first = 0
        for piece in self._pieces:
            log = piece.request.replay
            assert log is not None
            count = piece.length - piece.num_drafts + num_accepted(piece, found[id(piece.request)])
            here = slice(first, first + count)
            log.add(
                piece.start, _own(experts, here) if log.wants_experts else None,
                _own(picks, here) if log.wants_picks else None,
            )  # fmt: skip
            first += piece.length


def wants_picks(plan: StepPlan) -> bool:
    return any(piece.request.params.indexer_topk for piece in plan.others)


def _own(table: Rows, here: slice) -> Rows:
    return table[here].copy()
