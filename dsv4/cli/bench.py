"""`dsv4 bench`: `model` measures a whole model on any device, `serve` a load of requests, `ops` single ops on a GPU.

The cases and the timer of `ops` belong to a checkout, not to the installed package (nothing in the package imports
`dsv4.testing`), so that one runs `benchmarks/bench_ops.py` in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from dsv4.config import ConfigError
from dsv4.loader.shipped import DEFAULT_SHIPPED, DSPARK_TWIN
from dsv4.request import SamplingParams
from dsv4.tools.model_loading import DeviceOption, DraftsOption, GpusOption, parse_drafts
from dsv4.tools.plan.sizes import EXPERT_FORMATS

if TYPE_CHECKING:
    from dsv4.tools.bench.model import Report
    from dsv4.tools.bench.serve import EngineTarget, Load

bench_app = typer.Typer(no_args_is_help=True)
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench_ops.py"


@bench_app.callback()
def bench() -> None:
    """Measure this machine."""


@bench_app.command("ops")
def bench_ops_command(
    op: Annotated[list[str] | None, typer.Option(help="Only this op; may be repeated.")] = None,
    case: Annotated[str | None, typer.Option(help="Only cases whose name contains this.")] = None,
    samples: Annotated[int, typer.Option(help="Timed replays per case.", min=10)] = 100,
    out: Annotated[Path | None, typer.Option(help="Record file. Default: benchmarks/results/<gpu>.jsonl.")] = None,
    compare: Annotated[tuple[Path, Path] | None, typer.Option(help="Compare two record files; no GPU needed.")] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="Print the names of the cases and stop.")] = False,
) -> None:
    """Time every op at the real shapes of Flash and Pro, beside the chip's measured ceilings.

    Examples:

    dsv4 bench ops --op rms_norm

    dsv4 bench ops --compare old.jsonl new.jsonl
    """
    if not SCRIPT.is_file():
        raise ConfigError(f"dsv4 bench ops needs a source checkout: expected {SCRIPT}, found nothing there")
    arguments = ["--samples", str(samples)]
    for name in op or ():
        arguments += ["--op", name]
    if case is not None:
        arguments += ["--case", case]
    if out is not None:
        arguments += ["--out", str(out)]
    if compare is not None:
        arguments += ["--compare", *map(str, compare)]
    if list_cases:
        arguments.append("--list")
    raise typer.Exit(subprocess.run([sys.executable, str(SCRIPT), *arguments]).returncode)


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
    device: DeviceOption = "cpu",
    gpus: GpusOption = 1,
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
    from dsv4.tools.bench.model import SECTIONS, Settings, run_bench  # here: they load torch
    from dsv4.tools.bench.ranks import bench_ranks

    chosen = next((name for name in EXPERT_FORMATS if name == experts), None)
    if chosen is None:
        raise ConfigError(f"--experts must be one of {', '.join(EXPERT_FORMATS)}, found {experts!r}")
    if device.split(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"--device must be cpu or cuda, found {device!r}")
    settings = Settings(
        batches=_numbers("--batches", batches), contexts=_numbers("--contexts", contexts),
        prefill_tokens=_numbers("--prefill", prefill), concurrencies=_numbers("--concurrency", concurrency),
        prompt_tokens=prompt, output_tokens=output, repeats=repeats,
        sections=SECTIONS if sections == "all" else tuple(part.strip() for part in sections.split(",")),
        bandwidth=None if bandwidth is None else 1e12 * bandwidth, drafts=parse_drafts(drafts),
    )  # fmt: skip
    kinds = None if schedule is None else [kind.strip().lower() for kind in schedule.split(",")]
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
    device: DeviceOption = "cpu",
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
    from dsv4.tools.bench.plot import plot_report  # here: they load torch
    from dsv4.tools.bench.text import print_report

    if as_json:
        print(json.dumps(report.to_dict(), indent=1))
    else:
        print_report(report, Console(width=max(Console().width, 100)))  # the widest table
    if plot is not None:
        plot_report(report, plot)


@bench_app.command("serve")
def bench_serve_command(
    target: Annotated[
        str | None, typer.Argument(help="flash, pro, tiny (random weights) or a checkpoint. Default: the miniature.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Measure a server with OpenAI's completions interface instead.")
    ] = None,
    requests: Annotated[int, typer.Option(help="Number of requests.", min=1)] = 32,
    concurrency: Annotated[int, typer.Option(help="Concurrent requests, without --rate.", min=1)] = 8,
    rate: Annotated[float | None, typer.Option(help="Requests per second instead, at random times (Poisson).")] = None,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 128,
    output: Annotated[int, typer.Option(help="Tokens each request generates.", min=1)] = 32,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling (top-p).")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of prompts and arrivals.")] = 0,
    schedule: Annotated[str | None, typer.Option(help="Of a preset, layers of these kinds: swa,csa,hca,...")] = None,
    experts: Annotated[str, typer.Option(help=f"A preset's experts: {', '.join(EXPERT_FORMATS)}.")] = "mxfp4",
    device: DeviceOption = "cpu",
    model: Annotated[str | None, typer.Option(help="With --url: the model's name. Default: its first.")] = None,
    api_key: Annotated[str | None, typer.Option(help="With --url: sent as a bearer token.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture of the waiting times (PNG).")] = None,
) -> None:
    """Serve a load of requests and measure time to first token, time between tokens, and tokens/s.

    Examples:

    dsv4 bench serve --requests 16 --concurrency 4

    dsv4 bench serve --url http://127.0.0.1:8000 --rate 2 --prompt 512 --output 64 --plot waits.png
    """
    from dsv4.tools.bench.serve import Load, Target, UrlTarget, measure_load
    from dsv4.tools.bench.serve_text import plot_waits, print_serve_report, progress

    load = Load(
        requests=requests, concurrency=concurrency, rate=rate, prompt_tokens=prompt, output_tokens=output,
        temperature=temperature, top_p=top_p, seed=seed,
    )  # fmt: skip
    if url is not None:
        if target is not None or schedule is not None:
            raise ConfigError("--url measures a server; it takes no model of this machine")
        served: Target = UrlTarget(url, model, api_key)
    else:
        served = _engine_target(target, load, schedule, experts, device)
    with progress(load.requests) as on_done:
        report, timelines = measure_load(served, load, on_done)
    if as_json:
        print(json.dumps(report.to_dict(), indent=1))
    else:
        print_serve_report(report, Console())
    if plot is not None:
        plot_waits(report, timelines, plot)
    raise typer.Exit(1 if report.failed else 0)


def _engine_target(target: str | None, load: Load, schedule: str | None, experts: str, device: str) -> EngineTarget:
    from dsv4.config import EngineConfig
    from dsv4.llm import LLM
    from dsv4.tools.bench.context import build_model
    from dsv4.tools.bench.serve import EngineTarget

    chosen = next((name for name in EXPERT_FORMATS if name == experts), None)
    if chosen is None:
        raise ConfigError(f"--experts must be one of {', '.join(EXPERT_FORMATS)}, found {experts!r}")
    kinds = None if schedule is None else [kind.strip().lower() for kind in schedule.split(",")]
    made = build_model(target, schedule=kinds, experts=chosen, device=device)
    limits = EngineConfig(
        max_context_tokens=load.prompt_tokens + load.output_tokens,
        max_concurrent_requests=load.requests if load.rate is not None else min(load.concurrency, load.requests),
    )
    llm = LLM.from_params(made.config, made.params, engine=limits, pool=made.pool)
    return EngineTarget(llm.engine, f"{target or 'the miniature'} on {device}")


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or min(values) < 1:
        raise ConfigError(f"{option} must be positive integers separated by commas, found {text!r}")
    return values
