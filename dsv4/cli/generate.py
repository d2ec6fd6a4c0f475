"""`dsv4 generate`: continue one prompt and stream the text. Text or JSON goes to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dsv4.config import ModelConfig
from dsv4.request import Completion, RequestError, SamplingParams
from dsv4.tools import model_loading

if TYPE_CHECKING:
    from dsv4.engine.stats import DraftStats
    from dsv4.llm import LLM, Prompt
    from dsv4.tools.experts import ExpertCounter, LayerExperts

FEW_EXPERTS = 16


def generate_command(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] [PROMPT]", help=f"{model_loading.MODEL_HELP} Then the text to continue; - reads stdin."
        ),
    ] = None,
    model_option: model_loading.ModelOption = None,
    revision: model_loading.RevisionOption = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from this UTF-8 file, as it stands.")] = None,
    ids: Annotated[str | None, typer.Option(help="The prompt as token ids: '1,2,3' (instead of text).")] = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum new tokens.")] = 128,
    temperature: model_loading.TemperatureOption = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")] = None,
    top_p: model_loading.TopPOption = None,
    min_p: Annotated[
        float | None, typer.Option(help="Drop tokens below this share of the best one's probability.")
    ] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Divides logits of tokens seen; 1 is off.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends the text; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end of sequence.")] = False,
    logprobs: Annotated[int | None, typer.Option(help="With --json: log-probabilities, and of the N best.")] = None,
    context: Annotated[
        int | None,
        typer.Option(
            help=f"Maximum tokens of prompt and answer. Default: the model's, at most {model_loading.DEFAULT_CONTEXT}."
        ),
    ] = None,
    numerics: model_loading.NumericsOption = "official",
    dtype: model_loading.DtypeOption = None,
    device: model_loading.DeviceOption = "auto",
    gpus: model_loading.GpusOption = None,
    offload_experts: model_loading.OffloadOption = None,
    drafts: model_loading.DraftsOption = "off",
    ignore_selftest: model_loading.IgnoreSelftestOption = False,
    threads: model_loading.ThreadsOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end instead.")] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Also show which experts each layer used, and drafts.")
    ] = False,
) -> None:
    """Continue a prompt and stream the text.

    A checkpoint without tokenizer.json takes --ids and prints ids.

    \b
    Examples:
      dsv4 generate "To be, or not" --temperature 0.7 --stats
      dsv4 generate ./checkpoint "Once upon a time" --seed 7
      echo "Call me" | dsv4 generate -
      dsv4 generate ./checkpoint --file chapter.txt --max-tokens 200
      dsv4 generate ./checkpoint --ids 0,15,27 --temperature 0 --json
      dsv4 generate ./checkpoint "Once upon a time" --gpus 2
    """
    model, prompt = _model_and_prompt(words or [], model_option, is_elsewhere=file is not None or ids is not None)
    source = _source(prompt, file, ids)
    if logprobs is not None and not as_json:
        raise RequestError("--logprobs needs --json")
    params = SamplingParams(
        max_tokens=max_tokens, seed=seed, stop=tuple(stop or ()), ignore_eos=ignore_eos, logprobs=logprobs
    )
    options = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }  # fmt: skip
    given = {name: value for name, value in options.items() if value is not None}
    replace(params, **given)  # type: ignore[arg-type]  # a bad value is reported before the checkpoint is read
    model_loading.check_numerics(numerics, dtype)
    offload, draft_count = model_loading.parse_offload(offload_experts), model_loading.parse_drafts(drafts)
    console = Console(stderr=True)
    folder = model_loading.find_model(model, console, revision=revision)
    params = model_loading.with_defaults(params, options, folder, console)
    limits = model_loading.engine_limits(ModelConfig.from_pretrained(folder), context=context, requests=1)
    wanted = model_loading.ModelSettings(
        folder=str(folder), numerics=numerics, dtype=dtype, device=device, limits=limits, offload_experts=offload,
        drafts=draft_count, gpus=gpus, threads=threads, ignore_selftest=ignore_selftest,
    )  # fmt: skip
    found = model_loading.place_model(wanted, console)
    llm = model_loading.load_llm(found, console)
    counter = _count_experts(llm) if stats else None
    streams_text = llm.tokenizer is not None and not as_json
    run = complete(llm, source, params, console, _write if streams_text else None)
    drafted = llm.engine.stats().drafts
    if as_json:
        used: dict[str, object] = (
            {} if counter is None else {"experts": [list(layer.counts) for layer in counter.layers()]}
        )
        if stats and drafted is not None:
            used["drafts"] = _draft_fields(drafted)
        print(json.dumps({**_to_dict(run), **used}, ensure_ascii=False))
    elif streams_text:
        print()
    else:
        print(",".join(map(str, run.completion.token_ids)))
    console.print(f"[dim]{_summary(run)}; {numerics} numerics on {found.device}[/dim]", highlight=False, soft_wrap=True)
    if counter is not None and not as_json:
        console.print(_experts_table(counter.layers()))
        if drafted is not None:
            console.print(f"[dim]{_draft_line(drafted)}[/dim]", highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Run:
    """A completion, what it took, and what it kept."""

    completion: Completion
    prompt_seconds: float  # until the first token
    seconds: float
    kv_bytes: int

    @property
    def tokens_per_second(self) -> float | None:
        """Of the tokens after the first; None if there is none."""
        later = len(self.completion.token_ids) - 1
        return later / (self.seconds - self.prompt_seconds) if later else None


def complete(
    llm: LLM, prompt: Prompt, params: SamplingParams, console: Console, on_text: Callable[[str], None] | None
) -> Run:
    """Run one request to its end, with a progress bar on `console` while no text is being written."""
    start = time.perf_counter()
    request, output = llm.start(prompt, params)
    try:
        with _bar(console, "reading the prompt", request.prompt_len) as update:
            while output.num_output == 0 and not output.is_done:
                llm.step()
                update(request.num_processed)
        first = time.perf_counter()
        num_written = 0
        silent = console if on_text is None else Console(quiet=True)
        with _bar(silent, "writing tokens", request.max_len - request.prompt_len) as update:
            while True:
                if on_text is not None:
                    on_text(output.text[num_written:])
                    num_written = len(output.text)
                update(output.num_output)
                if output.is_done:
                    break
                llm.step()
    finally:
        llm.abort(request)
    return Run(
        output.completion(), first - start, time.perf_counter() - start,
        llm.cache.schema.request_bytes(request.num_processed),
    )  # fmt: skip


@contextmanager
def _bar(console: Console, title: str, total: int) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    visible = console.is_terminal and not console.quiet
    with Progress(*columns, console=console, transient=True, disable=not visible) as progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.update(task, completed=done)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _model_and_prompt(
    words: list[str], option: Path | None, *, is_elsewhere: bool
) -> tuple[Path | None, str | None]:  # fmt: skip
    """MODEL and PROMPT of the command line. One word alone is the prompt, unless --file or --ids gives that."""
    if len(words) > 2:
        raise RequestError(f"expected MODEL and PROMPT, found {len(words)} words: put the prompt into quotes")
    if len(words) == 2:
        return model_loading.one_model(Path(words[0]), option), words[1]
    if words and is_elsewhere and option is None:
        return Path(words[0]), None
    return option, words[0] if words else None


def _source(prompt: str | None, file: Path | None, ids: str | None) -> Prompt:
    """The one prompt that was given: as an argument, from stdin, from a file, or as ids."""
    if sum(one is not None for one in (prompt, file, ids)) != 1:
        raise RequestError("give one prompt: as text (- for stdin) behind MODEL, as --file, or as --ids")
    if ids is not None:
        return _parse_ids(ids)
    if prompt is not None and prompt != "-":
        return prompt
    data = sys.stdin.buffer.read() if file is None else file.read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{file or 'stdin'} is not UTF-8 text: {error}") from None


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise RequestError(f"--ids must be integers separated by commas, found {text!r}") from None


def _summary(run: Run) -> str:
    num_prompt, num_new = len(run.completion.prompt_token_ids), len(run.completion.token_ids)
    rate = f" at {run.tokens_per_second:.1f} tokens/s" if run.tokens_per_second is not None else ""
    return (
        f"{num_prompt} prompt tokens in {run.prompt_seconds:.2f} s, {num_new} new{rate} "
        f"({run.completion.finish_reason}), {run.kv_bytes:,} bytes of KV cache"
    )


def _count_experts(llm: LLM) -> ExpertCounter:
    from dsv4.tools.experts import ExpertCounter  # here: it loads torch

    counter = ExpertCounter(llm.config)
    llm.engine.observers.append(counter)
    return counter


def _experts_table(layers: list[LayerExperts]) -> Table:
    """A row per layer; the share of every expert where there are few, of the busiest one where there are many."""
    is_few = len(layers[0].counts) <= FEW_EXPERTS
    shares = "choices by expert, %" if is_few else "busiest"
    headings = ("layer", "attention", "router", "experts used", shares)
    table = Table(*headings, title="experts used per layer", box=None, title_style="dim", style="dim")
    for one in layers:
        percent = [f"{100 * share:.0f}" for share in one.shares]
        busiest = max(range(len(one.counts)), key=one.counts.__getitem__)
        shown = " ".join(part.rjust(3) for part in percent) if is_few else f"{percent[busiest]} % to {busiest}"
        kinds = (str(one.layer.attention), str(one.layer.router))
        table.add_row(str(one.layer.layer_idx), *kinds, f"{one.num_used} of {len(one.counts)}", shown)
    return table


def _draft_line(drafts: DraftStats) -> str:
    shares = ", ".join(f"{100 * share:.0f} %" for share in drafts.acceptance)
    came_true = f"{drafts.num_accepted} of {drafts.num_verified} drafts came true"
    return f"{came_true}{f' (by place {shares})' if shares else ''}, {drafts.tokens_per_step:.2f} tokens a step"


def _draft_fields(drafts: DraftStats) -> dict[str, object]:
    return {
        "steps": drafts.num_steps, "verified": list(drafts.verified_by_place),
        "accepted": list(drafts.accepted_by_place), "tokens_per_step": round(drafts.tokens_per_step, 3),
    }  # fmt: skip


def _to_dict(run: Run) -> dict[str, object]:
    completion = run.completion
    fields: dict[str, object] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "prompt_tokens": len(completion.prompt_token_ids),
        "finish_reason": str(completion.finish_reason),
        "seconds": round(run.seconds, 3),
        "tokens_per_second": None if run.tokens_per_second is None else round(run.tokens_per_second, 3),
        "kv_bytes": run.kv_bytes,
    }
    if completion.logprobs is not None:
        fields["logprobs"] = [
            {"token_id": one.token_id, "logprob": one.logprob, "top": [list(pair) for pair in one.top]}
            for one in completion.logprobs
        ]
    return fields
