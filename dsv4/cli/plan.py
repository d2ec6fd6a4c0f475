"""`dsv4 plan`: the memory plan on the command line. Registered by `dsv4.cli.main`."""

import json
from typing import Annotated, get_args

import typer
from rich.console import Console

from dsv4.config import ConfigError, EngineConfig, IndexKeyFormat
from dsv4.tools.plan.plan import plan
from dsv4.tools.plan.sizes import EXPERT_FORMATS
from dsv4.tools.plan.targets import PRESETS, resolve_target
from dsv4.tools.plan.text import print_plan

DEFAULT_CONTEXT = 8192


def plan_command(
    target: Annotated[
        str, typer.Argument(help=f"{', '.join(PRESETS)}, a shipped checkpoint, a folder or a config.json.")
    ],
    gpu: Annotated[str | None, typer.Option(help="h200, h100, b200, ... or a number of GiB. Default: all.")] = None,
    gpus: Annotated[int, typer.Option(help="Number of GPUs; experts and requests are divided among them.")] = 1,
    context: Annotated[int | None, typer.Option(help="Context length of a request, in tokens. Default: 8192.")] = None,
    requests: Annotated[int, typer.Option(help="Concurrent requests, over all GPUs.")] = 8,
    chunk: Annotated[
        int | None, typer.Option(help="Maximum prompt tokens in one step (prefill chunk). Default: as `LLM` chooses.")
    ] = None,
    draft_tokens: Annotated[int, typer.Option(help="Draft tokens a step; adds the draft blocks' cache.")] = 0,
    index_keys: Annotated[str, typer.Option(help="Format of the indexer's keys: fp4 or fp8.")] = "fp4",
    experts: Annotated[
        str | None,
        typer.Option(help=f"Format of the experts: {', '.join(EXPERT_FORMATS)}. Default: what the config says."),
    ] = None,
    offload_experts: Annotated[bool, typer.Option("--offload-experts", help="Keep experts in host memory.")] = False,
    mtp: Annotated[bool, typer.Option(help="Load the draft blocks (MTP or DSpark).")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON; sizes are bytes.")] = False,
) -> None:
    """Plan the memory of a model: its bytes, and how many requests fit. Needs no GPU and no weights.

    \b
    Examples:
      dsv4 plan flash
      dsv4 plan flash --gpu h200 --context 131072 --requests 16
      dsv4 plan pro --gpu b200 --gpus 8 --json
      dsv4 plan ./checkpoint --gpu 96 --offload-experts
    """
    model = resolve_target(target)
    expert_format = model.experts if experts is None else next((f for f in EXPERT_FORMATS if f == experts), None)
    if expert_format is None:
        raise ConfigError(f"--experts must be one of {', '.join(EXPERT_FORMATS)}, found {experts!r}")
    index_key_format = next((f for f in get_args(IndexKeyFormat) if f == index_keys), None)
    if index_key_format is None:
        raise ConfigError(f"--index-keys must be fp4 or fp8, found {index_keys!r}")
    engine = EngineConfig(
        max_context_tokens=min(DEFAULT_CONTEXT, model.config.max_position_embeddings) if context is None else context,
        max_concurrent_requests=requests,
        max_chunk_tokens=chunk,
        max_draft_tokens=draft_tokens,
        index_key_format=index_key_format,
    )
    result = plan(
        model.config,
        engine,
        name=model.name,
        experts=expert_format,
        gpu=gpu,
        gpus=gpus,
        offload_experts=offload_experts,
        with_draft=mtp,
    )
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        print_plan(result, Console())
