"""`Exchange`: what a layer's experts need of other ranks. Inputs and routing go out, parts come back.

    rank A: x, routing --dispatch--> every rank: rows of all ranks
    owners:            moe_parts on the rows that chose their experts
    rank A: parts      <--collect--  owners; A folds them in ascending expert order, its shared expert last

Every product and every sum is made whole, by one rank, in the order of one process: the bits cannot depend on how many
there are. Ranks call in step and with the same number of rows; those with fewer pad, those with none pad too.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dsv4.dist.group import Group
from dsv4.dist.shares import expert_range

NO_EXPERT = -1  # an expert id that stands for none: padding, or an expert of another rank


class Rows(NamedTuple):
    """The rows of all N ranks, [N T] of them, rank by rank.

    x        [N T, D]
    experts  int64 [N T, k]: places in this rank's stacks, -1 where an expert is not its own
    weights  [N T, k]
    routing  int64 [T, k]: the expert ids this rank's own tokens chose
    peer_buffers    int64 [N] or None: where ranks keep the parts of their own tokens, if they can be stored there
    """

    x: Tensor
    experts: Tensor
    weights: Tensor
    routing: Tensor
    peer_buffers: Tensor | None = None


class Exchange(Protocol):
    """One layer at a time: `dispatch`, then `collect`. `size`: ranks. `can_capture`: whether a CUDA graph may hold it."""

    @property
    def size(self) -> int: ...

    @property
    def can_capture(self) -> bool: ...

    def dispatch(self, x: Tensor, experts: Tensor, weights: Tensor, slots: Tensor) -> Rows:
        """x [T, D], experts and weights [T, k] of this rank -> those of all ranks. Rows whose slot [T] is negative are
        padding: they choose no expert, and cost no owner anything."""

    def collect(self, parts: Tensor | None, rows: Rows) -> Tensor:
        """parts [N T, k, D], those of this rank's experts complete -> this rank's own [T, k, D], from all ranks. None:
        they have been stored at `rows.peer_buffers`.

        What belongs to no expert holds anything."""


class CollectiveExchange:
    """Through collectives that move and do not add. An owner sends back the parts it made and nothing else.

    How many those are is read by the host, so a call cannot be captured.
    """

    can_capture = False

    def __init__(self, group: Group, num_experts: int) -> None:
        self._group = group
        self.size = group.size
        ranges = [expert_range(num_experts, group.size, rank) for rank in range(group.size)]
        self._own = ranges[group.rank]
        self._owners = torch.tensor([rank for rank, own in enumerate(ranges) for _ in own])  # [E]

    def dispatch(self, x: Tensor, experts: Tensor, weights: Tensor, slots: Tensor) -> Rows:
        wanted = experts.to(torch.int64).masked_fill((slots < 0).unsqueeze(-1), NO_EXPERT)
        given = x, wanted, weights
        mine = torch.cat([_as_bytes(part) for part in given], 1)  # [T, bytes of a row]
        gathered = self._group.all_gather(mine.flatten()).reshape(-1, mine.shape[1])
        widths = [part.shape[1] * part.element_size() for part in given]
        columns = gathered.split(widths, 1)
        x, routing, weights = (
            column.contiguous().view(part.dtype) for column, part in zip(columns, given, strict=True)
        )
        is_own = (routing >= self._own.start) & (routing < self._own.stop)
        return Rows(x, torch.where(is_own, routing - self._own.start, NO_EXPERT), weights, wanted)

    def collect(self, parts: Tensor | None, rows: Rows) -> Tensor:
        assert parts is not None  # there are no peers' buffers to store them
        size = self._group.size
        num_rows, top_k, dim = parts.shape
        num_tokens = num_rows // size
        is_own = rows.experts >= 0  # [N T, k]
        num_sent = is_own.view(size, -1).sum(1).tolist()
        routing = rows.routing.flatten().cpu()  # [T k]
        owners = torch.where(routing >= 0, self._owners[routing.clamp_min(0)], NO_EXPERT)
        places = [(owners == owner).nonzero().flatten() for owner in range(size)]
        received = self._group.all_to_all(_as_bytes(parts[is_own]), num_sent, [len(place) for place in places])
        collected = parts.new_zeros((num_tokens * top_k, dim))
        collected[torch.cat(places).to(parts.device)] = received.view(parts.dtype)
        return collected.view(num_tokens, top_k, dim)


class StandInExchange:
    """Tensors of the right shapes and nothing in them: for calls on "meta", which only compile."""

    def __init__(self, exchange: Exchange) -> None:
        self.size, self.can_capture = exchange.size, exchange.can_capture

    def dispatch(self, x: Tensor, experts: Tensor, weights: Tensor, slots: Tensor) -> Rows:
        of_all = [part.new_empty((self.size * len(part), part.shape[1])) for part in (x, experts.long(), weights)]
        peer_buffers = experts.new_empty(self.size, dtype=torch.int64) if self.can_capture else None
        return Rows(of_all[0], of_all[1], of_all[2], experts, peer_buffers)

    def collect(self, parts: Tensor | None, rows: Rows) -> Tensor:
        return rows.x.new_empty((*rows.routing.shape, rows.x.shape[1]))


def _as_bytes(rows: Tensor) -> Tensor:
    """[R, ...] -> uint8 [R, bytes]."""
    width = rows[0].numel() * rows.element_size() if len(rows) else rows.shape[-1] * rows.element_size()
    return rows.contiguous().view(torch.uint8).view(len(rows), width)
