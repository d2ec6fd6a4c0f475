"""`dsv4 chat`: talk to a model in the terminal. Answers stream; thinking is dimmed; Ctrl-C ends an answer."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from dsv4.config import ModelConfig
from dsv4.request import FinishReason, SamplingParams
from dsv4.text.chat import ChatOptions, effort_profile
from dsv4.text.parse import ContentDelta, ReasoningDelta, ToolCallDelta, ToolCallStart
from dsv4.tools import model_loading

if TYPE_CHECKING:
    from dsv4.cli.chat_session import ChatSession

BLOCK = '"""'
HELP = f"""\
/help         this text
/reset        forget the conversation
/save FILE    write the conversation as JSON (`dsv4 render FILE` shows its prompt)
/quit         leave (so does Ctrl-D); Ctrl-C ends an answer
{BLOCK}           begins a message of several lines, and ends it
\\             at the end of a line: the message goes on in the next line"""


def chat_command(
    model: model_loading.ModelArgument = None,
    model_option: model_loading.ModelOption = None,
    revision: model_loading.RevisionOption = None,
    system: Annotated[str | None, typer.Option(help="A system message for the whole conversation.")] = None,
    thinking: Annotated[bool, typer.Option("--thinking", help="Let the model think first; shown dimmed.")] = False,
    effort: Annotated[
        str | None, typer.Option(help="Reasoning effort, as the checkpoint knows; needs --thinking.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum new tokens of one answer.")] = 2048,
    temperature: model_loading.TemperatureOption = None,
    top_p: model_loading.TopPOption = None,
    seed: Annotated[
        int | None, typer.Option(help="The same seed gives the same answers. Default: a new one each.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            help=f"Maximum tokens of a conversation. Default: the model's, at most {model_loading.DEFAULT_CONTEXT}."
        ),
    ] = None,
    numerics: model_loading.NumericsOption = "official",
    dtype: model_loading.DtypeOption = None,
    device: model_loading.DeviceOption = "auto",
    gpus: model_loading.GpusOption = None,
    offload_experts: model_loading.OffloadOption = None,
    drafts: model_loading.DraftsOption = "off",
    ignore_selftest: model_loading.IgnoreSelftestOption = False,
    threads: model_loading.ThreadsOption = None,
) -> None:
    """Chat with a model in the terminal. Type /help for the commands; lines from a pipe are answered in turn.

    \b
    Examples:
      dsv4 chat ./checkpoint
      dsv4 chat ./checkpoint --thinking --effort max --system "Answer briefly."
      dsv4 chat ./checkpoint --gpus 2
    """
    model_loading.check_numerics(numerics, dtype)
    offload, draft_count = model_loading.parse_offload(offload_experts), model_loading.parse_drafts(drafts)
    notes = Console(stderr=True)
    folder = model_loading.find_model(model, notes, option=model_option, revision=revision)
    config = ModelConfig.from_pretrained(folder)
    options = ChatOptions(thinking=thinking, reasoning_effort=effort, profile=effort_profile(config))
    model_loading.check_tokenizer(folder, "a chat")
    params = model_loading.with_defaults(
        SamplingParams(max_tokens=max_tokens), {"temperature": temperature, "top_p": top_p}, folder, notes
    )
    limits = model_loading.engine_limits(config, context=context, requests=1)
    wanted = model_loading.ModelSettings(
        folder=str(folder), numerics=numerics, dtype=dtype, device=device, limits=limits, offload_experts=offload,
        drafts=draft_count, gpus=gpus, threads=threads, ignore_selftest=ignore_selftest,
    )  # fmt: skip
    llm = model_loading.load_llm(model_loading.place_model(wanted, notes), notes)

    from dsv4.cli.chat_session import ChatSession  # here: it loads torch

    session = ChatSession(llm, options, params, seed, system)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        _enable_line_editing()
        notes.print("[dim]/help for the commands, Ctrl-D to leave[/dim]")
    prompts = ("> ", "... ") if is_terminal else ("", "")
    run_chat(session, partial(read_message, *prompts), Console(highlight=False), notes)


def _enable_line_editing() -> None:
    """Cursor keys and earlier lines at the prompt, where the platform has them."""
    if importlib.util.find_spec("readline") is not None:
        importlib.import_module("readline")


def read_message(prompt: str, more_prompt: str, read_line: Callable[[str], str] = input) -> str | None:
    """The next message, None at the end of the input.

    A line that ends with a backslash goes on in the next. Lines between two lines of three quotes are one message, as
    they stand; the quotes may share a line with its first and last words.
    """
    lines: list[str] = []
    try:
        first = read_line(prompt)
        if first.lstrip().startswith(BLOCK):
            lines.append(first.lstrip()[len(BLOCK) :])
            while not lines[-1].rstrip().endswith(BLOCK):
                lines.append(read_line(more_prompt))
            lines[-1] = lines[-1].rstrip()[: -len(BLOCK)]
            return "\n".join(lines).strip("\n")
        lines.append(first)
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(read_line(more_prompt))
    except EOFError:
        if not lines:
            return None
    return "\n".join(lines)


def run_chat(session: ChatSession, read: Callable[[], str | None], out: Console, notes: Console) -> None:
    """Read messages until there are none; answer them or obey them."""
    while (message := read()) is not None:
        text = message.strip()
        if not text:
            continue
        if text in ("/quit", "/exit"):
            return
        if text.startswith("/") and "\n" not in text:
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
    """Stream one answer. Ctrl-C ends it; the text so far stays in the conversation."""

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
