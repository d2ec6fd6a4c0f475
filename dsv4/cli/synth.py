"""`dsv4 synth`: write a random checkpoint of any size, for tests, benchmarks and trying things out."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from dsv4.config import ConfigError, ModelConfig
from dsv4.text.byte_tokenizer import MIN_VOCAB_SIZE, byte_tokenizer
from dsv4.tools.plan.sizes import EXPERT_FORMATS
from dsv4.tools.plan.targets import PRESETS, resolve_target


def synth_command(
    directory: Annotated[Path, typer.Argument(help="Folder to create; it must not exist or be empty.")],
    preset: Annotated[str, typer.Option(help=f"{', '.join(PRESETS)}, or a config.json to follow.")] = "tiny",
    layers: Annotated[int | None, typer.Option(help="Keep only the first N layers (and the draft blocks).")] = None,
    experts: Annotated[str, typer.Option(help=f"Routed experts: {', '.join(EXPERT_FORMATS)}.")] = "mxfp4",
    seed: Annotated[int, typer.Option(help="The same seed writes the same bytes.")] = 0,
) -> None:
    """Write a random model in the published layout. The text it generates is noise; shapes and formats are real.

    \b
    Examples:
      dsv4 synth ./tiny
      dsv4 synth ./flash4 --preset flash --layers 4 --experts nvfp4
      dsv4 synth ./dspark --preset tiny-dspark
    """
    from dsv4.loader.write.synth import write_checkpoint  # here: it loads torch

    chosen = next((name for name in EXPERT_FORMATS if name == experts), None)
    if chosen is None:
        raise ConfigError(f"--experts must be one of {', '.join(EXPERT_FORMATS)}, found {experts!r}")
    config = resolve_target(preset).config
    if layers is not None:
        config = shorten(config, layers)
    has_tokenizer = config.vocab_size >= MIN_VOCAB_SIZE
    extra = {"tokenizer.json": json.dumps(byte_tokenizer(config.vocab_size))} if has_tokenizer else {}
    write_checkpoint(directory, config, experts=chosen, seed=seed, extra_files=extra, progress=True)
    typer.echo(f"wrote {directory}", err=True)


def shorten(config: ModelConfig, num_layers: int) -> ModelConfig:
    """The same model with only its first layers; a DSpark head taps the last of those."""
    if not 1 <= num_layers <= config.num_hidden_layers:
        raise ConfigError(f"--layers must be from 1 to {config.num_hidden_layers}, found {num_layers}")
    ratios = config.compress_ratios[:num_layers] + config.compress_ratios[config.num_hidden_layers :]
    dspark = config.dspark
    if dspark is not None:
        num_taps = min(len(dspark.target_layer_ids), num_layers)
        dspark = replace(dspark, target_layer_ids=tuple(range(num_layers - num_taps, num_layers)))
    return replace(
        config,
        num_hidden_layers=num_layers,
        num_hash_layers=min(config.num_hash_layers, num_layers),
        compress_ratios=ratios,
        dspark=dspark,
    )
