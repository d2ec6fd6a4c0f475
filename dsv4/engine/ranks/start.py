"""`take_place`: a loaded model becomes one rank of several: rank 0 leads from now on, every other serves."""

from __future__ import annotations

import weakref
from typing import Any

from dsv4.config import EngineConfig
from dsv4.dist.world import World
from dsv4.engine.draft.counts import FixedDrafts
from dsv4.engine.engine import Engine
from dsv4.engine.link.info import engine_info
from dsv4.engine.ranks.agreement import Agreement
from dsv4.engine.ranks.calls import LeadingTransformer, padding_server
from dsv4.engine.ranks.control import RanksControl
from dsv4.engine.ranks.engine import RanksEngine
from dsv4.engine.ranks.remote import RemoteRank
from dsv4.engine.ranks.serve import serve_rank
from dsv4.engine.run.runner import Runner
from dsv4.ops import Backend


def take_place(llm: Any, world: World, runner: Runner, choice: FixedDrafts | None, backend: Backend) -> RanksEngine:
    """The engine of rank 0's `LLM`, whose control and model are those of all ranks then. Elsewhere the process serves
    until rank 0 ends, and exits."""
    model, cache, small = llm.model, llm.cache, EngineConfig(max_context_tokens=1, max_concurrent_requests=1)
    serve = padding_server(model, cache, lambda: llm._make_cache(small, model.schedule))
    agreement = Agreement(world.mesh.steps, world.link, world.progress, serve)
    own = Engine(model, cache, runner=runner, experts=llm.pool, drafts=choice, sizes=agreement)
    llm.engine = own
    if world.rank:
        serve_rank(own, llm.control, engine_info(llm), world.mesh.requests[0], world.follower)
        cache.close()
        raise SystemExit(0)
    remotes = [RemoteRank(rank, world.mesh.requests[rank]) for rank in range(1, world.size)]
    ranks = RanksEngine(own, remotes, world.leader)
    llm.control = RanksControl(weakref.proxy(llm), backend, ranks)
    llm.model = LeadingTransformer(model, agreement)
    return ranks
