"""Loading a model for a command: options checked before anything slow, warnings as notes on the console."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from dsv4.config import EngineConfig, ModelConfig
from dsv4.loader.shipped import DEFAULT_SHIPPED, find_checkpoint
from dsv4.request import RequestError

if TYPE_CHECKING:
    from dsv4.llm import LLM

_DTYPES = ("float64", "float32", "bfloat16")
_NUMERICS = ("official", "exact")
DEFAULT_CONTEXT = 16384
MODEL_HELP = f"Checkpoint folder, or the name of a shipped one. Default: {DEFAULT_SHIPPED}, a miniature."
_OFFLOAD_HELP = (
    "Experts that do not fit on the GPU live in host memory: auto (as many on the GPU as fit), or how many of each "
    "layer to keep there, e.g. 64. Default: all on the GPU."
)

# options that several commands have
ModelOption = Annotated[Path | None, typer.Option(help=MODEL_HELP)]
NumericsOption = Annotated[str, typer.Option(help="official (as published) or exact (nothing quantised).")]
DtypeOption = Annotated[str | None, typer.Option(help="For exact: float64, float32 or bfloat16.")]
DeviceOption = Annotated[str, typer.Option(help="cpu or cuda.")]
OffloadOption = Annotated[str | None, typer.Option(help=_OFFLOAD_HELP)]


def find_model(model: Path | None, console: Console) -> Path:
    """The folder `--model` means; if it was left out, a note says what runs instead."""
    folder = find_checkpoint(model)
    if model is None:
        note = f"dsv4: note: no --model, so the shipped {folder.name}: a miniature that continues text, answers nothing"
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    return folder


def engine_limits(config: ModelConfig, *, context: int | None, requests: int, chunk: int | None = None) -> EngineConfig:
    """Limits of a command; a context that was not given is the model's, up to `DEFAULT_CONTEXT`."""
    chosen = min(DEFAULT_CONTEXT, config.max_position_embeddings) if context is None else context
    limits = EngineConfig(max_context_tokens=chosen, max_concurrent_requests=requests)
    return limits if chunk is None else replace(limits, max_chunk_tokens=chunk)


def check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise RequestError(f"{option} must be one of {', '.join(choices)}, found {value!r}")


def check_numerics(numerics: str, dtype: str | None) -> None:
    """`--numerics` and `--dtype`, before torch is loaded."""
    check_choice("--numerics", numerics, _NUMERICS)
    if dtype is not None:
        check_choice("--dtype", dtype, _DTYPES)


def parse_offload(text: str | None) -> str | int | None:
    """`--offload-experts`, before torch is loaded; what the model can have is checked with its config."""
    if text is None or text == "auto":
        return text
    if not (text.isascii() and text.isdigit()):
        raise RequestError(f"--offload-experts must be auto or a number of experts a layer, found {text!r}")
    return int(text)


def load_llm(
    model: Path, *, numerics: str, dtype: str | None, device: str, limits: EngineConfig, console: Console,
    offload_experts: str | int | None = None,
) -> LLM:  # fmt: skip
    """The model, with a progress bar; what the loader warns of is printed as a note."""
    import torch  # here, so that commands without a model, and mistakes in the options, are answered at once

    from dsv4.llm import LLM

    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        llm = LLM(
            model, device=device, numerics="exact" if numerics == "exact" else "official",
            dtype=getattr(torch, dtype) if dtype else None, engine=limits, offload_experts=offload_experts,
            progress=True,
        )  # fmt: skip
    texts = [str(note.message) for note in notes]
    if llm.pool is not None:
        placement = llm.pool.placement
        texts.append(
            f"{placement.num_slots} of {llm.config.n_routed_experts} experts of each layer on the device "
            f"({placement.num_fixed} for good), {llm.pool.host_bytes() / 2**30:,.1f} GiB in host memory"
        )
    elif offload_experts is not None:
        texts.append("all experts fit on the device: none is offloaded")
    for text in texts:
        console.print(f"dsv4: note: {text}", markup=False, highlight=False, soft_wrap=True)
    return llm
