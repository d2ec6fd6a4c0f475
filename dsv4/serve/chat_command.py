"""`dsv4 chat`: talk to a model in the terminal. Answers stream; thinking is dimmed; Ctrl-C ends an answer."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from dsv4.config import ModelConfig
from dsv4.request import FinishReason, SamplingParams
from dsv4.serve.load import (
    DEFAULT_CONTEXT,
    DeviceOption,
    DtypeOption,
    ModelOption,
    NumericsOption,
    OffloadOption,
    check_numerics,
    engine_limits,
    find_model,
    load_llm,
    parse_offload,
)
from dsv4.text.chat import ChatOptions, effort_profile
from dsv4.text.parse import ContentDelta, ReasoningDelta, ToolCallDelta, ToolCallStart

if TYPE_CHECKING:
    from dsv4.serve.chat_session import ChatSession

HELP = """\
/help         this text
/reset        forget the conversation
/save FILE    write the conversation as JSON (`dsv4 render FILE` shows its prompt)
/quit         leave (so does Ctrl-D); Ctrl-C ends an answer"""


def chat_command(
    model: ModelOption = None,
    system: Annotated[str | None, typer.Option(help="A system message for the whole conversation.")] = None,
    thinking: Annotated[bool, typer.Option("--thinking", help="Let the model think first; shown dimmed.")] = False,
    effort: Annotated[
        str | None, typer.Option(help="Reasoning effort, as the checkpoint knows; needs --thinking.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="New tokens of one answer at most.")] = 2048,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Keep the fewest tokens reaching this probability.")] = 1.0,
    seed: Annotated[
        int | None, typer.Option(help="The same seed gives the same answers. Default: a new one each.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(help=f"Most tokens of a conversation. Default: the model's, up to {DEFAULT_CONTEXT}.")
    ] = None,
    numerics: NumericsOption = "official",
    dtype: DtypeOption = None,
    device: DeviceOption = "cpu",
    offload_experts: OffloadOption = None,
) -> None:
    """Talk to a model. Type /help for the commands; lines from a pipe are answered one by one.

    \b
    Examples:
      dsv4 chat --model ./checkpoint
      dsv4 chat --model ./checkpoint --thinking --effort max --system "Answer briefly."
      dsv4 chat --model ./checkpoint --device cuda --offload-experts auto
    """
    check_numerics(numerics, dtype)
    offload = parse_offload(offload_experts)
    notes = Console(stderr=True)
    folder = find_model(model, notes)
    config = ModelConfig.from_pretrained(folder)
    options = ChatOptions(thinking=thinking, reasoning_effort=effort, profile=effort_profile(config))
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p)
    limits = engine_limits(config, context=context, requests=1)
    llm = load_llm(
        folder, numerics=numerics, dtype=dtype, device=device, limits=limits, console=notes,
        offload_experts=offload,
    )  # fmt: skip

    from dsv4.serve.chat_session import ChatSession  # here: it loads torch

    session = ChatSession(llm, options, params, seed, system)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        _enable_line_editing()
        notes.print("[dim]/help for the commands, Ctrl-D to leave[/dim]")
    run_chat(session, _reader("> " if is_terminal else ""), Console(highlight=False), notes)


def _enable_line_editing() -> None:
    """Cursor keys and earlier lines at the prompt, where the platform has them."""
    if importlib.util.find_spec("readline") is not None:
        importlib.import_module("readline")


def _reader(prompt: str) -> Callable[[], str | None]:
    def read() -> str | None:
        try:
            return input(prompt)
        except EOFError:
            return None

    return read


def run_chat(session: ChatSession, read: Callable[[], str | None], out: Console, notes: Console) -> None:
    """Read lines until there are none; answer them or obey them."""
    while (line := read()) is not None:
        text = line.strip()
        if not text:
            continue
        if text in ("/quit", "/exit"):
            return
        if text.startswith("/"):
            _obey(session, text, notes)
        else:
            _answer(session, text, out, notes)


def _obey(session: ChatSession, text: str, notes: Console) -> None:
    command, _, argument = text.partition(" ")
    if command == "/help":
        message = HELP
    elif command == "/reset":
        session.reset()
        message = "the conversation is forgotten"
    elif command == "/save":
        message = _save(session, argument.strip())
    else:
        message = f"there is no {command}; /help lists the commands"
    notes.print(message, markup=False, highlight=False, soft_wrap=True)


def _save(session: ChatSession, name: str) -> str:
    if not name:
        return "/save needs the name of a file"
    try:
        session.save(Path(name))
    except OSError as error:
        return f"{name} cannot be written: {error.strerror}"
    return f"{len(session.messages)} messages written to {name}"


def _answer(session: ChatSession, text: str, out: Console, notes: Console) -> None:
    """Stream one answer; Ctrl-C ends it, what came of it stays in the conversation."""

    def show(piece: str, style: str | None = None) -> None:
        out.print(piece, style=style, end="", markup=False, soft_wrap=True)
        out.file.flush()

    was_thinking = False
    events = session.ask(text)
    try:
        for event in events:
            if isinstance(event, ReasoningDelta):
                was_thinking = True
                show(event.text, "dim italic")
                continue
            if was_thinking:
                was_thinking = False
                show("\n\n")
            if isinstance(event, ContentDelta):
                show(event.text)
            elif isinstance(event, ToolCallStart):
                show(f"\n[calls {event.name}] ", "dim")
            elif isinstance(event, ToolCallDelta):
                show(event.arguments, "dim")
    except KeyboardInterrupt:
        events.close()  # type: ignore[attr-defined]
        show("\n")
        notes.print("(stopped)", style="dim")
        return
    except (ValueError, RuntimeError) as error:
        notes.print(f"dsv4: error: {error}", markup=False, highlight=False, soft_wrap=True)
        return
    show("\n")
    if session.last_finish is FinishReason.LENGTH:
        notes.print("(the answer was cut at its limit)", style="dim")
