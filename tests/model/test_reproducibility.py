"""A request's logits are the same bits alone or among others, however it is chunked, wherever its rows live.

A random sequence of admissions, forward calls, rewinds and releases runs over one small cache. After every step the
cache checks itself and everything no one may read is filled with NaN: free blocks, ring rows that hold no position,
tail rows not written yet, whole free slots. Every row of logits must equal, bit for bit, the same token's row of a run
in one go.
"""

from functools import cache

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dsv4 import LLM, EngineConfig, ModelConfig
from dsv4.cache.batch import TokenBatch
from dsv4.cache.manager import KVCacheManager
from dsv4.loader.write.synth import random_params

CONFIG = ModelConfig.tiny(
    vocab_size=64, hidden_size=128, num_hidden_layers=3, compress_ratios=(0, 4, 128), num_attention_heads=2,
    o_groups=1, n_routed_experts=4, index_n_heads=2, index_topk=8, num_nextn_predict_layers=0,
    max_position_embeddings=512,
)  # fmt: skip
LIMITS = EngineConfig(max_context_tokens=384, max_concurrent_requests=3, max_draft_tokens=4, num_blocks=5)
NUM_SEQUENCES, SEQUENCE_LEN = 4, 300


@cache
def model():
    return LLM.from_params(CONFIG, random_params(CONFIG, with_mtp=False), engine=LIMITS).model


@cache
def sequence(idx: int) -> tuple[list[int], torch.Tensor]:
    """Token ids and the logits of all of them run alone, in one go, on a cache of their own."""
    generator = torch.Generator().manual_seed(idx)
    token_ids = torch.randint(CONFIG.vocab_size, (SEQUENCE_LEN,), generator=generator).tolist()
    llm = LLM.from_params(CONFIG, random_params(CONFIG, with_mtp=False), engine=LIMITS)
    return token_ids, llm.logits(token_ids)


def with_padding(batch: TokenBatch, count: int) -> TokenBatch:
    """`count` padded rows in front of the batch and as many behind it."""

    def pad(values: torch.Tensor, value: int) -> torch.Tensor:
        return torch.nn.functional.pad(values, (count, count), value=value)

    return TokenBatch(
        token_ids=pad(batch.token_ids, 0),
        positions=pad(batch.positions, 3),  # would close a window if it counted
        slots=pad(batch.slots, -1),
        chunk_starts=pad(batch.chunk_starts, 0),
        chunk_ends=pad(batch.chunk_ends, 4),
        block_table=batch.block_table,
    )


def poison(manager: KVCacheManager, admitted: dict[int, int]) -> None:
    """NaN into whatever no request may read. `admitted` maps slots to positions."""
    owned = manager.block_table[manager.block_table >= 0].long()
    free_blocks = torch.ones(manager.schema.num_blocks, dtype=torch.bool)
    free_blocks[owned] = False
    for layer_idx in range(CONFIG.num_hidden_layers):
        handle = manager.handle(layer_idx)
        for pages in (handle.entries, handle.index_keys):
            if pages is not None:
                pages.rows.data[free_blocks] = 0xFF
                pages.rows.scales[free_blocks] = 0xFF
        unread = torch.ones_like(handle.window.positions, dtype=torch.bool)
        for slot in admitted:
            unread[slot] = handle.window.positions[slot] < 0
        handle.window.rows.data[unread] = 0xFF
        handle.window.rows.scales[unread] = 0xFF
        for compressor in (handle.compressor, handle.index_compressor):
            for tail in (compressor.own, compressor.following) if compressor is not None else ():
                if tail is not None:
                    poison_tail(tail, admitted)


def poison_tail(tail, admitted: dict[int, int]) -> None:
    unread = torch.ones(tail.kv.shape[:2], dtype=torch.bool)
    for slot, position in admitted.items():
        written = torch.arange(max(0, position - tail.ring_len), position)
        unread[slot, written % tail.ring_len] = False
    tail.kv[unread] = torch.nan
    tail.score[unread] = torch.nan


class Interleaving(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.manager = KVCacheManager(CONFIG, model().schedule, LIMITS, device="cpu", plain_dtype=None)
        self.running: dict[int, int] = {}  # slot -> sequence

    def positions(self) -> dict[int, int]:
        return {slot: self.manager.position(slot) for slot in self.running}

    @precondition(lambda self: self.manager.num_free_slots > 0)
    @rule(idx=st.integers(0, NUM_SEQUENCES - 1))
    def admit(self, idx):
        self.running[self.manager.admit(SEQUENCE_LEN)] = idx

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_padding=st.integers(0, 2))
    def forward(self, data, num_padding):
        slots = data.draw(st.lists(st.sampled_from(sorted(self.running)), unique=True, min_size=1), label="slots")
        pieces, chosen, num_blocks = [], [], self.manager.num_free_blocks
        for slot in slots:
            token_ids, _ = sequence(self.running[slot])
            start = self.manager.position(slot)
            length = data.draw(st.sampled_from([1, 2, 3, 4, 5, 31, 127, 130]), label="length")
            length = min(length, SEQUENCE_LEN - start)
            needed = -(-((start + length) // 4) // 32) - -(-(start // 4) // 32)
            if length and needed <= num_blocks:  # what does not fit waits; running out is another test
                num_blocks -= needed
                chosen.append(slot)
                pieces.append(token_ids[start : start + length])
        if not chosen:
            return
        starts = [self.manager.position(slot) for slot in chosen]
        batch = with_padding(self.manager.make_batch(chosen, pieces), num_padding)
        streams = model().forward(batch, self.manager.handle)
        logits = model().logits(streams)[num_padding : len(streams) - num_padding]
        for slot, start, piece, rows in zip(
            chosen, starts, pieces, logits.split([len(p) for p in pieces]), strict=True
        ):
            alone = sequence(self.running[slot])[1][start : start + len(piece)]
            assert torch.equal(rows, alone), f"slot {slot}, positions {start} to {start + len(piece) - 1}"

    @precondition(lambda self: any(self.positions().values()))
    @rule(data=st.data(), distance=st.integers(1, LIMITS.max_draft_tokens))
    def draft_and_rewind(self, data, distance):
        """Feed wrong tokens, as a rejected draft would be, and take them back."""
        slot = data.draw(st.sampled_from([slot for slot, at in self.positions().items() if at > 0]), label="slot")
        start = self.manager.position(slot)
        length = min(distance, SEQUENCE_LEN - start)
        if length == 0 or self.manager.num_free_blocks == 0:
            return
        wrong = [(token_id + 1) % CONFIG.vocab_size for token_id in sequence(self.running[slot])[0][start:]][:length]
        model().forward(self.manager.make_batch([slot], [wrong]), self.manager.handle)
        self.manager.rewind(slot, start)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data):
        slot = data.draw(st.sampled_from(sorted(self.running)), label="slot")
        self.manager.release(slot)
        del self.running[slot]

    @invariant()
    def integrity_and_poison(self):
        self.manager.check_integrity()
        poison(self.manager, self.positions())


TestInterleaving = Interleaving.TestCase
TestInterleaving.settings = settings(max_examples=15, stateful_step_count=20)


def test_every_split_in_two_is_bitwise_the_same():
    """Chunk borders at and around 4, 128 and the top-k limit."""
    token_ids, alone = sequence(0)
    llm = LLM.from_params(CONFIG, random_params(CONFIG, with_mtp=False), engine=LIMITS)
    for first in (1, 3, 4, 5, 31, 32, 33, 127, 128, 129, 255, 256):
        assert torch.equal(llm.logits(token_ids, [first, SEQUENCE_LEN - first]), alone), first


def test_token_by_token_is_bitwise_the_same():
    token_ids, alone = sequence(1)
    llm = LLM.from_params(CONFIG, random_params(CONFIG, with_mtp=False), engine=LIMITS)
    assert torch.equal(llm.logits(token_ids[:140], [1] * 140), alone[:140])
