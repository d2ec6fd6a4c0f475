"""Engines that draft, with drafts a test chooses, beside the same engine without drafts."""

import random
from dataclasses import replace
from functools import cache

import torch

from dsv4 import LLM, ModelConfig
from dsv4.config import EngineConfig
from dsv4.engine.draft.counts import FixedDrafts
from dsv4.engine.draft.round import make_drafter
from dsv4.engine.engine import Engine
from dsv4.engine.run.bucket import Drafting
from dsv4.engine.run.runner import Runner
from dsv4.loader.write.synth import random_params

# both kinds of entries (the draft blocks have none), and a window that wraps often
MTP = ModelConfig.tiny(
    vocab_size=48, hidden_size=128, num_hidden_layers=2, compress_ratios=(4, 128, 0), num_attention_heads=2,
    o_groups=1, q_lora_rank=128, o_lora_rank=128, n_routed_experts=4, moe_intermediate_size=128, index_n_heads=2,
    index_topk=8, num_hash_layers=1, sliding_window=16, max_position_embeddings=1024,
)  # fmt: skip
CONFIGS = {"mtp": MTP, "dspark": MTP.with_dspark(noise_token_id=3, markov_rank=16, block_size=5)}
MOST = {"mtp": 3, "dspark": 5}
KINDS = ("right", "wrong", "random", "partly", "real")


@cache
def params_of(kind):
    return random_params(CONFIGS[kind])


def prompt_of(length, seed=0):
    source = random.Random(seed * 1000 + length)
    return [source.randrange(4, MTP.vocab_size) for _ in range(length)]


class ForcedDrafts(FixedDrafts):
    """Drafts as `kind` says. `truth` are whole texts (prompt and output) by their prompt.

    partly        the first so many are right, then they are wrong: 0, 1, ... and all of them in turn
    random_count  another number of drafts in every step, for every request
    """

    must_read = True

    def __init__(self, num_drafts, kind, truth, *, random_count=False, seed=0, vocab_size=MTP.vocab_size):
        super().__init__(num_drafts)
        self.vocab_size = vocab_size
        self.choices = tuple(range(1, num_drafts + 1))
        self.kind, self.truth = kind, truth
        self.random, self.random_count = random.Random(seed), random_count
        self.num_right = 0
        self.offered = {}  # by prompt and number of tokens: what the drafter said
        self.outcomes = set()  # (drafts verified, drafts that came true)

    def how_many(self, num_requests):
        return self.random.randint(0, self.max_drafts) if self.random_count else self.max_drafts

    def offer(self, request, drafts, confidences):
        place, count = len(request.token_ids), len(drafts)
        prompt = tuple(request.token_ids[: request.prompt_len])
        self.offered[prompt, place] = tuple(drafts)
        text = self.truth[prompt][place : place + count]
        coming = [*text, *drafts][:count]
        self.num_right = (self.num_right + 1) % (count + 1)
        right = {"right": count, "wrong": 0, "partly": self.num_right}.get(self.kind)
        if self.kind == "random":
            drafts = [self.random.randrange(self.vocab_size) for _ in drafts]
        elif right is not None:
            drafts = [token if i < right else (token + 7) % self.vocab_size for i, token in enumerate(coming)]
        if self.random_count:
            drafts = drafts[: self.random.randint(0, count)]
        super().offer(request, drafts, confidences)

    def record(self, num_drafts, num_accepted):
        super().record(num_drafts, num_accepted)
        self.outcomes.add((num_drafts, num_accepted))


class ToldDrafter:
    """A drafter whose drafts are right up to a place, 0, 1, ... and all of them in turn, as whole texts have it that
    `tell` brings to the device: nobody else needs to see them. Can be captured."""

    def __init__(self, drafter, num_slots, max_tokens, device):
        self._drafter = drafter
        self._texts = torch.zeros(num_slots + 1, max_tokens + 10, dtype=torch.int64, device=device)

    def __getattr__(self, name):
        return getattr(self._drafter, name)

    def tell(self, engine, truth):
        """Of the requests that run now; `truth` are whole texts by their prompt."""
        for request in engine.scheduler.running:
            text = truth[tuple(request.token_ids[: request.prompt_len])]
            self._texts[request.slot, : len(text)] = torch.tensor(text, device=self._texts.device)

    def propose(self, ends, extended, num_drafts, choose):
        proposal = self._drafter.propose(ends, extended, num_drafts, choose)
        places = torch.arange(num_drafts, device=ends.slots.device)
        coming = self._texts[ends.slots.unsqueeze(1), ends.positions.unsqueeze(1) + 1 + places]
        is_right = places < (ends.positions % (num_drafts + 1)).unsqueeze(1)
        return replace(proposal, drafts=torch.where(is_right, coming, (coming - 1).clamp(min=0)))


def make_limits(kind="mtp", **limits):
    defaults = {"max_context_tokens": 512, "max_concurrent_requests": 4, "max_draft_tokens": MOST[kind]}
    return EngineConfig(**{**defaults, **limits})


def plain_llm(kind="mtp", **limits):
    return LLM.from_params(CONFIGS[kind], params_of(kind), engine=make_limits(kind, **limits))


def drafting_llm(kind, choice, capture=None, buckets=(), overlap=False, is_told=False, **limits):
    """An engine whose drafts `choice` decides, or a `ToldDrafter`."""
    llm = plain_llm(kind, **limits)
    llm.cache = llm._make_cache(llm.cache.limits, llm.model.schedule)
    drafter = make_drafter(llm.model, llm.cache)
    if is_told:
        drafter = ToldDrafter(drafter, llm.cache.schema.num_slots, 512, llm.cache.device)
    drafting = Drafting(drafter, choice.max_drafts, choice.choices)
    runner = Runner(
        llm.model, llm.cache, buckets=buckets, use_graphs=capture is not None, capture=capture, drafting=drafting
    )
    runner.warm_up()
    llm.engine = Engine(llm.model, llm.cache, runner=runner, drafts=choice, overlap=overlap)
    return llm


def run(llm, prompts, params, each=lambda engine: None):
    """Completions of requests that run together."""
    sequences = [llm.engine.prepare(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    for sequence in sequences:
        llm.engine.submit(sequence)
    while llm.engine.has_work:
        llm.engine.step()
        each(llm.engine)
    return [replace(sequence.completion(), num_cached_tokens=0) for sequence in sequences]


def assert_same_drafts(choice, other):
    """What a drafter says depends on a request's tokens alone, as far as two engines asked it for as many drafts."""
    common = choice.offered.keys() & other.offered.keys()
    assert len(common) > 3
    for place in common:
        count = min(len(choice.offered[place]), len(other.offered[place]))
        assert choice.offered[place][:count] == other.offered[place][:count], place


def truth_of(completions):
    return {one.prompt_token_ids: [*one.prompt_token_ids, *one.token_ids] for one in completions}
