"""`dsv4 replay`: run recorded requests again. Exit status 0: the same bits, 1: differences, 2: could not run."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dsv4.config import ModelConfig
from dsv4.dist.errors import RankFailed
from dsv4.loader.shipped import how_to_install
from dsv4.request import RequestError
from dsv4.tools import model_loading
from dsv4.tools.receipts.contents import Contents
from dsv4.tools.receipts.lines import Header

if TYPE_CHECKING:
    from dsv4.llm import LLM
    from dsv4.tools.receipts.replay import ReplayReport

_MAX_PRINTED = 20


def replay_command(
    files: Annotated[list[Path], typer.Argument(help="Records of `dsv4 serve --record`.")],
    model: Annotated[Path | None, typer.Option("--model", help="Another checkpoint than the recorded one.")] = None,
    batch: Annotated[
        int | None, typer.Option(help="Concurrent requests; 1 runs each alone. Default: as recorded.")
    ] = None,
    chunk: Annotated[int | None, typer.Option(help="Maximum prompt tokens in one step. Default: as recorded.")] = None,
    prefix_cache: Annotated[bool, typer.Option(help="Use the prefix cache.")] = True,
    limit: Annotated[int | None, typer.Option(help="Run only the first N requests.")] = None,
    content: Annotated[
        list[Path] | None,
        typer.Option(help="For a record of hashes: a record of the same requests with their content."),
    ] = None,
    numerics: Annotated[str | None, typer.Option(help="official or exact. Default: as recorded.")] = None,
    dtype: model_loading.DtypeOption = None,
    device: Annotated[str | None, typer.Option(help="Device: cpu or cuda. Default: as recorded.")] = None,
    gpus: model_loading.GpusOption = None,
    offload_experts: model_loading.OffloadOption = None,
    threads: model_loading.ThreadsOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole report as JSON.")] = False,
) -> None:
    """Run recorded requests again, and name tokens or bits that differ, and the first place.

    Without --model, the checkpoint is the one that was recorded. Exit status 0: the same. 1: different. 2: it could
    not run.

    \b
    Examples:
      dsv4 replay receipts.jsonl
      dsv4 replay receipts.jsonl --batch 1 --chunk 64 --no-prefix-cache
      dsv4 replay receipts.jsonl.1 receipts.jsonl --model ./requantised --json
    """
    for name, value in {"--batch": batch, "--chunk": chunk, "--limit": limit}.items():
        if value is not None and value < 1:
            raise RequestError(f"{name} must be at least 1, found {value}")
    console = Console(stderr=True)
    found = Contents.of(files, content or ())
    first = found.headers[0].settings
    numerics = first["numerics"] if numerics is None else numerics
    if dtype is None and numerics == "exact" and first["numerics"] == "exact":
        dtype = first["dtype"]
    model_loading.check_numerics(numerics, dtype)
    folder = model_loading.find_model(_recorded_model(found.headers[0]) if model is None else model, console)
    limits = model_loading.engine_limits(
        ModelConfig.from_pretrained(folder),
        context=max(int(header.settings["max_context_tokens"]) for header in found.headers),
        requests=batch or int(first["max_concurrent_requests"]),
        chunk=chunk or int(first["max_chunk_tokens"]),
    )
    if not prefix_cache:
        limits = replace(limits, prefix_cache_bytes=0)
    wanted = model_loading.ModelSettings(
        folder=str(folder), numerics=numerics, dtype=dtype, device=device or first["device"], limits=limits,
        offload_experts=model_loading.parse_offload(offload_experts), gpus=gpus, threads=threads,
    )  # fmt: skip
    place = model_loading.place_model(wanted, console)
    llm = model_loading.load_llm(place, console)
    try:
        report = _run(llm, found, limit, console)
    except (RuntimeError, RankFailed) as error:
        print(f"dsv4: error: the engine failed: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    finally:
        llm.close()
    report.settings = {
        "model": str(folder), "batch": limits.max_concurrent_requests, "chunk": limits.max_chunk_tokens,
        "prefix_cache": prefix_cache, "gpus": place.gpus,
    }  # fmt: skip
    if as_json:
        print(json.dumps(report.to_dict(), indent=1))
    else:
        print_replay(report, Console(soft_wrap=True, highlight=False, markup=False))
    raise typer.Exit(0 if report.is_same else 1)


def _recorded_model(header: Header) -> Path:
    if header.model is None:
        raise RequestError("the record names no checkpoint; give one with --model")
    if not Path(header.model).exists():
        raise RequestError(f"the recorded checkpoint {header.model} does not exist; pass its folder with --model")
    return Path(header.model)


def _run(llm: LLM, found: Contents, limit: int | None, console: Console) -> ReplayReport:
    """The replay, with a bar."""
    from dsv4.tools.receipts.recorder import header_of
    from dsv4.tools.receipts.replay import replay

    now = header_of(llm, progress=True)
    total = found.num_requests if limit is None else min(limit, found.num_requests)
    columns = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("replaying", total=total, note="")

        def advance(report: ReplayReport) -> None:
            if report.num_requests == 0:
                for change in report.changes:
                    text = f"not the same {change.what}: {change.recorded} in the record, {change.now} now"
                    console.print(text, markup=False, highlight=False, soft_wrap=True)
            note = f"{len(report.differences)} differ" if report.differences else ""
            bar.update(task, completed=report.num_requests, note=note)

        return replay(llm, now, found, _constrainer(llm), limit=limit, on_done=advance)


def _constrainer(llm: LLM) -> Any:
    """Compiles recorded grammars; the library is needed only if there is one."""
    compiler: list[Any] = []

    @cache
    def compiled(grammar: str) -> Any:
        if not compiler:
            if llm.tokenizer is None:
                raise RequestError("a grammar needs a tokenizer, and this checkpoint has none")
            try:
                from dsv4.engine.grammar.compiler import GrammarCompiler
            except ModuleNotFoundError as error:
                raise RequestError(f"a grammar needs {error.name}: {how_to_install('serve')}") from None
            compiler.append(
                GrammarCompiler(llm.tokenizer, vocab_size=llm.config.vocab_size, eos_token_id=llm.config.eos_token_id)
            )
        return compiler[0].compile(grammar)

    return lambda grammar: compiled(grammar).constraint()


def print_replay(report: ReplayReport, console: Console) -> None:
    """What is missing, what differs, and the verdict."""
    for damage in report.damaged:
        console.print(f"skipped {damage}")
    if report.num_lost:
        console.print(f"{report.num_lost} requests are missing: the server could not write them")
    if report.num_without_content:
        console.print(f"{report.num_without_content} requests were not run: they have hashes only (see --content)")
    for one in report.differences[:_MAX_PRINTED]:
        who = f" ({one.request_id}, answer {one.choice})" if one.request_id else ""
        console.print(f"{one.file}:{one.line}{who}: {one.text}")
    if len(report.differences) > _MAX_PRINTED:
        console.print(f"and {len(report.differences) - _MAX_PRINTED} more")
    run = f"{report.num_requests} requests, {report.num_tokens:,} tokens in {report.seconds:.1f} s"
    if report.is_same:
        unproven = f" ({report.num_tokens_only} were recorded without)" if report.num_tokens_only else ""
        console.print(f"{run}: the same tokens and log-probabilities{unproven}, bit for bit", style="green")
        return
    causes = ", ".join(change.what for change in report.changes)
    told = f"; not the same: {causes}" if causes else "; nothing else that is known to decide bits differs"
    console.print(f"{run}: {len(report.differences)} differ{told}", style="red")
