"""`dsv4 serve`: the HTTP server. Its libraries are the extra `serve`."""

from __future__ import annotations

import importlib.util
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from dsv4.config import ConfigError, ModelConfig
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
from dsv4.serve.settings import ServerConfig
from dsv4.text.chat import effort_profile

_LIBRARIES = ("fastapi", "uvicorn", "prometheus_client", "llguidance")


def serve_command(
    model: ModelOption = None,
    name: Annotated[str | None, typer.Option(help="The model's name in requests. Default: the folder's.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for every network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="DSV4_API_KEY", help="Required of every request to /v1.", show_envvar=True)
    ] = None,
    thinking: Annotated[bool, typer.Option("--thinking", help="Think unless a request says otherwise.")] = False,
    requests: Annotated[int, typer.Option(help="Requests at once; others wait.")] = 8,
    context: Annotated[
        int | None,
        typer.Option(help=f"Most tokens of prompt and answer. Default: the model's, up to {DEFAULT_CONTEXT}."),
    ] = None,
    chunk: Annotated[int, typer.Option(help="Most prompt tokens in one forward call.")] = 2048,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens an answer may ask for.")] = None,
    max_waiting: Annotated[int, typer.Option(help="Requests that may wait before others are refused.")] = 256,
    drain_seconds: Annotated[float, typer.Option(help="How long a shutdown waits for what runs.")] = 60.0,
    numerics: NumericsOption = "official",
    dtype: DtypeOption = None,
    device: DeviceOption = "cpu",
    offload_experts: OffloadOption = None,
) -> None:
    """Serve a model over HTTP: OpenAI's interface at /v1, a page to talk to at /, metrics at /metrics.

    \b
    Examples:
      dsv4 serve --model ./checkpoint
      DSV4_API_KEY=secret dsv4 serve --model ./checkpoint --host 0.0.0.0 --requests 32
      dsv4 serve --model ./checkpoint --device cuda --offload-experts auto
    """
    missing = [library for library in _LIBRARIES if importlib.util.find_spec(library) is None]
    if missing:
        raise ConfigError(f"dsv4 serve needs {', '.join(missing)}: pip install 'dsv4[serve]'")
    check_numerics(numerics, dtype)
    offload = parse_offload(offload_experts)
    console = Console(stderr=True)
    folder = find_model(model, console)
    config = ModelConfig.from_pretrained(folder)
    settings = ServerConfig(
        name=name if name is not None else folder.resolve().name,
        host=host,
        port=port,
        api_key=api_key,
        default_thinking=thinking,
        effort_profile=effort_profile(config),
        max_output_tokens=max_tokens,
        max_waiting=max_waiting,
        drain_seconds=drain_seconds,
    )
    limits = engine_limits(config, context=context, requests=requests, chunk=chunk)
    llm = load_llm(
        folder, numerics=numerics, dtype=dtype, device=device, limits=limits, console=console,
        offload_experts=offload,
    )  # fmt: skip
    if not settings.is_loopback and api_key is None:
        note = f"dsv4: note: {host} can be reached from other machines and no --api-key is set"
        console.print(note, markup=False, highlight=False, soft_wrap=True)

    from dsv4.serve.server import serve  # here: it loads torch and the web framework

    console.print(f"serving [bold]{escape(settings.name)}[/bold] at http://{host}:{port}", highlight=False)
    serve(llm, settings)
