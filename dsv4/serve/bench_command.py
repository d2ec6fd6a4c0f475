"""`dsv4 bench`: `model` measures a whole model on any device, `ops` single ops on a GPU. Registered by `cli`.

The cases and the timer of `ops` belong to a checkout, not to the installed package (nothing in the package imports
`dsv4.testing`), so that one runs `benchmarks/bench_ops.py` in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dsv4.config import ConfigError
from dsv4.serve.load import DeviceOption
from dsv4.tools.sizes import EXPERT_FORMATS

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
    """Time every op at the real shapes of Flash and Pro, against what the chip was measured to do.

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
    contexts: Annotated[str, typer.Option(help="Tokens each request has, e.g. 2048,65536,1048576.")] = "512,2048",
    prefill: Annotated[str, typer.Option(help="Prompt lengths.")] = "512",
    concurrency: Annotated[str, typer.Option(help="Requests at once, through the engine.")] = "1,4",
    prompt: Annotated[int, typer.Option(help="Prompt tokens of those requests.", min=1)] = 64,
    output: Annotated[int, typer.Option(help="Tokens each of them generates.", min=1)] = 16,
    repeats: Annotated[int, typer.Option(help="Timed calls of each kind.", min=3)] = 20,
    sections: Annotated[str, typer.Option(help="Which of decode,layers,stream,prefill,serving,memory.")] = "all",
    device: DeviceOption = "cpu",
    bandwidth: Annotated[
        float | None, typer.Option(help="Read speed of the memory in TB/s; known for H200. For the byte floor.")
    ] = None,
    offload: Annotated[
        bool, typer.Option("--offload-experts", help="Experts that do not fit on the device live in host memory.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the records as JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture of decode speed (PNG).")] = None,
) -> None:
    """Measure a whole model: decode by batch and context, prefill, latency, throughput, memory against the plan.

    Examples:

    dsv4 bench model

    dsv4 bench model flash --schedule swa,csa,hca,csa --experts nvfp4 --device cuda --batches 1,16,64,256 --contexts
    2048,65536,1048576 --plot speed.png
    """
    from dsv4.tools.bench import SECTIONS, Settings, run_bench  # here: they load torch
    from dsv4.tools.bench_context import build_model, build_offloaded
    from dsv4.tools.bench_plot import plot_report
    from dsv4.tools.bench_text import print_report

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
        bandwidth=None if bandwidth is None else 1e12 * bandwidth,
    )  # fmt: skip
    kinds = None if schedule is None else [kind.strip().lower() for kind in schedule.split(",")]
    if offload:
        if kinds is not None:
            raise ConfigError("--offload-experts takes no --schedule")
        model = build_offloaded(target, layers=layers, experts=chosen, device=device, context=max(settings.contexts))
    else:
        model = build_model(target, layers=layers, schedule=kinds, experts=chosen, device=device)
    report = run_bench(model, settings, lambda what: print(f"dsv4: {what}", file=sys.stderr))
    if as_json:
        print(json.dumps(report.to_dict(), indent=1))
    else:
        print_report(report, Console(width=max(Console().width, 100)))  # the widest table
    if plot is not None:
        plot_report(report, plot)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or min(values) < 1:
        raise ConfigError(f"{option} must be positive integers separated by commas, found {text!r}")
    return values
