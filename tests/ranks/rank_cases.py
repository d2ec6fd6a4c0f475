"""Several ranks inside one process: a thread each, with the real sockets, gloo groups and engines."""

import copy
import threading
from dataclasses import replace

import torch
import torch.distributed as dist
from offload_cases import offload
from test_runner import FakeGraph

from dsv4.cache.manager import KVCacheManager
from dsv4.config import EngineConfig, ModelConfig
from dsv4.config.layers import build_schedule
from dsv4.dist.control import Leader, Progress
from dsv4.dist.exchange import CollectiveExchange
from dsv4.dist.follower import Follower
from dsv4.dist.group import CheckedGroup, gloo_group
from dsv4.dist.mesh import meet
from dsv4.dist.shares import expert_range, rank_folder, rank_limits
from dsv4.engine.control import EngineControl, engine_info
from dsv4.engine.draft.round import make_drafter
from dsv4.engine.engine import Engine
from dsv4.engine.fingerprint import Identity
from dsv4.engine.ranks.agreement import Agreement
from dsv4.engine.ranks.calls import LeadingTransformer, padding_server
from dsv4.engine.ranks.engine import RanksEngine
from dsv4.engine.ranks.remote import RemoteRank
from dsv4.engine.ranks.start import serve_rank
from dsv4.engine.run.bucket import Drafting
from dsv4.engine.run.runner import Runner
from dsv4.formats.trees import map_tensors
from dsv4.model.transformer import Transformer
from dsv4.ops import TORCH

HOST, TOKEN = "127.0.0.1", b"sixteen bytes ok"

# One layer of each kind, an MTP block; six experts, three a token: their order in a sum shows.
SMALL = ModelConfig.tiny(
    vocab_size=300, hidden_size=128, num_hidden_layers=3, num_hash_layers=1, compress_ratios=(0, 4, 128, 0),
    num_nextn_predict_layers=1, num_attention_heads=2, q_lora_rank=128, o_lora_rank=64, n_routed_experts=6,
    num_experts_per_tok=3, moe_intermediate_size=128, index_n_heads=2, max_position_embeddings=1024,
)  # fmt: skip


def prompts_of(*lengths, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, SMALL.vocab_size, (length,), generator=generator).tolist() for length in lengths]


def prompt_of(length, seed):
    return prompts_of(length, seed=seed)[0]


def share_of(params, experts):
    """The parameters a rank has that owns these experts."""

    def own(block):
        stacks = map_tensors(block.ffn.experts, lambda part: part[experts.start : experts.stop])
        return replace(block, ffn=replace(block.ffn, experts=stacks))

    mtp = [replace(draft, block=own(draft.block)) for draft in params.mtp]
    head = params.dspark
    dspark = None if head is None else replace(head, blocks=[own(block) for block in head.blocks])
    return replace(params, layers=[own(block) for block in params.layers], mtp=mtp, dspark=dspark)


class _Rank:
    """One rank's model, cache, runner and engine; an `LLM` to those who ask what it is."""

    numerics, checkpoint, num_ranks, weight_version, start_seconds = "official", None, 2, "0", {}

    def __init__(self, ranks, rank, mesh, progress, link):
        self.mesh = mesh
        group = gloo_group(ranks.store, rank, ranks.size, HOST, progress.tick, lambda: link.is_lost)
        self.group = ranks.wrap(rank, group)
        group = CheckedGroup(self.group) if ranks.is_checked else self.group
        self.config = config = ranks.config
        own = expert_range(ranks.config.n_routed_experts, ranks.size, rank)
        exchange = CollectiveExchange(group, config.n_routed_experts)
        self.plain_dtype = None if ranks.dtype is torch.bfloat16 else ranks.dtype
        params, pool = share_of(ranks.params, own), None
        if ranks.placement is not None:
            params, pool = offload(
                params, ranks.placement, TORCH, top_k=config.num_experts_per_tok, device="cpu", num_ranks=ranks.size
            )
        self.pool, backend = pool, TORCH if pool is None else pool.backend
        self.model = Transformer(config, params, ranks.dtype, backend=backend, exchange=exchange)
        choice = self.choice = ranks.drafts if rank == 0 else copy.deepcopy(ranks.drafts)
        self.cache = self.make_cache(
            rank_folder(ranks.limits, rank), build_schedule(config, with_mtp=choice is not None)
        )
        drafting = None
        if choice is not None:
            drafting = Drafting(make_drafter(self.model, self.cache), choice.max_drafts, choice.choices)
        self.runner = Runner(
            self.model, self.cache, buckets=ranks.buckets, use_graphs=bool(ranks.buckets), experts=pool,
            drafting=drafting, capture=FakeGraph() if ranks.buckets else None,
        )  # fmt: skip
        if ranks.buckets:
            self.runner.warm_up()
        self.agreement = Agreement(
            self.mesh.steps, link, progress, padding_server(self.model, self.cache, self.make_drafts)
        )  # fmt: skip
        clock = {} if ranks.clock is None else {"clock": ranks.clock}
        self.engine = Engine(
            self.model, self.cache, runner=self.runner, overlap=ranks.overlap, experts=pool, drafts=choice,
            sizes=self.agreement, **clock,
        )  # fmt: skip

    def identity(self):
        return Identity(
            checkpoint="c", numerics="official", kernels="k", libraries="l", processor="p", package="p"
        )  # fmt: skip

    def make_cache(self, limits, schedule):
        config = self.model.config
        return KVCacheManager(
            config, schedule, limits, device="cpu", plain_dtype=self.plain_dtype, fingerprint="fingerprint"
        )

    def make_drafts(self):
        return self.make_cache(EngineConfig(max_context_tokens=256, max_concurrent_requests=1), self.model.schedule)


class ThreadedRanks:
    """`engine` is rank 0's. `errors[rank]` holds what ended a follower. Close it."""

    def __init__(
        self, config, params, size, limits, *, dtype=torch.bfloat16, tokenizer=None, is_checked=False,
        wrap=lambda rank, group: group, stalled_seconds=8.0, clock=None, change=lambda rank, made: None,
        overlap=False, placement=None, drafts=None, buckets=(), constrain=None,
    ):  # fmt: skip
        self.config, self.params, self.size, self.dtype = config, params, size, dtype
        self.limits = rank_limits(limits, size)
        self.placement, self.drafts, self.buckets = placement, drafts, buckets
        self.is_checked, self.wrap, self.change = is_checked, wrap, change
        self.overlap, self.clock, self.constrain = overlap, clock, constrain
        self.others = {}
        self.store = dist.HashStore()
        self.errors = {}
        progress = Progress()
        self.threads = [threading.Thread(target=self._follow, args=(rank,), daemon=True) for rank in range(1, size)]
        for thread in self.threads:
            thread.start()
        mesh = meet(self.store, 0, size, HOST, TOKEN)
        self.link = Leader(mesh.watch, progress, stalled_seconds=stalled_seconds)
        self.own = _Rank(self, 0, mesh, progress, self.link)
        change(0, self.own)
        self.link.wait_until_ready()
        more = {} if clock is None else {"clock": clock}
        remotes = [RemoteRank(rank, self.own.mesh.requests[rank]) for rank in range(1, size)]
        self.engine = RanksEngine(self.own.engine, self.own.agreement, remotes, self.link, **more)
        self.model = LeadingTransformer(self.own.model, self.own.agreement)

    def _follow(self, rank):
        progress, mesh = Progress(), meet(self.store, rank, self.size, HOST, TOKEN)
        link = Follower(mesh.watch[0], rank, progress, on_lost=lambda why: None)
        try:
            made = self.others[rank] = _Rank(self, rank, mesh, progress, link)
            self.change(rank, made)
            link.ready()
            control = EngineControl(made, TORCH)
            serve_rank(
                made.engine, control, engine_info(made), mesh.requests[0], link, progress, constrain=self.constrain
            )  # fmt: skip
            made.cache.close()
        except BaseException as error:
            link.report(error)
            self.errors[rank] = error
        finally:
            link.close()
            mesh.close()

    @property
    def engines(self):
        """Of every rank."""
        return [self.engine.own, *(self.others[rank].engine for rank in sorted(self.others))]

    @property
    def caches(self):
        return [engine.cache for engine in self.engines]

    def run(self, requests):
        """(prompt, params) each -> completions, in order."""
        sequences = [self.engine.add(prompt, params) for prompt, params in requests]
        while self.engine.has_work:
            self.engine.step()
            self.engine.check_integrity()
        return [sequence.completion() for sequence in sequences]

    def close(self):
        self.link.stop()
        for thread in self.threads:
            thread.join(10)
        self.own.cache.close()
        self.own.mesh.close()
        assert not any(thread.is_alive() for thread in self.threads), "a rank is left behind"
