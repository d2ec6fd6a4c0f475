"""`ServeOptions`: every option of `dsv4 serve`, with its help; and `command_of`, which makes a command of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from dsv4.cli.serve.options_file import load_options
from dsv4.tools.model_loading import (
    DtypeOption,
    IgnoreSelftestOption,
    ModelArgument,
    ModelOption,
    NumericsOption,
    RevisionOption,
    ThreadsOption,
)

Options = TypeVar("Options")


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    model: ModelArgument = None
    model_option: ModelOption = None
    revision: RevisionOption = None
    name: Annotated[str | None, typer.Option(help="Model name in the API. Default: the folder's name.")] = None
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every network interface.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Port; 0 chooses a free one.")] = 8000
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Another accepted Host header, e.g. a reverse proxy's; * accepts any."),
    ] = None
    ssl_certfile: Annotated[Path | None, typer.Option(help="PEM certificate; turns HTTPS on.")] = None
    ssl_keyfile: Annotated[Path | None, typer.Option(help="Private key, if the certificate's file has none.")] = None
    ssl_keyfile_password: Annotated[
        str | None,
        typer.Option(envvar="DSV4_SSL_KEYFILE_PASSWORD", help="Password of the private key.", show_envvar=True),
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option(envvar="DSV4_API_KEY", help="API key that requests to /v1 must send.", show_envvar=True),
    ] = None
    thinking: Annotated[
        bool, typer.Option("--thinking", help="Turn reasoning on by default; a request can turn it off.")
    ] = False
    requests: Annotated[
        int | None, typer.Option(help="Maximum concurrent requests; further ones wait. Default: as many as fit.")
    ] = None
    context: Annotated[
        int | None,
        typer.Option(help="Maximum tokens of prompt and answer. Default: the model's own, if the memory holds it."),
    ] = None
    chunk: Annotated[
        int | None,
        typer.Option(
            help="Maximum prompt tokens in one step (prefill chunk); streams wait for all of them. "
            "Default: by measured speed."
        ),
    ] = None
    memory: Annotated[
        float,
        typer.Option(
            help="Share of the memory to use: of each GPU, or of what is free on a busy GPU or a machine without."
        ),
    ] = 0.92
    max_tokens: Annotated[int | None, typer.Option(help="Largest max_tokens that a request may ask for.")] = None
    max_waiting: Annotated[
        int | None, typer.Option(help="Maximum queued requests; further ones get 503. Default: 256, 65536 with --rl.")
    ] = None
    max_connections: Annotated[int, typer.Option(help="Maximum open connections; further ones get 503.")] = 1024
    drain_seconds: Annotated[float, typer.Option(help="Seconds that a shutdown waits for running requests.")] = 60.0
    numerics: NumericsOption = "official"
    dtype: DtypeOption = None
    device: Annotated[
        str, typer.Option(help="Device: auto (GPUs where there are any), cpu, cuda, or cuda:N for one GPU.")
    ] = "auto"
    gpus: Annotated[
        int | None, typer.Option(help="GPUs that share the model, one process each. Default: all, if it is large.")
    ] = None
    offload_experts: Annotated[
        str | None,
        typer.Option(
            help="Experts in host memory: auto fills the GPU with the others; a number, e.g. 64, is how many of each "
            "layer stay on it; off keeps all. Default: auto if they do not fit."
        ),
    ] = None
    drafts: Annotated[
        str | None,
        typer.Option(
            help="Speculative decoding: draft tokens per step, auto, or off. The output is the same. Default: auto on "
            "a GPU with a DSpark head, else off."
        ),
    ] = None
    warmup: Annotated[
        str,
        typer.Option(
            help="full: every size of a decode step has its CUDA graph before the server answers. fast: the server "
            "answers with two of them, the others follow in idle time."
        ),
    ] = "full"
    ignore_selftest: IgnoreSelftestOption = False
    threads: ThreadsOption = None
    generation_config: Annotated[
        bool, typer.Option(help="Take sampling defaults from the checkpoint's generation_config.json.")
    ] = True
    log_format: Annotated[str, typer.Option(help="Log format: text, or json (one object a line).")] = "text"
    cache_dir: Annotated[Path | None, typer.Option(help="Folder for prefix-cache files, which survive a restart.")] = (
        None
    )
    cache_host_gib: Annotated[
        float | None, typer.Option(help="Host memory for the prefix cache, GiB. Default: 0, or 2 with --cache-dir.")
    ] = None
    cache_disk_gib: Annotated[float, typer.Option(help="Disk cache size, GiB.")] = 16.0
    verify_hits: Annotated[
        float, typer.Option(help="Fraction of prefix hits to recompute when idle and compare bit by bit.")
    ] = 0.0
    record: Annotated[
        Path | None, typer.Option(help="Append every request and its result to this file, for `dsv4 replay`.")
    ] = None
    record_hashes_only: Annotated[
        bool, typer.Option("--record-hashes-only", help="Record digests instead of prompts and answers.")
    ] = False
    record_mib: Annotated[int, typer.Option(help="Size in MiB at which the record is rotated to FILE.1.")] = 256
    record_files: Annotated[int, typer.Option(help="Number of record files to keep.")] = 4
    rl: Annotated[
        bool,
        typer.Option("--rl", help="Routes for trainers (docs/rl.md): pause, new weights, rollouts by token ids."),
    ] = False
    rl_root: Annotated[
        list[Path] | None,
        typer.Option(help="With --rl: a folder that weights may be read from; can be given several times."),
    ] = None
    front_ends: Annotated[
        int | None, typer.Option(help="HTTP processes. Default: one for every four cores, at most 8.")
    ] = None
    restart: Annotated[bool, typer.Option("--restart", help="Restart the engine if it dies or hangs.")] = False
    step_seconds: Annotated[float, typer.Option(help="The engine is considered hung when one step takes longer.")] = (
        300.0
    )
    profile_dir: Annotated[
        Path | None, typer.Option(help="Folder for torch profiles: POST /start_profile and /stop_profile. Needs a key.")
    ] = None
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config", is_eager=True, callback=load_options, help="Options from a TOML file; see --print-config."
        ),
    ] = None
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print every option as --config takes it, and stop.")
    ] = False


def command_of(
    options: Callable[..., Options], run: Callable[[typer.Context, Options], None]
) -> Callable[..., None]:  # fmt: skip
    """What typer takes for a command: the fields of a dataclass as its arguments, the text of `run` as its help."""

    def command(typed: typer.Context, **given: Any) -> None:
        run(typed, options(**given))

    hints = get_type_hints(options, include_extras=True)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter("typed", kind, annotation=typer.Context)]
    for field in fields(options):  # type: ignore[arg-type]
        parameters.append(inspect.Parameter(field.name, kind, default=field.default, annotation=hints[field.name]))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    command.__doc__ = run.__doc__
    return command
