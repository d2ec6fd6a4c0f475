"""A drafter's rounds, one by one, with everything it computed: for looking inside and for tests.

Verification is by decree: the caller says how many drafts of a round were accepted and which token came then. The
target still processes every draft, rejected ones too, as it would in a step of the engine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.manager import KVCacheManager
from dsv4.config import EngineConfig, is_size, shown
from dsv4.config.layers import LayerSpec
from dsv4.engine.draft.round import make_drafter
from dsv4.model.drafter import DraftEnds, Drafter
from dsv4.model.transformer import Transformer
from dsv4.ops.select import topk_select_ref
from dsv4.request import RequestError, check_token_ids


@dataclass(frozen=True)
class DraftRound:
    """What a drafter said behind one anchor, k drafts. fp32 (or wider) on the CPU.

    logits       [k, vocab], of which `drafts` are the largest, the lower id on a tie
    base_logits  [k, vocab], before the Markov bias; None for MTP
    confidences  [k], the probability of each draft to be accepted if those before it are; None for MTP
    """

    base_logits: Tensor | None
    logits: Tensor
    drafts: list[int]
    confidences: Tensor | None


def trace_drafts(
    model: Transformer, make_cache: Callable[[EngineConfig, Sequence[LayerSpec]], KVCacheManager],
    token_ids: list[int], chunks: Sequence[int], anchor: int, verified: Sequence[tuple[int, int]],
) -> list[DraftRound]:  # fmt: skip
    """See `LLM.draft_trace`. `make_cache(limits, schedule)` makes a cache of the model's numerics."""
    pairs = _check_verified(verified)
    anchors = check_token_ids([anchor, *(bonus for _, bonus in pairs)], model.config.vocab_size, "anchor or bonus")
    most = model.config.max_drafts
    max_tokens, room = len(token_ids) + (1 + most) * len(pairs), model.config.max_position_embeddings
    if max_tokens > room:
        raise RequestError(f"prompt and drafts may reach {max_tokens} tokens, the model's longest context is {room}")
    limits = EngineConfig(
        max_context_tokens=max_tokens, max_concurrent_requests=1, max_chunk_tokens=max_tokens, max_draft_tokens=most
    )
    cache = make_cache(limits, model.schedule)
    drafter = make_drafter(model, cache)
    assert drafter is not None and drafter.max_drafts == most
    request = _Request(model, cache, drafter, max_tokens)
    rounds = [request.prefill(token_ids, chunks, anchors[0])]
    for place, (accepted, _) in enumerate(pairs):
        if accepted > most:
            raise RequestError(f"verified[{place}] accepts {accepted} drafts, there are {most}")
        rounds.append(request.verify(anchors[place], rounds[-1].drafts, accepted, anchors[place + 1]))
    return rounds


def _check_verified(verified: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    pairs = []
    for place, pair in enumerate(verified):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not is_size(pair[0], 0):
            raise RequestError(f"verified[{place}] must be (accepted drafts, next token id), found {shown(pair)}")
        pairs.append((pair[0], pair[1]))
    return pairs


class _Request:
    """One request's target and drafter, step by step, in a cache of its own with room for rejected drafts."""

    def __init__(self, model: Transformer, cache: KVCacheManager, drafter: Drafter, max_tokens: int) -> None:
        self._model, self._cache, self._drafter = model, cache, drafter
        self._slot = cache.admit(max_tokens)

    def prefill(self, token_ids: Sequence[int], chunks: Sequence[int], anchor: int) -> DraftRound:
        """The prompt in pieces, and the drafts behind `anchor`, the token that follows it."""
        following = [*token_ids[1:], anchor]
        start, extended = 0, None
        for length in chunks:
            batch, hidden = self._forward(token_ids[start : start + length])
            extended = self._drafter.extend(batch, hidden, _ids(following[start : start + length], batch))
            start += length
        return self._propose(anchor, extended, chunks[-1] - 1)

    def verify(self, anchor: int, drafts: Sequence[int], accepted: int, bonus: int) -> DraftRound:
        """The target sees anchor and drafts; `accepted` of them stay, and `bonus` is the new anchor."""
        batch, hidden = self._forward([anchor, *drafts])
        position = self._cache.position(self._slot) - len(drafts) + accepted
        self._cache.rewind(self._slot, position)
        # rows of rejected drafts get whatever id there is, as in a step that does not wait for the host
        following = [*drafts[:accepted], bonus, *drafts[accepted:]]
        extended = self._drafter.extend(batch, hidden, _ids(following[: batch.num_tokens], batch))
        return self._propose(bonus, extended, accepted)

    def _forward(self, token_ids: Sequence[int]) -> tuple[TokenBatch, Tensor]:
        batch = self._cache.make_batch([self._slot], [list(token_ids)])
        tap = self._drafter.tap(batch.num_tokens)
        self._model.forward(batch, self._cache.handle, tap)
        return batch, tap.hidden

    def _propose(self, anchor: int, extended: Tensor | None, row: int) -> DraftRound:
        numbers = [self._slot, self._cache.position(self._slot), anchor, row]
        ends = DraftEnds(*torch.tensor(numbers, device=self._cache.device).split(1))
        seen: list[Tensor] = []

        def choose(logits: Tensor, draft_idx: int) -> Tensor:
            seen.append(logits)
            return topk_select_ref(logits, 1).squeeze(-1)

        proposal = self._drafter.propose(ends, extended, self._drafter.max_drafts, choose)
        base, confidences = proposal.base_logits, proposal.confidences
        return DraftRound(
            base_logits=None if base is None else base[0].cpu(),
            logits=torch.cat(seen).cpu(),
            drafts=proposal.drafts[0].tolist(),
            confidences=None if confidences is None else confidences[0].cpu(),
        )


def _ids(token_ids: Sequence[int], batch: TokenBatch) -> Tensor:
    return torch.tensor(token_ids, dtype=torch.int64, device=batch.token_ids.device)
