"""`ReplayLog`: what a request's tokens were computed with: the experts that every layer chose, and the entries that the
indexer of every CSA layer picked. So a trainer can run its own model along the same paths. No torch."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, TypeAlias

from dsv4.request import SamplingParams

if TYPE_CHECKING:
    from numpy.typing import NDArray

Rows: TypeAlias = "NDArray[Any]"  # [N, layers, k]


class ReplayLog:
    """Rows of the tokens from number `start` of the request on; those up to `end` are known.

    A token that is computed again (after a preemption) keeps its first rows, which are those its successor was drawn
    with. experts: ascending ids. picks: ascending entries, then the largest number of the dtype.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.start = self.end = params.replay_start
        self.wants_experts, self.wants_picks = params.routed_experts, params.indexer_topk
        self._parts: list[tuple[Rows | None, Rows | None]] = []

    @classmethod
    def of(cls, params: SamplingParams) -> ReplayLog | None:
        """None where nothing was asked for."""
        return cls(params) if params.routed_experts or params.indexer_topk else None

    def add(self, position: int, experts: Rows | None, picks: Rows | None) -> None:
        """Of tokens from `position` on."""
        rows = experts if experts is not None else picks
        assert rows is not None and position <= self.end, (position, self.end)
        num_known = self.end - position
        if num_known < len(rows):
            self._parts.append(
                (None if experts is None else experts[num_known:], None if picks is None else picks[num_known:])
            )
            self.end = position + len(rows)

    def take_new(self) -> tuple[int, Rows | None, Rows | None] | None:
        """What came since the last time, and the number of its first token; it is kept no longer."""
        if not self._parts:
            return None
        experts, picks = self._joined()
        rows = experts if experts is not None else picks
        assert rows is not None
        self._parts.clear()
        return self.end - len(rows), experts, picks

    def before(self, num_tokens: int) -> tuple[Rows | None, Rows | None]:
        """Rows of the first `num_tokens` tokens but the last, which nothing was computed from."""
        experts, picks = self._joined()
        num_rows = max(0, num_tokens - 1 - self.start)
        if picks is not None:
            width = (picks[:num_rows] != _largest(picks)).sum(axis=-1).max(initial=0)
            picks = picks[:num_rows, :, :width]
        return None if experts is None else experts[:num_rows], picks

    def _joined(self) -> tuple[Rows | None, Rows | None]:
        import numpy as np

        experts = [one for one, _ in self._parts if one is not None]
        picks = [one for _, one in self._parts if one is not None]
        empty = np.zeros((0, 0, 0), dtype=np.uint8)
        width = max((one.shape[2] for one in picks), default=0)
        for place, one in enumerate(picks):
            padding = (0, 0), (0, 0), (0, width - one.shape[2])
            picks[place] = np.pad(one, padding, constant_values=_largest(one))
        return (
            (np.concatenate(experts) if experts else empty) if self.wants_experts else None,
            (np.concatenate(picks) if picks else empty) if self.wants_picks else None,
        )


def replayed(log: ReplayLog | None, num_tokens: int) -> dict[str, Rows | None]:
    """The fields of a `Completion` of `num_tokens` tokens, its prompt's included."""
    if log is None:
        return {}
    experts, picks = log.before(num_tokens)
    return {"routed_experts": experts, "indexer_topk": picks}


def _largest(rows: Rows) -> int:
    """Number of the rows' dtype, which has no sign."""
    return (1 << 8 * rows.itemsize) - 1


def encode_rows(rows: Rows, start: int) -> dict[str, Any]:
    """As JSON has them: little-endian numbers in base64, and how to read them."""
    data = base64.b64encode(rows.tobytes()).decode("ascii")
    return {"data": data, "shape": list(rows.shape), "dtype": str(rows.dtype), "start": start}
