"""`dsv4 render FILE.json`: print the prompt that a conversation becomes, exactly, without a newline at the end."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dsv4.text.chat import ChatError, effort_profile, encode_messages
from dsv4.tools.plan.targets import resolve_target

_KEYS = ("messages", "tools", "response_format", "reasoning_effort")


def render_file(
    file: Path,
    *,
    thinking: bool,
    reasoning_effort: str | None = None,
    profile: str = "preview",
    drop_thinking: bool = True,
    add_bos: bool = True,
) -> str:
    """The prompt for a JSON file: a list of messages, or an object with `messages` and optional `tools`,
    `response_format` and `reasoning_effort` (an effort given as an argument wins). `ChatError` says what is wrong.
    """
    try:
        conversation: Any = json.loads(file.read_bytes().decode("utf-8"))
    except OSError as error:
        raise ChatError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ChatError(f"{file}: not a JSON file: {error}") from error
    if isinstance(conversation, list):
        conversation = {"messages": conversation}
    if not isinstance(conversation, dict):
        found = type(conversation).__name__
        raise ChatError(f"{file}: expected a list of messages or an object with 'messages', found {found}")
    unknown = sorted(set(conversation) - set(_KEYS))
    if unknown or "messages" not in conversation:
        found = f"unknown {', '.join(unknown)}" if unknown else "no messages"
        raise ChatError(f"{file}: expected messages and optionally {', '.join(_KEYS[1:])}; found {found}")
    return encode_messages(
        conversation["messages"],
        thinking=thinking,
        tools=conversation.get("tools"),
        response_format=conversation.get("response_format"),
        reasoning_effort=reasoning_effort if reasoning_effort is not None else conversation.get("reasoning_effort"),
        profile=profile,
        drop_thinking=drop_thinking,
        add_bos=add_bos,
    )


def render_command(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] FILE",
            help="FILE is JSON: a list of messages, or an object with messages and tools. MODEL chooses the profile.",
        ),
    ],
    thinking: Annotated[bool, typer.Option("--thinking", help="Open the answer with reasoning.")] = False,
    reasoning_effort: Annotated[
        str | None, typer.Option(help="Reasoning effort: low, high or max, as the profile allows.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="Effort prompts: preview (April, default) or final (0731, 0813).")
    ] = None,
    keep_thinking: Annotated[bool, typer.Option("--keep-thinking", help="Keep reasoning of earlier turns.")] = False,
    no_bos: Annotated[bool, typer.Option("--no-bos", help="Leave out the begin-of-sentence marker.")] = False,
) -> None:
    """Print the exact prompt of a conversation, without a newline at the end.

    \b
    Examples:
      dsv4 render conversation.json
      dsv4 render ./checkpoint conversation.json
      dsv4 render conversation.json --thinking --reasoning-effort max
    """
    if len(words) > 2:
        raise ChatError(f"expected MODEL and FILE, found {len(words)} words")
    if profile is None and len(words) == 2:
        profile = effort_profile(resolve_target(words[0]).config)
    prompt = render_file(
        Path(words[-1]),
        thinking=thinking,
        reasoning_effort=reasoning_effort,
        profile=profile or "preview",
        drop_thinking=not keep_thinking,
        add_bos=not no_bos,
    )
    # Bytes, so that neither the platform's encoding nor its newlines touch the prompt.
    typer.echo(prompt.encode("utf-8"), nl=False)
