"""`dsv4 serve`: the HTTP server. Its libraries are the extra `serve`."""

import importlib.util
import logging.config
import math
import os
from pathlib import Path

import typer
from rich.console import Console

from dsv4.cli.serve.options import ServeOptions, command_of
from dsv4.cli.serve.options_file import options_text
from dsv4.config import ConfigError, EngineConfig, ModelConfig
from dsv4.http.address import take_address
from dsv4.http.processes.settings import RecordSettings
from dsv4.http.processes.supervisor import Supervisor
from dsv4.http.settings import MIB, ServerConfig, TlsFiles
from dsv4.http.telemetry.logs import log_config
from dsv4.loader.generation_defaults import FILE_NAME, describe, read_sampling_defaults
from dsv4.loader.shipped import how_to_install, is_shipped
from dsv4.text.chat import effort_profile
from dsv4.tools import model_loading
from dsv4.tools.auto.choose import choose_for
from dsv4.tools.auto.machine import read_machine
from dsv4.tools.auto.settings import Settings, Wishes, table
from dsv4.tools.memory_check import free_host_bytes

_LIBRARIES = ("starlette", "pydantic", "uvicorn", "prometheus_client", "llguidance")
_MAX_FRONT_ENDS = 8
# a trainer sends its whole batch in one request, and the names of all tensors in another
_RL_MAX_BODY_BYTES = 64 * MIB
_RL_MAX_WAITING = 65536
_LOG = logging.getLogger("dsv4.serve")


def serve(typed: typer.Context, given: ServeOptions) -> None:
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
    if given.print_config:
        print(options_text(typed), end="")
        raise typer.Exit
    wishes, num_front_ends = _checked(given), given.front_ends or _default_front_ends()
    console = Console(stderr=True)
    chosen = model_loading.one_model(given.model, given.model_option)
    folder = model_loading.find_model(chosen, console, revision=given.revision)
    config = ModelConfig.from_pretrained(folder)
    model_loading.check_tokenizer(folder, "a server")
    machine = read_machine().as_if_idle() if "WORLD_SIZE" in os.environ else read_machine()
    found = choose_for(folder, config, wishes, machine, given.dtype)
    name = given.name if given.name is not None else model_loading.model_name(chosen, folder)
    settings = _server(given, name, folder, effort_profile(config), found)
    loading = model_loading.ModelSettings(
        folder=str(folder), numerics=given.numerics, dtype=given.dtype, device=found.device, limits=found.limits,
        offload_experts=found.offload_experts, drafts=found.drafts, gpus=found.gpus, threads=given.threads,
        ignore_selftest=given.ignore_selftest,
    )  # fmt: skip
    if _is_another_rank():
        model_loading.load_llm(loading, console)  # serves rank 0, and leaves the process with it
    model_loading.check_loading(loading)
    record = _record(given)
    _make_folder("--cache-dir", given.cache_dir)
    listener = take_address(settings)  # before the weights: a port that is taken should not cost minutes
    if not settings.is_loopback and given.api_key is None:
        model_loading.print_note(f"{given.host} can be reached from other machines and no --api-key is set", console)
        if given.rl:
            model_loading.print_note("with --rl everyone who reaches it can replace the weights", console)
    logging.config.dictConfig(log_config(given.log_format))
    _show(found, console, given.log_format)
    if found.visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = found.visible  # of the processes that are started
    if settings.sampling_defaults:
        described = describe(settings.sampling_defaults)
        _LOG.info("requests that do not say otherwise: %s (%s)", described, FILE_NAME)
    supervisor = Supervisor(
        loading, settings, listener, num_front_ends=num_front_ends, record=record, restarts=given.restart,
        step_seconds=given.step_seconds,
    )  # fmt: skip
    raise typer.Exit(supervisor.run())


serve_command = command_of(ServeOptions, serve)


def _checked(given: ServeOptions) -> Wishes:
    """What is asked of the machine. `ConfigError` for what can be wrong before a model is looked for."""
    missing = [library for library in _LIBRARIES if importlib.util.find_spec(library) is None]
    if missing:
        raise ConfigError(f"dsv4 serve needs {', '.join(missing)}: {how_to_install('serve')}")
    model_loading.check_numerics(given.numerics, given.dtype)
    model_loading.check_choice("--warmup", given.warmup, ("fast", "full"))
    offload = model_loading.parse_offload(given.offload_experts)
    drafts = None if given.drafts is None else model_loading.parse_drafts(given.drafts)
    if given.api_key is None and os.environ.get("DSV4_API_KEY") == "":
        raise ConfigError("DSV4_API_KEY is empty: give it a value, or unset it to serve without a key")
    if given.front_ends is not None and given.front_ends < 1:
        raise ConfigError(f"--front-ends must be at least 1, found {given.front_ends}")
    if not (math.isfinite(given.step_seconds) and given.step_seconds > 0):
        raise ConfigError(f"--step-seconds must be a positive number, found {given.step_seconds:g}")
    default_gib = 0.0 if given.cache_dir is None else 2.0
    host_gib = default_gib if given.cache_host_gib is None else given.cache_host_gib
    tiers = EngineConfig(
        cache_dir=None if given.cache_dir is None else str(given.cache_dir),
        cache_host_bytes=_gib("--cache-host-gib", host_gib, free_host_bytes()),
        cache_disk_bytes=_gib("--cache-disk-gib", given.cache_disk_gib),
        verify_hits=given.verify_hits,
        captures_late=given.warmup == "fast",
    )
    return Wishes(
        device=given.device, gpus=_num_ranks(given.gpus), requests=given.requests, context=given.context,
        chunk=given.chunk, drafts=drafts, offload_experts=offload, memory=given.memory, numerics=given.numerics,
        limits=tiers,
    )  # fmt: skip


def _server(given: ServeOptions, name: str, folder: Path, efforts: str, found: Settings) -> ServerConfig:
    default_waiting = _RL_MAX_WAITING if given.rl else 256
    return ServerConfig(
        name=name,
        root=folder.name if is_shipped(folder) else None,
        host=given.host,
        port=given.port,
        allowed_hosts=tuple(given.allowed_host or ()),
        tls=_tls_files(given.ssl_certfile, given.ssl_keyfile, given.ssl_keyfile_password),
        api_key=given.api_key,
        default_thinking=given.thinking,
        effort_profile=efforts,
        sampling_defaults=read_sampling_defaults(folder) if given.generation_config else {},
        max_output_tokens=given.max_tokens,
        max_waiting=given.max_waiting if given.max_waiting is not None else default_waiting,
        max_connections=given.max_connections,
        drain_seconds=given.drain_seconds,
        log_format=given.log_format,
        rl=given.rl,
        profile_dir=None if given.profile_dir is None else str(given.profile_dir.resolve()),
        choices=found.choices,
        planned_bytes=found.planned,
        rl_roots=_roots(given.rl_root or [], rl=given.rl),
        **({"max_body_bytes": _RL_MAX_BODY_BYTES} if given.rl else {}),
    )


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


def _record(given: ServeOptions) -> RecordSettings | None:
    if given.record is None:
        if given.record_hashes_only:
            raise ConfigError("--record-hashes-only needs --record FILE")
        return None
    for option, value in {"--record-mib": given.record_mib, "--record-files": given.record_files}.items():
        if value < 1:
            raise ConfigError(f"{option} must be at least 1, found {value}")
    return RecordSettings(
        path=str(given.record), max_bytes=given.record_mib * MIB, num_files=given.record_files,
        hashes_only=given.record_hashes_only,
    )  # fmt: skip


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
