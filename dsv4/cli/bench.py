"""`dsv4 bench`: `model` measures a whole model on any device, `serve` a load of requests, `ops` single ops on a GPU.

The cases and the timer of `ops` belong to a checkout, not to the installed package (nothing in the package imports
`dsv4.testing`), so that one runs `python -m benchmarks ops` in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from dsv4.config import ConfigError
from dsv4.loader.shipped import DEFAULT_SHIPPED, DSPARK_TWIN
from dsv4.loader.write.config_file import ExpertFormat
from dsv4.request import SamplingParams
from dsv4.tools.bench import report as shown
from dsv4.tools.model_loading import DraftsOption, parse_drafts
from dsv4.tools.plan.sizes import EXPERT_FORMATS

if TYPE_CHECKING:
    from dsv4.tools.bench.engine_target import EngineTarget
    from dsv4.tools.bench.model import Report
    from dsv4.tools.bench.workload import Load

_DeviceOption = Annotated[str, typer.Option(help="Device: cpu or cuda.")]

bench_app = typer.Typer(no_args_is_help=True)
CHECKOUT = Path(__file__).parents[2]


@bench_app.callback()
def bench() -> None:
    """Measure this machine."""


@bench_app.command(
    "ops",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)
def bench_ops_command(context: typer.Context) -> None:
    """Time every op at the real shapes of Flash and Pro, or compare records and bits; needs a source checkout.

    Examples:

    dsv4 bench ops --op rms_norm

    dsv4 bench ops --compare old.jsonl new.jsonl

    dsv4 bench ops --help
    """
    if not (CHECKOUT / "benchmarks" / "__main__.py").is_file():
        raise ConfigError(
            f"dsv4 bench ops needs a source checkout: expected {CHECKOUT}/benchmarks, found nothing there"
        )
    command = [sys.executable, "-P", "-m", "benchmarks", "ops", *context.args]
    paths = os.pathsep.join([str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])
    raise typer.Exit(subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}).returncode)


@bench_app.command("model")
def bench_model_command(
    target: Annotated[
        str | None, typer.Argument(help="flash, pro, tiny (random weights) or a checkpoint. Default: the miniature.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Of a preset, only the first N layers.")] = None,
    schedule: Annotated[str | None, typer.Option(help="Of a preset, layers of these kinds: swa,csa,hca,...")] = None,
    experts: Annotated[str, typer.Option(help=f"A preset's experts: {', '.join(EXPERT_FORMATS)}.")] = "mxfp4",
    batches: Annotated[str, typer.Option(help="Requests in a decode step, e.g. 1,16,64.")] = "1,4",
    contexts: Annotated[str, typer.Option(help="Context lengths, e.g. 2048,65536,1048576.")] = "512,2048",
    prefill: Annotated[str, typer.Option(help="Prompt lengths.")] = "512",
    concurrency: Annotated[str, typer.Option(help="Concurrent requests, through the engine.")] = "1,4",
    prompt: Annotated[int, typer.Option(help="Prompt tokens of those requests.", min=1)] = 64,
    output: Annotated[int, typer.Option(help="Tokens each of them generates.", min=1)] = 16,
    repeats: Annotated[int, typer.Option(help="Timed calls of each kind.", min=3)] = 20,
    sections: Annotated[str, typer.Option(help="Which of decode,layers,stream,prefill,serving,memory.")] = "all",
    device: _DeviceOption = "cpu",
    gpus: Annotated[int, typer.Option(help="GPUs that share the model; with --device cpu, processes.")] = 1,
    bandwidth: Annotated[
        float | None, typer.Option(help="Read speed of the memory in TB/s; known for H200. For the byte floor.")
    ] = None,
    offload: Annotated[
        bool, typer.Option("--offload-experts", help="Keep experts that do not fit on the device in host memory.")
    ] = False,
    drafts: DraftsOption = "off",
    as_json: Annotated[bool, typer.Option("--json", help="Print the records as JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture of decode speed (PNG).")] = None,
) -> None:
    """Measure a whole model: decode by batch and context, prefill, latency, throughput, memory against the plan.

    Examples:

    dsv4 bench model

    dsv4 bench model flash --schedule swa,csa,hca,csa --experts nvfp4 --device cuda --batches 1,16,64,256 --contexts
    2048,65536,1048576 --plot speed.png
    """
    from dsv4.tools.bench.context import build_model, build_offloaded
    from dsv4.tools.bench.model import SECTIONS, Settings, bench_ranks, run_bench  # here: they load torch

    chosen, kinds = _expert_format(experts), _kinds(schedule)
    if device.split(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"--device must be cpu or cuda, found {device!r}")
    settings = Settings(
        batches=_numbers("--batches", batches), contexts=_numbers("--contexts", contexts),
        prefill_tokens=_numbers("--prefill", prefill), concurrencies=_numbers("--concurrency", concurrency),
        prompt_tokens=prompt, output_tokens=output, repeats=repeats,
        sections=SECTIONS if sections == "all" else tuple(part.strip() for part in sections.split(",")),
        bandwidth=None if bandwidth is None else 1e12 * bandwidth, drafts=parse_drafts(drafts),
    )  # fmt: skip
    if gpus != 1:
        _report(bench_ranks(target, gpus, device, settings, _note), as_json, plot)
        return
    if offload:
        if kinds is not None:
            raise ConfigError("--offload-experts takes no --schedule")
        model = build_offloaded(target, layers=layers, experts=chosen, device=device, context=max(settings.contexts))
    else:
        model = build_model(target, layers=layers, schedule=kinds, experts=chosen, device=device)
    _report(run_bench(model, settings, _note), as_json, plot)


@bench_app.command("drafts")
def bench_drafts_command(
    targets: Annotated[list[str] | None, typer.Argument(help="Checkpoints. Default: both shipped drafters.")] = None,
    counts: Annotated[str, typer.Option(help="Drafts a step, e.g. 1,3,auto; off always comes first.")] = "all",
    temperatures: Annotated[str, typer.Option(help="Temperatures, measured in turn; 0 is greedy.")] = "0,1",
    prompts: Annotated[int, typer.Option(help="Number of excerpts of the text to continue.", min=1)] = 8,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 64,
    output: Annotated[int, typer.Option(help="Tokens each request generates.", min=2)] = 64,
    concurrency: Annotated[int, typer.Option(help="Concurrent requests.", min=1)] = 1,
    text: Annotated[
        Path | None, typer.Option(help="A UTF-8 text file. Default: one the shipped models never saw.")
    ] = None,
    device: _DeviceOption = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print the records as JSON.")] = False,
) -> None:
    """Measure drafts on text: acceptance by place, tokens per step, tokens/s with and without drafts.

    It fails if drafts change a token.

    Examples:

    dsv4 bench drafts

    dsv4 bench drafts CHECKPOINT --counts 1,2,auto --temperatures 0,0.6 --device cuda
    """
    from dsv4.tools.bench.drafting import DraftLoad, DraftsDiffer, measure_drafts  # here: they load torch

    load = DraftLoad(
        counts=() if counts == "all" else tuple(parse_drafts(part.strip(), "--counts") for part in counts.split(",")),
        temperatures=_temperatures(temperatures), prompts=prompts, prompt_tokens=prompt, output_tokens=output,
        concurrency=concurrency, text=text,
    )  # fmt: skip
    reports = []
    for target in targets or (DEFAULT_SHIPPED, DSPARK_TWIN):
        try:
            reports.append(measure_drafts(target, device, load, _note))
        except DraftsDiffer as error:
            print(f"dsv4: {error}: this is a bug", file=sys.stderr)
            raise typer.Exit(1) from None
        if not as_json:
            _report(reports[-1], False, None)
    if as_json:
        print(json.dumps([report.to_dict() for report in reports], indent=1))


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--temperatures must be numbers separated by commas, found {text!r}") from None
    for value in values:
        SamplingParams(temperature=value)  # says what is wrong with it
    return values


def _note(what: str) -> None:
    print(f"dsv4: {what}", file=sys.stderr)


def _report(report: Report, as_json: bool, plot: Path | None) -> None:
    if as_json:
        print(json.dumps(report.to_dict(), indent=1))
    else:
        shown.print_report(report, Console(width=max(Console().width, 100)))  # the widest table
    if plot is not None:
        shown.plot_report(report, plot)


@bench_app.command("serve")
def bench_serve_command(
    target: Annotated[
        str | None,
        typer.Argument(
            help="URL of any server with OpenAI's interface; or a model of this machine: flash, pro, tiny (random "
            "weights), a checkpoint. Default: the miniature."
        ),
    ] = None,
    shape: Annotated[str, typer.Option(help="Lengths: fixed, random or sharegpt.")] = "fixed",
    prompt: Annotated[int | None, typer.Option(help="Tokens of a prompt, instead of the shape's.", min=1)] = None,
    output: Annotated[int | None, typer.Option(help="Tokens of an answer, instead of the shape's.", min=1)] = None,
    spread: Annotated[float, typer.Option(help="Lengths vary evenly by this share, e.g. 0.5.")] = 0.0,
    streams: Annotated[int, typer.Option(help="Closed loop: requests always under way.", min=1)] = 8,
    rate: Annotated[float | None, typer.Option(help="Open loop: arrivals a second, at random (Poisson).")] = None,
    requests: Annotated[int | None, typer.Option(help="Requests in all. Default: 4 a stream.", min=1)] = None,
    api: Annotated[
        str | None, typer.Option(help="With a URL: completions (default), chat, responses or messages.")
    ] = None,
    extra: Annotated[
        str | None, typer.Option(help="With a URL: further fields of every request, a JSON object.")
    ] = None,
    intruder: Annotated[
        int | None, typer.Option(help="Length of one long prompt sent during the load, e.g. 524288.", min=1)
    ] = None,
    intruder_seconds: Annotated[float, typer.Option(help="When it is sent, after the start.", min=0)] = 2.0,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus of the draws.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of lengths, prompts and arrivals.")] = 0,
    model: Annotated[str | None, typer.Option(help="With a URL: the model's name. Default: its first.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="DSV4_API_KEY", show_envvar=True, help="With a URL: sent as a bearer token.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="With a URL: client processes. Default: up to 8.", min=1)
    ] = None,
    only_standard: Annotated[
        bool, typer.Option("--only-standard", help="With a URL: no ignore_eos; answers may end early.")
    ] = False,
    schedule: Annotated[str | None, typer.Option(help="Of a preset, layers of these kinds: swa,csa,hca,...")] = None,
    experts: Annotated[str, typer.Option(help=f"A preset's experts: {', '.join(EXPERT_FORMATS)}.")] = "mxfp4",
    chunk: Annotated[
        int | None, typer.Option(help="Of a model: most prompt tokens in one step. Default: by the device.", min=1)
    ] = None,
    device: _DeviceOption = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture of the waiting times (PNG).")] = None,
) -> None:
    """Measure a server, or the engine alone: tokens a second, time to the first token and between tokens.

    Shapes: fixed is 128 + 32 tokens, random 1,024 + 128 (vLLM's data set of that name), sharegpt a log-normal
    distribution like ShareGPT's. Prompts are random text, the same for a seed; change it where prompts are cached.

    \b
    Examples:
      dsv4 bench serve http://127.0.0.1:8000 --streams 256 --shape random
      dsv4 bench serve http://127.0.0.1:8000 --api chat --rate 20 --requests 1000 --shape sharegpt --plot waits.png
      dsv4 bench serve http://127.0.0.1:8000 --streams 64 --output 1024 --intruder 524288
      dsv4 bench serve flash --schedule swa,csa,hca,csa --experts nvfp4 --device cuda --streams 256
    """
    from dsv4.tools.bench.serve import Target, measure_load
    from dsv4.tools.bench.workload import Load

    load = Load.of(
        shape, prompt, output, spread, requests=requests or 4 * streams, streams=streams, rate=rate,
        kind=api or "completions", temperature=temperature, top_p=top_p, seed=seed, intruder=intruder,
        intruder_seconds=intruder_seconds,
    )  # fmt: skip
    if plot is not None:
        shown.check_plots()
    served: Target
    if target is not None and "://" in target:
        from dsv4.tools.bench.server_target import UrlTarget

        served = UrlTarget(
            target, model, api_key, processes=processes, only_standard=only_standard, extra=_fields(extra)
        )
    else:
        given = next((name for name, value in (("--api", api), ("--extra", extra)) if value is not None), None)
        if given is not None:
            raise ConfigError(f"{given} needs the URL of a server; an engine reads token ids")
        served = _engine_target(target, load, _kinds(schedule), _expert_format(experts), device, chunk)
    with shown.progress(load) as on_done:
        report, seen = measure_load(served, load, on_done)
    if as_json:
        print(json.dumps(report.to_dict(), indent=1))
    else:
        shown.print_serve_report(report, Console(width=max(Console().width, 100)))
    if plot is not None:
        shown.plot_waits(report, seen, plot)
    raise typer.Exit(1 if report.failed or "error" in (report.intruder or {}) else 0)


def _fields(text: str | None) -> dict[str, Any]:
    """Of `--extra`."""
    try:
        found = {} if text is None else json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--extra must be JSON such as '{{\"top_k\": 5}}': {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--extra must be a JSON object of request fields, found {text}")
    return found


def _engine_target(
    target: str | None, load: Load, kinds: list[str] | None, experts: ExpertFormat, device: str, chunk: int | None
) -> EngineTarget:
    from dsv4.config import EngineConfig
    from dsv4.llm import LLM
    from dsv4.tools.bench.context import build_model
    from dsv4.tools.bench.engine_target import EngineTarget

    made = build_model(target, schedule=kinds, experts=experts, device=device)
    most = load.requests if load.rate is not None else min(load.streams, load.requests)
    limits = EngineConfig(
        max_context_tokens=load.max_context, max_concurrent_requests=most + (load.intruder is not None),
        max_chunk_tokens=chunk,
    )  # fmt: skip
    llm = LLM.from_params(made.config, made.params, engine=limits, pool=made.pool)
    return EngineTarget(llm.engine, f"{target or 'the miniature'} on {device}", made.config.vocab_size)


def _expert_format(experts: str) -> ExpertFormat:
    chosen = next((name for name in EXPERT_FORMATS if name == experts), None)
    if chosen is None:
        raise ConfigError(f"--experts must be one of {', '.join(EXPERT_FORMATS)}, found {experts!r}")
    return chosen


def _kinds(schedule: str | None) -> list[str] | None:
    return None if schedule is None else [kind.strip().lower() for kind in schedule.split(",")]


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or min(values) < 1:
        raise ConfigError(f"{option} must be positive integers separated by commas, found {text!r}")
    return values
