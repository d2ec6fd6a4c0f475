"""`take_place`: a loaded model becomes one rank of several: rank 0 leads from now on, every other serves."""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

from dsv4.config import EngineConfig
from dsv4.dist.world import World
from dsv4.engine.draft.counts import FixedDrafts
from dsv4.engine.engine import Engine
from dsv4.engine.link.grammars import Constrain
from dsv4.engine.link.info import engine_info
from dsv4.engine.ranks.agreement import Agreement
from dsv4.engine.ranks.calls import LeadingTransformer, padding_server
from dsv4.engine.ranks.control import RanksControl, ShareControl
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
    world.closing.append(agreement.selector)  # not the agreement: it knows the `LLM`, whose end closes the world
    own = Engine(model, cache, runner=runner, experts=llm.pool, drafts=choice, sizes=agreement)
    llm.engine = own
    if world.rank:
        connection, control = world.mesh.requests[0], ShareControl(llm, backend, world.progress, world.group)
        serve_rank(
            own, control, engine_info(llm), connection, world.follower, world.progress, constrain=_constrain(llm)
        )  # fmt: skip
        cache.close()
        world.close()
        raise SystemExit(0)
    remotes = [RemoteRank(rank, world.mesh.requests[rank]) for rank in range(1, world.size)]
    ranks = RanksEngine(own, agreement, remotes, world.leader)
    llm.control = RanksControl(weakref.proxy(llm), backend, ranks, world.group)
    llm.model = LeadingTransformer(model, agreement)
    return ranks


def _constrain(llm: Any) -> Constrain:
    """Compiles grammars, once rank 0 has sent one: it has checked them."""

    @cache
    def compiler() -> Any:
        from dsv4.engine.grammar.compiler import GrammarCompiler  # its library comes with the server

        config = llm.config
        return GrammarCompiler(llm.tokenizer, vocab_size=config.vocab_size, eos_token_id=config.eos_token_id)

    return lambda lark, opening: compiler().compile(lark, opening).constraint
