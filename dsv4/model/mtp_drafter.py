"""`MtpDrafter`: drafts by recursion of one MTP block.

Row t of the block has the main streams of token t and the id of token t + 1, stands at position t, and predicts token
t + 2. So the row before the anchor gives the first draft. Every further one comes from the block's own streams of the
step before and the draft just chosen, one position on. The block was trained for one step: later drafts are worse.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import LayerCacheHandle
from dsv4.config import MAX_MTP_DRAFTS
from dsv4.model.block import BlockOutput
from dsv4.model.drafter import Choose, DraftEnds, Proposal
from dsv4.model.transformer import Transformer


class MtpTap:
    """The streams after the target's last layer, before its head."""

    hidden: Tensor

    def __call__(self, layer_idx: int, output: BlockOutput) -> None:
        self.hidden = output.streams  # of the last layer that calls


class MtpDrafter:
    """See `Drafter`. `cache(layer_idx)` gives the handle of a layer, the MTP block's behind the main ones."""

    def __init__(self, model: Transformer, cache: Callable[[int], LayerCacheHandle], block_table: Tensor) -> None:
        assert model.weights.mtp, "a model without an MTP block"
        self._model = model
        self._handle = cache(model.config.num_hidden_layers)
        self._block_table = block_table

    @property
    def max_drafts(self) -> int:
        return MAX_MTP_DRAFTS

    @property
    def rows_per_request(self) -> int:
        return 1

    def tap(self, num_tokens: int) -> MtpTap:
        return MtpTap()

    def extend(self, batch: TokenBatch, hidden: Tensor, next_ids: Tensor) -> Tensor | None:
        """hidden: main streams [T, n, D] -> the block's streams [T, n, D]."""
        return self._model.mtp(0, hidden, replace(batch, token_ids=next_ids), self._handle)

    def propose(self, ends: DraftEnds, extended: Tensor | None, num_drafts: int, choose: Choose) -> Proposal:
        assert extended is not None and 1 <= num_drafts <= self.max_drafts, num_drafts
        streams = extended.index_select(0, ends.rows)  # [R, n, D]
        drafts: list[Tensor] = []
        for i in range(num_drafts):
            if i > 0:
                positions = ends.positions + (i - 1)
                batch = TokenBatch(drafts[-1], positions, ends.slots, positions, positions + 1, self._block_table)
                streams = self._model.mtp(0, streams, batch, self._handle)
            drafts.append(choose(self._model.mtp_logits(0, streams), i))
        return Proposal(torch.stack(drafts, 1))
