"""`dsv4 info`: what a checkpoint is, from its config and headers alone."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from dsv4.cache.schema import build_cache_schema
from dsv4.config import IndexKeyFormat, ModelConfig
from dsv4.config.layers import LayerSpec, build_schedule
from dsv4.tools.model_loading import ModelArgument, ModelOption, RevisionOption, engine_limits, find_model

INDEX_KEY_FORMATS: tuple[IndexKeyFormat, ...] = ("fp4", "fp8")


def info_command(
    model: ModelArgument = None,
    model_option: ModelOption = None,
    revision: RevisionOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; sizes are bytes.")] = False,
) -> None:
    """Show schedule, parameters, bytes by format and KV bytes per token. Reads headers only.

    \b
    Examples:
      dsv4 info ./checkpoint
      dsv4 info ./checkpoint --json
    """
    info = checkpoint_info(find_model(model, Console(stderr=True), option=model_option, revision=revision))
    if as_json:
        print(json.dumps(info, indent=2))
    else:
        _print(info, Console())


def checkpoint_info(directory: Path) -> dict[str, Any]:
    """Everything `dsv4 info` knows, as JSON. The whole strict check of the tensors against the config is included."""
    from dsv4.loader.checkpoint import Checkpoint  # here: they load torch
    from dsv4.loader.resolve import plan_load
    from dsv4.loader.summary import checkpoint_summary

    config = ModelConfig.from_pretrained(directory)
    with Checkpoint.open(directory) as checkpoint:
        plan = plan_load(checkpoint, config)
        summary = checkpoint_summary(checkpoint)
    schedule = build_schedule(config, with_mtp=plan.num_mtp > 0)
    limits = engine_limits(config, context=None, requests=1)  # bytes a token and a request do not depend on them
    cache = {
        fmt: build_cache_schema(
            config, build_schedule(config), replace(limits, index_key_format=fmt), plain_itemsize=None
        )
        for fmt in INDEX_KEY_FORMATS
    }
    return {
        "path": str(directory),
        "naming": str(summary.naming),
        "layers": [_layer_dict(layer) for layer in schedule],
        "drafter": None if plan.num_mtp == 0 else "MTP" if config.dspark is None else "DSpark",
        "parameters": {"main": summary.num_parameters, "draft": summary.num_draft_parameters},
        "weights": {
            "total_bytes": summary.num_bytes,
            "num_tensors": summary.num_tensors,
            "bytes_by_format": summary.bytes_by(lambda row: row.format),
            "bytes_by_part": summary.bytes_by(lambda row: row.part),
        },
        "kv": {
            "bytes_per_token": float(cache["fp4"].bytes_per_token),
            "bytes_per_token_fp8_index": float(cache["fp8"].bytes_per_token),
            "window_bytes_per_request": cache["fp4"].window_bytes_per_request,
            "state_bytes_per_request": cache["fp4"].state_bytes_per_request,
        },
        "notes": list(plan.notes),
    }


def _layer_dict(layer: LayerSpec) -> dict[str, object]:
    return {
        "layer_idx": layer.layer_idx,
        "attention": str(layer.attention),
        "router": str(layer.router),
        "is_mtp": layer.is_mtp,
    }


def _print(info: dict[str, Any], console: Console) -> None:
    kinds = Counter(
        f"{layer['attention']}, {layer['router']} router" for layer in info["layers"] if not layer["is_mtp"]
    )
    num_mtp = sum(layer["is_mtp"] for layer in info["layers"])
    console.print(f"[bold]{escape(info['path'])}[/bold]  ({info['naming']} names)", soft_wrap=True)
    console.print(
        f"layers      {len(info['layers']) - num_mtp}" + (f" + {num_mtp} {info['drafter']}" if num_mtp else "")
    )
    for kind, count in kinds.items():
        console.print(f"            {count} x {kind}")
    console.print(f"parameters  {info['parameters']['main']:,} + {info['parameters']['draft']:,} in draft blocks")
    table = Table("weights by format", Column("bytes", justify="right"), box=None, header_style="bold")
    for name, num_bytes in info["weights"]["bytes_by_format"].items():
        table.add_row(name, f"{num_bytes:,}")
    table.add_row("total", f"{info['weights']['total_bytes']:,}")
    console.print(table)
    kv = info["kv"]
    console.print(
        f"cache       {kv['bytes_per_token']:,} bytes a token (FP8 index keys: {kv['bytes_per_token_fp8_index']:,})"
    )
    window, state = kv["window_bytes_per_request"], kv["state_bytes_per_request"]
    console.print(f"            {window:,} window and {state:,} state bytes a request")
    for note in info["notes"]:
        console.print(f"[yellow]note[/yellow]        {escape(note)}", soft_wrap=True)
