"""`engine_loop`: the engine's side of a server: an `EngineLoop` with grammars, the live view and the record."""

from collections.abc import Callable

from dsv4.engine.control import engine_info
from dsv4.engine.grammar.compiler import GrammarCompiler
from dsv4.engine.link.loop import EngineLoop
from dsv4.engine.step.constraint import Constraint
from dsv4.http.telemetry.live_view import LiveView
from dsv4.llm import LLM
from dsv4.request import RequestError
from dsv4.tools.receipts.recorder import Recorder


def engine_loop(llm: LLM, *, max_waiting: int = 256, recorder: Recorder | None = None) -> EngineLoop:
    """For one server's front ends, in this process or others."""
    if llm.tokenizer is None:
        raise RequestError("this checkpoint has no tokenizer.json; a server speaks text and needs one")
    compiler = GrammarCompiler(
        llm.tokenizer, vocab_size=llm.config.vocab_size, eos_token_id=llm.config.eos_token_id
    )  # fmt: skip

    def constrain(lark: str, opening: list[int]) -> Callable[[], Constraint]:
        return compiler.compile(lark, opening).constraint

    live = LiveView(llm.engine)
    return EngineLoop(
        llm.engine, engine_info(llm, "" if recorder is None else recorder.kind), llm.control,
        max_waiting=max_waiting, constrain=constrain, answers={"live": live.snapshot}, on_step=live.on_step,
        on_record=None if recorder is None else recorder.add_line,
    )  # fmt: skip
