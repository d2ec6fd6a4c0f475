"""`dsv4 serve`: the HTTP server. Its libraries are the extra `serve`."""

from __future__ import annotations

import importlib.util
import logging.config
import math
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dsv4.cli.serve.options_file import load_options, options_text
from dsv4.config import ConfigError, EngineConfig, ModelConfig
from dsv4.http.address import take_address
from dsv4.http.processes.settings import ModelSettings, RecordSettings, load_model
from dsv4.http.processes.supervisor import Supervisor
from dsv4.http.settings import MIB, ServerConfig, TlsFiles
from dsv4.http.telemetry.logs import log_config
from dsv4.loader.generation_defaults import FILE_NAME, describe, read_sampling_defaults
from dsv4.loader.shipped import how_to_install, is_shipped
from dsv4.text.chat import effort_profile
from dsv4.tools.auto.choose import choose_for
from dsv4.tools.auto.machine import read_machine
from dsv4.tools.auto.settings import Settings, Wishes, table
from dsv4.tools.memory_check import free_host_bytes
from dsv4.tools.model_loading import (
    DtypeOption,
    IgnoreSelftestOption,
    ModelArgument,
    ModelOption,
    NumericsOption,
    RevisionOption,
    ThreadsOption,
    check_choice,
    check_loading,
    check_numerics,
    check_tokenizer,
    find_model,
    model_name,
    one_model,
    parse_drafts,
    parse_offload,
    print_note,
)

_LIBRARIES = ("fastapi", "uvicorn", "prometheus_client", "llguidance")
_MAX_FRONT_ENDS = 8
# a trainer sends its whole batch in one request, and the names of all tensors in another
_RL_MAX_BODY_BYTES = 64 * MIB
_RL_MAX_WAITING = 65536
_LOG = logging.getLogger("dsv4.serve")


def serve_command(
    typed: typer.Context,
    model: ModelArgument = None,
    model_option: ModelOption = None,
    revision: RevisionOption = None,
    name: Annotated[str | None, typer.Option(help="Model name in the API. Default: the folder's name.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every network interface.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 chooses a free one.")] = 8000,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Another accepted Host header, e.g. a reverse proxy's; * accepts any."),
    ] = None,
    ssl_certfile: Annotated[Path | None, typer.Option(help="PEM certificate; turns HTTPS on.")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="Private key, if the certificate's file has none.")] = None,
    ssl_keyfile_password: Annotated[
        str | None,
        typer.Option(envvar="DSV4_SSL_KEYFILE_PASSWORD", help="Password of the private key.", show_envvar=True),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="DSV4_API_KEY", help="API key that requests to /v1 must send.", show_envvar=True),
    ] = None,
    thinking: Annotated[
        bool, typer.Option("--thinking", help="Turn reasoning on by default; a request can turn it off.")
    ] = False,
    requests: Annotated[
        int | None, typer.Option(help="Maximum concurrent requests; further ones wait. Default: as many as fit.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(help="Maximum tokens of prompt and answer. Default: the model's own, if the memory holds it."),
    ] = None,
    chunk: Annotated[
        int | None, typer.Option(help="Maximum prompt tokens in one step (prefill chunk). Default: by measured speed.")
    ] = None,
    memory: Annotated[
        float,
        typer.Option(
            help="Share of the memory to use: of each GPU, or of what is free on a busy GPU or a machine without."
        ),
    ] = 0.92,
    max_tokens: Annotated[int | None, typer.Option(help="Largest max_tokens that a request may ask for.")] = None,
    max_waiting: Annotated[
        int | None, typer.Option(help="Maximum queued requests; further ones get 503. Default: 256, 65536 with --rl.")
    ] = None,
    max_connections: Annotated[int, typer.Option(help="Maximum open connections; further ones get 503.")] = 1024,
    drain_seconds: Annotated[float, typer.Option(help="Seconds that a shutdown waits for running requests.")] = 60.0,
    numerics: NumericsOption = "official",
    dtype: DtypeOption = None,
    device: Annotated[
        str, typer.Option(help="Device: auto (GPUs where there are any), cpu, cuda, or cuda:N for one GPU.")
    ] = "auto",
    gpus: Annotated[
        int | None, typer.Option(help="GPUs that share the model, one process each. Default: all, if it is large.")
    ] = None,
    offload_experts: Annotated[
        str | None,
        typer.Option(
            help="Experts in host memory: auto fills the GPU with the others; a number, e.g. 64, is how many of each "
            "layer stay on it; off keeps all. Default: auto if they do not fit."
        ),
    ] = None,
    drafts: Annotated[
        str | None,
        typer.Option(
            help="Speculative decoding: draft tokens per step, auto, or off. The output is the same. Default: auto on "
            "a GPU with a DSpark head, else off."
        ),
    ] = None,
    warmup: Annotated[
        str,
        typer.Option(
            help="full: every size of a decode step has its CUDA graph before the server answers. fast: the server "
            "answers with two of them, the others follow in idle time."
        ),
    ] = "full",
    ignore_selftest: IgnoreSelftestOption = False,
    threads: ThreadsOption = None,
    generation_config: Annotated[
        bool, typer.Option(help="Take sampling defaults from the checkpoint's generation_config.json.")
    ] = True,
    log_format: Annotated[str, typer.Option(help="Log format: text, or json (one object a line).")] = "text",
    cache_dir: Annotated[
        Path | None, typer.Option(help="Folder for prefix-cache files, which survive a restart.")
    ] = None,
    cache_host_gib: Annotated[
        float | None, typer.Option(help="Host memory for the prefix cache, GiB. Default: 0, or 2 with --cache-dir.")
    ] = None,
    cache_disk_gib: Annotated[float, typer.Option(help="Disk cache size, GiB.")] = 16.0,
    verify_hits: Annotated[
        float, typer.Option(help="Fraction of prefix hits to recompute when idle and compare bit by bit.")
    ] = 0.0,
    record: Annotated[
        Path | None, typer.Option(help="Append every request and its result to this file, for `dsv4 replay`.")
    ] = None,
    record_hashes_only: Annotated[
        bool, typer.Option("--record-hashes-only", help="Record digests instead of prompts and answers.")
    ] = False,
    record_mib: Annotated[int, typer.Option(help="Size in MiB at which the record is rotated to FILE.1.")] = 256,
    record_files: Annotated[int, typer.Option(help="Number of record files to keep.")] = 4,
    rl: Annotated[
        bool,
        typer.Option("--rl", help="Routes for trainers (docs/rl.md): pause, new weights, rollouts by token ids."),
    ] = False,
    rl_root: Annotated[
        list[Path] | None,
        typer.Option(help="With --rl: a folder that weights may be read from; can be given several times."),
    ] = None,
    front_ends: Annotated[
        int | None, typer.Option(help="HTTP processes. Default: one for every four cores, at most 8.")
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Restart the engine if it dies or hangs.")] = False,
    step_seconds: Annotated[
        float, typer.Option(help="The engine is considered hung when one step takes longer.")
    ] = 300.0,
    profile_dir: Annotated[
        Path | None, typer.Option(help="Folder for torch profiles: POST /start_profile and /stop_profile. Needs a key.")
    ] = None,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config", is_eager=True, callback=load_options, help="Options from a TOML file; see --print-config."
        ),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print every option as --config takes it, and stop.")
    ] = False,
) -> None:
    """Serve a model over HTTP: OpenAI's and Anthropic's interfaces at /v1, a chat page at /, metrics at /metrics.

    \b
    Examples:
      dsv4 serve ./checkpoint
      DSV4_API_KEY=secret dsv4 serve ./checkpoint --host 0.0.0.0 --requests 32
      dsv4 serve ./checkpoint --context 131072 --memory 0.8
      dsv4 serve ./checkpoint --cache-dir ./prefixes --cache-host-gib 8
      dsv4 serve ./checkpoint --record receipts.jsonl
      dsv4 serve ./checkpoint --gpus 4 --requests 256
      dsv4 serve ./checkpoint --front-ends 4 --restart
      dsv4 serve ./checkpoint --rl --rl-root ./weights
      dsv4 serve ./checkpoint --print-config > serve.toml && dsv4 serve --config serve.toml
    """
    if print_config:
        print(options_text(typed), end="")
        raise typer.Exit
    missing = [library for library in _LIBRARIES if importlib.util.find_spec(library) is None]
    if missing:
        raise ConfigError(f"dsv4 serve needs {', '.join(missing)}: {how_to_install('serve')}")
    check_numerics(numerics, dtype)
    check_choice("--warmup", warmup, ("fast", "full"))
    offload = parse_offload(offload_experts)
    draft_count = None if drafts is None else parse_drafts(drafts)
    if api_key is None and os.environ.get("DSV4_API_KEY") == "":
        raise ConfigError("DSV4_API_KEY is empty: give it a value, or unset it to serve without a key")
    num_front_ends = _default_front_ends() if front_ends is None else front_ends
    if num_front_ends < 1:
        raise ConfigError(f"--front-ends must be at least 1, found {num_front_ends}")
    if not (math.isfinite(step_seconds) and step_seconds > 0):
        raise ConfigError(f"--step-seconds must be a positive number, found {step_seconds:g}")
    console = Console(stderr=True)
    chosen = one_model(model, model_option)
    folder = find_model(chosen, console, revision=revision)
    config = ModelConfig.from_pretrained(folder)
    check_tokenizer(folder, "a server")
    host_gib = (0.0 if cache_dir is None else 2.0) if cache_host_gib is None else cache_host_gib
    tiers = EngineConfig(
        cache_dir=None if cache_dir is None else str(cache_dir),
        cache_host_bytes=_gib("--cache-host-gib", host_gib, free_host_bytes()),
        cache_disk_bytes=_gib("--cache-disk-gib", cache_disk_gib),
        verify_hits=verify_hits,
        captures_late=warmup == "fast",
    )
    wishes = Wishes(
        device=device, gpus=_num_ranks(gpus), requests=requests, context=context, chunk=chunk, drafts=draft_count,
        offload_experts=offload, memory=memory, numerics=numerics, limits=tiers,
    )  # fmt: skip
    machine = read_machine()
    found = choose_for(folder, config, wishes, machine.as_if_idle() if "WORLD_SIZE" in os.environ else machine, dtype)
    settings = ServerConfig(
        name=name if name is not None else model_name(chosen, folder),
        root=folder.name if is_shipped(folder) else None,
        host=host,
        port=port,
        allowed_hosts=tuple(allowed_host or ()),
        tls=_tls_files(ssl_certfile, ssl_keyfile, ssl_keyfile_password),
        api_key=api_key,
        default_thinking=thinking,
        effort_profile=effort_profile(config),
        sampling_defaults=read_sampling_defaults(folder) if generation_config else {},
        max_output_tokens=max_tokens,
        max_waiting=max_waiting if max_waiting is not None else _RL_MAX_WAITING if rl else 256,
        max_connections=max_connections,
        drain_seconds=drain_seconds,
        log_format=log_format,
        rl=rl,
        profile_dir=None if profile_dir is None else str(profile_dir.resolve()),
        choices=found.choices,
        planned_bytes=found.planned,
        rl_roots=_roots(rl_root or [], rl=rl),
        **({"max_body_bytes": _RL_MAX_BODY_BYTES} if rl else {}),
    )
    loading = ModelSettings(
        folder=str(folder), numerics=numerics, dtype=dtype, device=found.device, limits=found.limits,
        offload_experts=found.offload_experts, drafts=found.drafts, gpus=found.gpus, threads=threads,
        ignore_selftest=ignore_selftest,
    )  # fmt: skip
    if _is_another_rank():
        load_model(loading, console)  # serves rank 0, and leaves the process with it
    check_loading(
        folder, numerics=numerics, dtype=dtype, device=found.device, limits=found.limits, drafts=found.drafts,
        gpus=found.gpus, threads=threads,
    )  # fmt: skip
    record_settings = _record(record, record_mib, record_files, hashes_only=record_hashes_only)
    _make_folder("--cache-dir", cache_dir)
    listener = take_address(settings)  # before the weights: a port that is taken should not cost minutes
    if not settings.is_loopback and api_key is None:
        print_note(f"{host} can be reached from other machines and no --api-key is set", console)
        if rl:
            print_note("with --rl everyone who reaches it can replace the weights", console)
    logging.config.dictConfig(log_config(log_format))
    _show(found, console, log_format)
    if found.visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = found.visible  # of the processes that are started
    if settings.sampling_defaults:
        described = describe(settings.sampling_defaults)
        _LOG.info("requests that do not say otherwise: %s (%s)", described, FILE_NAME)
    supervisor = Supervisor(
        loading, settings, listener, num_front_ends=num_front_ends, record=record_settings, restarts=restart,
        step_seconds=step_seconds,
    )  # fmt: skip
    raise typer.Exit(supervisor.run())


def _is_another_rank() -> bool:
    """Whether torchrun started this process as a rank besides the first."""
    return "WORLD_SIZE" in os.environ and os.environ.get("RANK", "0") != "0"


def _num_ranks(gpus: int | None) -> int | None:
    """As many as torchrun started, if it did."""
    return int(os.environ["WORLD_SIZE"]) if gpus is None and "WORLD_SIZE" in os.environ else gpus


def _show(found: Settings, console: Console, log_format: str) -> None:
    """What was chosen: a table, or a line of the log with fields."""
    if log_format == "json":
        fields = {"settings": {choice.what: choice.value for choice in found.choices}}
        _LOG.info("chosen by what this machine has", extra={"fields": fields})
    else:
        console.print(table(found.choices), markup=False, highlight=False, soft_wrap=True)


def _default_front_ends() -> int:
    """A core in four, as they leave the others to the engine and to the kernel's network code."""
    return min(max(len(os.sched_getaffinity(0)) // 4, 1), _MAX_FRONT_ENDS)


def _tls_files(certfile: Path | None, keyfile: Path | None, password: str | None) -> TlsFiles | None:
    """Checked as uvicorn will use them: a wrong file or password should not cost the loading of a model."""
    if certfile is None:
        if keyfile is not None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile")
        return None
    import ssl

    try:
        # without a password OpenSSL would ask the terminal for one
        given = password or ""
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, lambda: given)
    except FileNotFoundError as error:
        missing = next(file for file in (certfile, keyfile) if file is not None and not file.exists())
        raise ConfigError(f"--ssl-certfile, --ssl-keyfile: {missing} does not exist") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"--ssl-certfile, --ssl-keyfile: not a PEM certificate and its key: {error}") from error
    return TlsFiles(
        certfile=str(certfile), keyfile=None if keyfile is None else str(keyfile), keyfile_password=password
    )


def _record(path: Path | None, max_mib: int, num_files: int, *, hashes_only: bool) -> RecordSettings | None:
    if path is None:
        if hashes_only:
            raise ConfigError("--record-hashes-only needs --record FILE")
        return None
    for option, value in {"--record-mib": max_mib, "--record-files": num_files}.items():
        if value < 1:
            raise ConfigError(f"{option} must be at least 1, found {value}")
    return RecordSettings(path=str(path), max_bytes=max_mib * MIB, num_files=num_files, hashes_only=hashes_only)


def _make_folder(option: str, folder: Path | None) -> None:
    """Before the weights: what the engine would find out after them."""
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option} {folder} cannot be created: {error.strerror}") from None
    if folder is not None and not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {folder} cannot be written to")


def _roots(folders: list[Path], *, rl: bool) -> tuple[str, ...]:
    if folders and not rl:
        raise ConfigError("--rl-root needs --rl")
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"--rl-root: {folder} is no folder")
    return tuple(str(folder.resolve()) for folder in folders)


def _gib(option: str, value: float, most: int | None = None) -> int:
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{option} must be a number of GiB, at least 0, found {value:g}")
    if most is not None and value * 2**30 > most:
        raise ConfigError(f"{option} {value:g}: this machine has {most / 2**30:,.1f} GiB of memory free")
    return int(value * 2**30)
