"""`SlotStates`: how each slot draws, on the device. A row is written when a request takes the slot, not every step."""

from collections.abc import Iterable
from weakref import ref

import torch
from torch import Tensor

from dsv4.cache.transfer import to_device
from dsv4.engine.request import Request
from dsv4.engine.schedule.plan import Piece
from dsv4.ops.sampling import HAS_BIAS, HAS_PENALTIES, IN_PROMPT, SamplingState
from dsv4.request import DRAW_REALS, SamplingParams

_INTEGERS = ("top_k", "seeds", "prompt_lens", "flags")


class SlotStates:
    """The `SamplingState` of one engine. `state` never moves: captured graphs read it."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.state = SamplingState.empty(num_slots, vocab_size, device)
        self._device = device
        self._owners: list[ref[Request] | None] = [None] * num_slots  # last owner of each slot, as a weak reference

    def take(self, pieces: Iterable[Piece]) -> None:
        """Write the rows of the slots that have changed hands since the last step."""
        taken = [piece for piece in pieces if self._owner(piece.slot) is not piece.request]
        if not taken:
            return
        for piece in taken:
            self._owners[piece.slot] = ref(piece.request)
        params = [piece.request.params for piece in taken]
        reals = torch.tensor([[getattr(one, name) for one in params] for name in DRAW_REALS], dtype=torch.float32)
        integers = torch.tensor(
            [
                [piece.slot for piece in taken],
                [one.top_k for one in params],
                [one.seed for one in params],
                [piece.request.prompt_len for piece in taken],
                [_flags(one) for one in params],
            ]
        )
        slots, *columns = to_device(integers, self._device).unbind(0)  # [N] each
        for name, values in zip(_INTEGERS, columns, strict=True):
            column: Tensor = getattr(self.state, name)
            column.index_copy_(0, slots, values.to(column.dtype))
        for name, values in zip(DRAW_REALS, to_device(reals, self._device).unbind(0), strict=True):
            getattr(self.state, name).index_copy_(0, slots, values)
        for piece in taken:
            if piece.request.params.has_penalties:
                self._count(piece)
            if piece.request.params.has_bias:
                self._lean(piece)

    def _owner(self, slot: int) -> Request | None:
        owner = self._owners[slot]
        return None if owner is None else owner()

    def _count(self, piece: Piece) -> None:
        """What the request has said so far: its prompt, and its output if it was preempted."""
        request, counts = piece.request, self.state.token_counts[piece.slot]
        ids = to_device(torch.tensor(request.token_ids), self._device)
        output = ids[request.prompt_len :]
        counts.zero_()
        counts.index_fill_(0, ids[: request.prompt_len], IN_PROMPT)
        counts.index_add_(0, output, torch.ones_like(output, dtype=counts.dtype))

    def _lean(self, piece: Piece) -> None:
        """The request's biases, and -inf where a token is forbidden for good."""
        params, bias = piece.request.params, self.state.bias[piece.slot]
        if params.allowed_token_ids is None:
            bias.zero_()
        else:
            allowed = [*params.allowed_token_ids, *([] if params.ignore_eos else [piece.request.eos_token_id])]
            bias.fill_(float("-inf"))
            bias.index_fill_(0, to_device(torch.tensor(allowed), self._device), 0.0)
        if params.logit_bias:
            ids = to_device(torch.tensor(list(params.logit_bias)), self._device)
            values = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
            bias.index_add_(0, ids, to_device(values, self._device))
        banned = [words[0] for words in params.bad_words_ids if len(words) == 1]
        if banned:
            bias.index_fill_(0, to_device(torch.tensor(banned), self._device), float("-inf"))


def _flags(params: SamplingParams) -> int:
    return HAS_PENALTIES * params.has_penalties | HAS_BIAS * params.has_bias
