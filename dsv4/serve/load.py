"""Loading a model for a command: options checked before anything slow, warnings as notes on the console."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

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


def load_llm(
    model: Path, *, numerics: str, dtype: str | None, device: str, limits: EngineConfig, console: Console
) -> LLM:  # fmt: skip
    """The model, with a progress bar; what the loader warns of is printed as a note."""
    import torch  # here, so that commands without a model, and mistakes in the options, are answered at once

    from dsv4.llm import LLM

    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        llm = LLM(
            model, device=device, numerics="exact" if numerics == "exact" else "official",
            dtype=getattr(torch, dtype) if dtype else None, engine=limits, progress=True,
        )  # fmt: skip
    for note in notes:
        console.print(f"dsv4: note: {note.message}", markup=False, highlight=False, soft_wrap=True)
    return llm
