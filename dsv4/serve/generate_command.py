"""`dsv4 generate`: continue one prompt and stream the text."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from dsv4.request import Completion, RequestError, SamplingParams

if TYPE_CHECKING:
    from dsv4.llm import LLM

_DTYPES = ("float64", "float32", "bfloat16")


def generate_command(
    prompt: Annotated[str | None, typer.Argument(help="The text to continue.")] = None,
    model: Annotated[Path, typer.Option(help="Checkpoint folder.")] = ...,  # type: ignore[assignment]
    ids: Annotated[str | None, typer.Option(help="The prompt as token ids: '1,2,3' (instead of text).")] = None,
    max_tokens: Annotated[int, typer.Option(help="New tokens at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the fewest tokens reaching this probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the best one's probability.")] = 0.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends the text; may be repeated.")] = None,
    numerics: Annotated[str, typer.Option(help="official (as published) or exact (nothing quantised).")] = "official",
    dtype: Annotated[str | None, typer.Option(help="For exact: float64, float32 or bfloat16.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end instead.")] = False,
) -> None:
    """Continue a prompt.

    Examples:

    dsv4 generate --model ./checkpoint "Once upon a time" --max-tokens 64 --seed 7

    dsv4 generate --model ./checkpoint --ids 0,15,27 --temperature 0 --json
    """
    if (prompt is None) == (ids is None):
        raise RequestError("give the prompt as text, or as --ids, not both and not neither")
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
        stop=tuple(stop or ()),
    )  # fmt: skip
    llm = _load(model, numerics, dtype, device)
    source = prompt if prompt is not None else _parse_ids(ids or "")
    start = time.perf_counter()
    if as_json or llm.tokenizer is None:
        completion = llm.generate([source], params)[0]
        if as_json:
            print(json.dumps(_to_dict(completion, time.perf_counter() - start), ensure_ascii=False))
        else:
            print(",".join(map(str, completion.token_ids)))
        return
    for piece in llm.stream(source, params):
        sys.stdout.write(piece)
        sys.stdout.flush()
    print()
    Console(stderr=True).print(f"[dim]{time.perf_counter() - start:.1f} s on {device}, numerics {numerics}[/dim]")


def _load(model: Path, numerics: str, dtype: str | None, device: str) -> LLM:
    if dtype is not None and dtype not in _DTYPES:
        raise RequestError(f"--dtype must be one of {', '.join(_DTYPES)}, found {dtype!r}")
    import torch  # here, so that commands without a model start at once

    from dsv4.llm import LLM, Numerics

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise RequestError(f"--device {device}: no CUDA device is available here; use --device cpu")
    chosen: Numerics = numerics  # type: ignore[assignment]  # LLM checks the value
    return LLM(model, device=device, numerics=chosen, dtype=getattr(torch, dtype) if dtype else None, progress=True)


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise RequestError(f"--ids must be integers separated by commas, found {text!r}") from None


def _to_dict(completion: Completion, seconds: float) -> dict[str, object]:
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "prompt_tokens": len(completion.prompt_token_ids),
        "finish_reason": str(completion.finish_reason),
        "seconds": round(seconds, 3),
    }
