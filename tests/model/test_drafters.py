"""Drafts depend on the tokens alone: not on who else drafts, on chunks, or on what was drafted and rejected before.

Several requests live in one small cache with a window of 16, so that rings wrap often. Random steps feed chunks of
prompts and verified drafts of some of them at once, beside padding; every proposal must equal, bit for bit, the drafts
after a fresh prefill of the same tokens by a drafter of its own.
"""

import random
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch
from test_reproducibility import with_padding

from dsv4 import LLM, ModelConfig
from dsv4.cache.batch import TokenBatch
from dsv4.config import EngineConfig
from dsv4.engine.draft.round import make_drafter
from dsv4.engine.run.precompile import on_meta
from dsv4.loader.write.synth import random_params
from dsv4.model.drafter import DraftEnds
from dsv4.model.prepare import prepare_params
from dsv4.model.transformer import Transformer
from dsv4.ops import TRITON
from dsv4.ops.lib import guard
from dsv4.ops.select import topk_select_ref
from dsv4.request import RequestError
from dsv4.testing.numeric import assert_bitwise

MTP = ModelConfig.tiny(
    vocab_size=64, hidden_size=128, num_hidden_layers=2, compress_ratios=(0, 4, 0), num_attention_heads=2, o_groups=1,
    n_routed_experts=4, index_n_heads=2, index_topk=8, num_hash_layers=1, sliding_window=16,
    max_position_embeddings=512,
)  # fmt: skip
CONFIGS = {"mtp": MTP, "dspark": MTP.with_dspark(noise_token_id=3, markov_rank=16, block_size=4)}
NUM_SLOTS, MAX_TOKENS = 4, 128


@cache
def model_of(kind: str) -> LLM:
    return LLM.from_params(CONFIGS[kind], random_params(CONFIGS[kind]))


@cache
def fresh(kind: str, token_ids: tuple[int, ...]):
    """The drafts behind the last of the tokens."""
    return model_of(kind).draft_trace(token_ids[:-1], token_ids[-1])[0]


def greedy(logits: torch.Tensor, draft_idx: int) -> torch.Tensor:
    return topk_select_ref(logits, 1).squeeze(-1)


@dataclass
class Request:
    """`tokens`: prompt, then what was accepted; the last one is not processed. `drafts` wait to be verified."""

    slot: int
    tokens: list[int]
    num_processed: int = 0
    drafts: list[int] = field(default_factory=list)


class Fleet:
    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.random = kind, random.Random(seed)
        llm = model_of(kind)
        self.model, self.vocab = llm.model, llm.config.vocab_size
        block_size = 3 if llm.config.dspark is None else llm.config.dspark.block_size
        limits = EngineConfig(
            max_context_tokens=MAX_TOKENS, max_concurrent_requests=NUM_SLOTS, max_draft_tokens=block_size
        )
        self.cache = llm._make_cache(limits, self.model.schedule)
        self.drafter = make_drafter(self.model, self.cache)
        self.requests: list[Request] = []
        self.num_compared = 0

    def token(self) -> int:
        return self.random.randrange(self.vocab)

    def step(self) -> None:
        """Admit or end a request, feed some, and draft for those that know their newest token."""
        if len(self.requests) < NUM_SLOTS and (not self.requests or self.random.random() < 0.3):
            prompt = [self.token() for _ in range(self.random.randint(2, 30))]
            self.requests.append(Request(self.cache.admit(MAX_TOKENS), prompt))
        for request in [r for r in self.requests if len(r.tokens) > MAX_TOKENS - 12]:
            self.cache.release(request.slot)
            self.requests.remove(request)
        chosen = [request for request in self.requests if self.random.random() < 0.8]
        pieces = [self.piece(request) for request in chosen]
        if not pieces:
            return
        padding = self.random.randint(0, 3)
        batch = with_padding(
            self.cache.make_batch([request.slot for request in chosen], [ids for ids, _ in pieces]), padding
        )
        tap = self.drafter.tap(batch.num_tokens)
        self.model.forward(batch, self.cache.handle, tap)
        following, rows = [0] * padding, []
        for request, (ids, accepted) in zip(chosen, pieces, strict=True):
            rows.append(len(following) + (len(ids) - 1 if accepted is None else accepted))
            following += self.judge(request, ids, accepted)
        next_ids = torch.tensor([*following, *[0] * padding])
        extended = self.drafter.extend(batch, tap.hidden, next_ids)
        ready = [(r, row) for r, row in zip(chosen, rows, strict=True) if r.num_processed == len(r.tokens) - 1]
        if ready:
            self.propose(ready, extended)
        self.cache.check_integrity()

    def piece(self, request: Request) -> tuple[list[int], int | None]:
        """The ids to feed, and how many of the drafts among them are accepted (None: a piece of the prompt)."""
        if not request.drafts:
            most = len(request.tokens) - 1 - request.num_processed
            if most > 0:
                length = self.random.randint(1, most)
                return request.tokens[request.num_processed : request.num_processed + length], None
        kept = request.drafts[: self.random.randint(0, len(request.drafts))]  # a step may verify fewer
        return [request.tokens[-1], *kept], self.random.randint(0, len(kept))

    def judge(self, request: Request, ids: list[int], accepted: int | None) -> list[int]:
        """The books of the request; returns the token behind each of its rows."""
        request.drafts = []
        if accepted is None:
            request.num_processed += len(ids)
            start = request.num_processed - len(ids) + 1
            return request.tokens[start : start + len(ids)]
        request.tokens += [*ids[1 : 1 + accepted], self.token()]
        request.num_processed += 1 + accepted
        self.cache.rewind(request.slot, request.num_processed)
        garbage = [self.token() for _ in ids[1 + accepted :]]
        return [*request.tokens[-1 - accepted :], *garbage]

    def propose(self, ready, extended) -> None:
        num_drafts = self.random.randint(1, self.drafter.max_drafts)
        columns = [[r.slot, len(r.tokens) - 1, r.tokens[-1], row] for r, row in ready]
        columns.insert(self.random.randint(0, len(columns)), [-1, 7, 0, 0])  # padding
        ends = DraftEnds(*torch.tensor(columns).unbind(1))
        logits: list[torch.Tensor] = []

        def choose(row_logits, draft_idx):
            logits.append(row_logits)
            return greedy(row_logits, draft_idx)

        proposal = self.drafter.propose(ends, extended, num_drafts, choose)
        assert proposal.drafts.shape == (len(columns), num_drafts)
        for place, request in enumerate(r for column in columns for r, _ in ready if r.slot == column[0]):
            row = [i for i, column in enumerate(columns) if column[0] >= 0][place]
            expected = fresh(self.kind, tuple(request.tokens))
            assert_bitwise(torch.stack(logits, 1)[row], expected.logits[:num_drafts], "logits")
            request.drafts = proposal.drafts[row].tolist()
            assert request.drafts == expected.drafts[:num_drafts]
            if expected.confidences is not None:
                assert_bitwise(proposal.confidences[row], expected.confidences[:num_drafts], "confidences")
                assert_bitwise(proposal.base_logits[row], expected.base_logits[:num_drafts], "base logits")
            self.num_compared += 1


@pytest.mark.parametrize("kind", CONFIGS)
def test_drafts_depend_on_the_tokens_alone(kind):
    fleet = Fleet(kind, seed=1)
    for _ in range(20):
        fleet.step()
    assert fleet.num_compared > 12


@pytest.mark.parametrize("kind", CONFIGS)
def test_exact_numerics_draft_too(kind):
    """In fp64 the quantised values are nowhere; verified rounds equal fresh ones up to its rounding."""
    config = CONFIGS[kind]
    llm = LLM.from_params(
        config, random_params(config, dequantize_to=torch.float64), numerics="exact", dtype=torch.float64
    )
    prompt = [(7 * i) % 61 for i in range(37)]
    first, second = llm.draft_trace(prompt, 5, [(1, 9)], [20, 17])
    again = llm.draft_trace([*prompt, 5, first.drafts[0]], 9)[0]
    assert first.logits.dtype == torch.float64
    torch.testing.assert_close(second.logits, again.logits, rtol=0, atol=1e-9)


def test_each_tap_has_its_layer():
    """Layers in the order of the model, whatever the order of the config's list."""
    llm = model_of("dspark")
    drafter = make_drafter(llm.model, llm._make_cache(EngineConfig(max_context_tokens=64), llm.model.schedule))
    drafter._dspark = replace(drafter._dspark, target_layer_ids=(1, 0))
    layers = llm.trace([4, 5, 6])
    tap = drafter.tap(3)
    for layer_idx, output in enumerate(layers):
        tap(layer_idx, output)
    assert_bitwise(tap.hidden, torch.cat([layer.streams.float().mean(1).bfloat16() for layer in layers], -1))


# ---- what a graph needs ----


class _Launch:
    """Stands for a kernel: takes its arguments, and runs nothing."""

    def __getitem__(self, grid):
        return lambda *args, **kwargs: None


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_round_reads_nothing_on_the_host(kind, monkeypatch):
    """With the kernels' launchers on tensors that have no data: whatever asked for a value would fail."""
    config = CONFIGS[kind]
    params = prepare_params(random_params(config), TRITON)
    model = Transformer(config, params, torch.bfloat16, backend=TRITON)
    limits = EngineConfig(max_context_tokens=64, max_concurrent_requests=2, max_draft_tokens=4)
    cache_ = model_of(kind)._make_cache(limits, model.schedule)
    interpreted = pytest.importorskip("triton.runtime.interpreter").InterpretedFunction
    monkeypatch.setattr(interpreted, "__getitem__", _Launch.__getitem__)
    monkeypatch.setattr(guard, "LAUNCH_DEVICES", guard.LAUNCH_DEVICES | {"meta"})
    model.weights = on_meta(params)
    model.context = replace(model.context, window_freqs=on_meta(model.context.window_freqs),
                            compressed_freqs=on_meta(model.context.compressed_freqs))  # fmt: skip
    handles = [on_meta(cache_.handle(layer.layer_idx)) for layer in model.schedule]
    monkeypatch.setattr(cache_, "handle", handles.__getitem__)
    cache_._table = on_meta(cache_.block_table)
    drafter = make_drafter(model, cache_)
    batch = TokenBatch(*torch.empty(5, 6, dtype=torch.int64, device="meta").unbind(0), cache_.block_table)
    tap = drafter.tap(6)
    model.forward(batch, cache_.handle, tap)
    extended = drafter.extend(batch, tap.hidden, batch.token_ids)
    ends = DraftEnds(*torch.empty(4, 2, dtype=torch.int64, device="meta").unbind(0))
    proposal = drafter.propose(ends, extended, 3, lambda logits, _: logits.argmax(-1))
    assert (proposal.drafts.shape, proposal.drafts.device.type) == ((2, 3), "meta")


# ---- what is refused ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"anchor": 64}, "anchor or bonus 0 is 64; ids are integers from 0 to 63"),
        ({"anchor": "a"}, "anchor or bonus 0 is 'a'"),
        ({"verified": [(0, 1), (0, -1)]}, "anchor or bonus 2 is -1"),
        ({"verified": [(5, 1)]}, r"verified\[0\] accepts 5 drafts, there are 4"),
        ({"verified": [(0, 1), (True, 1)]}, r"verified\[1\] must be \(accepted drafts, next token id\)"),
        ({"verified": [(-1, 1)]}, r"verified\[0\] must be \(accepted drafts, next token id\), found \(-1, 1\)"),
        ({"verified": [3]}, r"verified\[0\] must be"),
        ({"prompt": []}, "at least one token"),
        ({"chunks": [1]}, "chunks must be positive integers that sum to 2"),
        ({"prompt": list(range(60)) * 9}, "may reach 540 tokens, the model's longest context is 512"),
    ],
)
def test_bad_input(changes, message):
    arguments = {"prompt": [1, 2], "anchor": 3, "verified": (), "chunks": None} | changes
    with pytest.raises(RequestError, match=message):
        model_of("dspark").draft_trace(**arguments)


def test_a_dspark_head_is_no_mtp_block():
    with pytest.raises(RequestError, match=r"no MTP block \(a DSpark head: see draft_trace\)"):
        model_of("dspark").mtp_logits([1, 2])


def test_no_drafter():
    llm = LLM.from_params(MTP, random_params(MTP, with_mtp=False))
    with pytest.raises(RequestError, match=r"this checkpoint has no drafter \(no mtp\.\* tensors\)"):
        llm.draft_trace([1], 2)
