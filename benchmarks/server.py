"""`dsv4 serve` under load, beside the engine alone: tokens/s, waits, CPU time by process.

    python -m benchmarks server                                    four Flash layers, written to disk first
    python -m benchmarks server --layers 4,34 --resident           then as many as one H200 holds; nothing is written
    python -m benchmarks server --model FOLDER                     a checkpoint that is there
    python -m benchmarks server --preset mini --small --device cpu  the shipped miniature: a try
    python -m benchmarks server --preset free --device cpu         a model that costs nothing: the host alone

Sections are the rows of `SECTIONS`. Each starts a server of its own with the limits it needs; clients are those of
`dsv4 bench serve`, in processes of their own. With `--resident` the engine is a thread of this process. Records:
`serve_engine` (the engine alone), `serve` (through HTTP, with `cpu_seconds` by process and `cpu_us_per_token`). The
first load of each server is short and not recorded, apart from its very first request. At the end: the goals, and
which are met.
"""

import argparse
import gc
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.free_model import FREE_CONFIG, free_llm
from benchmarks.runner import SCHEDULE, Record, Session, free_memory, numbers
from benchmarks.server_goals import table
from benchmarks.serving import ResidentServer, ServerProcess
from dsv4.config import EngineConfig
from dsv4.http.settings import ServerConfig
from dsv4.llm import LLM
from dsv4.loader.shipped import find_checkpoint
from dsv4.loader.write.synth import write_checkpoint
from dsv4.text.byte_tokenizer import byte_tokenizer
from dsv4.text.tokenizer import Tokenizer
from dsv4.tools.bench.context import build_model, cut_config
from dsv4.tools.bench.engine_target import EngineTarget
from dsv4.tools.bench.serve import measure_load
from dsv4.tools.bench.server_target import UrlTarget
from dsv4.tools.bench.workload import Lengths, Load
from dsv4.tools.plan.targets import PRESETS

conclusions = table
MIN_REQUESTS = 8  # one stream asks so often


class Section(NamedTuple):
    """What its loads have in common; `streams` None: those of --streams."""

    about: str
    load: dict[str, Any]
    streams: tuple[int, ...] | None = None


PLAN = {
    "streams": Section("the same prompts and answers by number of streams", {"prompt": 512, "output": 128}),
    "steady": Section("four answers one after another", {"prompt": 512, "output": 128, "waves": 4}, (256, 1024)),
    "random": Section("vLLM's `random` shape", {"shape": "random", "waves": 2}, (256,)),
    "sharegpt": Section("lengths like ShareGPT's", {"shape": "sharegpt", "waves": 2}, (256,)),
    "short": Section("512 short requests at once", {"prompt": 16, "output": 1}, (512,)),
    "first": Section("first token of one request", {"prompt": 300, "output": 2}, (1,)),
    "intruder": Section(
        "a long prompt beside streams",
        {"prompt": 512, "output": 2048, "intruder": 524288, "intruder_seconds": 5.0}, (64,)
    ),
}  # fmt: skip
SECTIONS = tuple(PLAN)
SMALL = {"prompt": 24, "output": 6, "intruder": 600, "intruder_seconds": 0.2}  # of --small


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=numbers, default=[1, 16, 64, 256, 1024], help="of the section streams")
    parser.add_argument("--kinds", default="completions,chat")
    parser.add_argument(
        "--layers", type=numbers, default=[len(SCHEDULE)],
        help="models one after another: 4 is one or two layers of each kind, any other number the preset's first",
    )  # fmt: skip
    parser.add_argument("--model", help="a checkpoint instead")
    parser.add_argument("--resident", action="store_true", help="random weights made on the GPU, not on the disk")
    parser.add_argument("--small", action="store_true", help="short prompts and answers of few streams: a try")
    parser.add_argument("--step-ms", type=float, default=0.0, help="--preset free: how long a step takes")
    parser.add_argument("--chunk", type=int, default=4096, help="prompt tokens of a step, at most")
    parser.add_argument("--processes", type=int, default=8, help="client processes")
    parser.add_argument(
        "--serve-option", action="append", default=[], help="passed on to `dsv4 serve`, e.g. --front-ends=4"
    )


@dataclass
class Measured:
    """The loads of a section on one model, and the engine's tokens/s by number of streams, once known."""

    section: str
    loads: list[Load]
    layers: int
    engine: dict[int, float] = field(default_factory=dict)


def run(session: Session) -> None:
    options = session.options
    is_cut = options.preset not in ("free", "mini") and options.model is None
    for layers in options.layers if is_cut else (0,):
        with tempfile.TemporaryDirectory() as name:
            folder, sections = Path(name), {one: loads_of(one, session) for one in SECTIONS if session.wants(one)}
            if options.resident or options.preset == "free":
                run_resident(session, folder, layers, sections)
                continue
            model = checkpoint(session, folder, layers)
            print(f"[{session.elapsed:6.1f}] the checkpoint is there", flush=True)
            for section, loads in sections.items():
                made, limits = Measured(section, loads, layers), limits_of(session, loads)
                session.attempt(f"{section}, engine", alone, model, made, device=options.device, engine=limits)
                server = ServerProcess(model, folder / f"{section}.log", [
                    "--device", options.device, "--requests", str(limits.max_concurrent_requests), "--context",
                    str(limits.max_context_tokens), "--chunk", str(options.chunk), "--max-waiting", "2048",
                    "--max-connections", "2048", *options.serve_option,
                ])  # fmt: skip
                session.attempt(f"{section}, server", served, session, server, made)


def run_resident(session: Session, folder: Path, layers: int, sections: dict[str, list[Load]]) -> None:
    """One model for all sections, in this process; its tokenizer is in the folder, for front ends. The long prompt has
    one of its own: room for as many contexts of its length as there are streams elsewhere would not fit."""
    alike = {name: loads for name, loads in sections.items() if name != "intruder"}
    for group in (alike, {name: loads for name, loads in sections.items() if name not in alike}):
        if group:
            run_group(session, folder, layers, group)
            free_memory()


def run_group(session: Session, folder: Path, layers: int, sections: dict[str, list[Load]]) -> None:
    options = session.options
    limits = limits_of(session, [load for loads in sections.values() for load in loads])
    if options.preset == "free":
        llm = free_llm(limits, write_tokenizer(folder, FREE_CONFIG.vocab_size), step_seconds=options.step_ms / 1e3)
    else:
        model = build_model(options.preset, **cut_of(layers), experts="nvfp4", device=options.device)
        tokenizer = write_tokenizer(folder, model.config.vocab_size)
        llm = LLM.from_params(model.config, model.params, tokenizer=tokenizer, engine=limits)
        del model
    print(f"[{session.elapsed:6.1f}] the model is there, {layers or 'all'} layers", flush=True)
    config = ServerConfig(name="model", port=0, max_waiting=2048, max_connections=2048)
    with llm, frozen():
        for section, loads in sections.items():
            made = Measured(section, loads, layers)
            session.attempt(f"{section}, engine", loads_alone, llm, made)
            server = ResidentServer(llm, folder, config, min(max((os.cpu_count() or 1) // 4, 1), 8))
            session.attempt(f"{section}, server", served, session, server, made)


def cut_of(layers: int) -> dict[str, Any]:
    if layers == len(SCHEDULE):
        return {"layers": None, "schedule": SCHEDULE, "hash_layers": 1}
    return {"layers": layers, "schedule": None, "hash_layers": None}


def checkpoint(session: Session, folder: Path, layers: int) -> Path:
    options = session.options
    if options.preset == "mini" or options.model is not None:
        return find_checkpoint(options.model)
    config = cut_config(PRESETS[options.preset](), *cut_of(layers).values())
    extra = {"tokenizer.json": json.dumps(whole_tokenizer(config.vocab_size))}
    return write_checkpoint(
        folder / "model", config, experts="nvfp4", with_mtp=False, extra_files=extra, device=session.device
    )


def write_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    (folder / "tokenizer.json").write_text(json.dumps(whole_tokenizer(vocab_size)))
    return Tokenizer.from_pretrained(folder)


def whole_tokenizer(vocab_size: int) -> dict[str, Any]:
    """A word for every id: random weights draw all of them, and each token should be text."""
    made = byte_tokenizer(vocab_size)
    known = set(made["model"]["vocab"].values())
    made["model"]["vocab"] |= {f"Ġw{idx}": idx for idx in range(vocab_size) if idx not in known}
    return made


def loads_of(section: str, session: Session) -> list[Load]:
    fields, is_small = dict(PLAN[section].load), session.options.small
    waves, shape = fields.pop("waves", 1), fields.pop("shape", "fixed")
    if is_small:
        fields |= {name: value for name, value in SMALL.items() if name in fields or name in ("prompt", "output")}
    counts = PLAN[section].streams or session.options.streams
    if is_small:
        counts = [min(count, 4) for count in counts]
    return [
        Load.of(
            "fixed" if is_small else shape, streams=count, requests=max(waves * count, 2 if is_small else MIN_REQUESTS),
            temperature=0.8, **fields,
        )
        for count in dict.fromkeys(counts)
    ]  # fmt: skip


def limits_of(session: Session, loads: list[Load]) -> EngineConfig:
    room = 512  # a chat's own tokens, and the two chats that are asked how long a word is
    return EngineConfig(
        max_context_tokens=max(load.max_context for load in loads) + room,
        max_concurrent_requests=max(load.streams + (load.intruder is not None) for load in loads),
        max_chunk_tokens=session.options.chunk,
    )


@contextmanager
def frozen() -> Iterator[None]:
    """The model is left out by the garbage collector, as in the server."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def alone(folder: Path, made: Measured, **options: Any) -> list[Record]:
    with LLM(folder, **options) as llm, frozen():
        return loads_alone(llm, made)


def loads_alone(llm: LLM, made: Measured) -> list[Record]:
    records: list[Record] = []
    target = EngineTarget(llm.engine, "engine", llm.config.vocab_size)
    measure_load(target, warm_up_of(made.loads[0]))
    for load in made.loads:
        report, _ = measure_load(target, replace(load, seed=2))
        made.engine[load.streams] = report.tokens_per_second
        records.append({**report.to_dict(), "kind": "serve_engine", "section": made.section, "layers": made.layers})
    return records


def warm_up_of(load: Load) -> Load:
    """A short answer for each stream."""
    return replace(load, requests=load.streams, output=Lengths(min(load.output.median, 16)), intruder=None, seed=1)


def served(session: Session, process: ServerProcess | ResidentServer, made: Measured) -> list[Record]:
    records: list[Record] = []
    url = process.start()
    try:
        target = UrlTarget(url, processes=session.options.processes)
        kinds = session.options.kinds.split(",")
        loads = [(kinds[0], warm_up_of(made.loads[0]))]
        loads += [(kind, load) for kind in kinds for load in made.loads]
        for seed, (kind, load) in enumerate(loads, 3):
            before = process.cpu_seconds()
            report, _ = measure_load(target, replace(load, kind=kind, seed=seed))
            used = {name: round(total - before.get(name, 0.0), 3) for name, total in process.cpu_seconds().items()}
            tokens, alone = max(report.output_tokens, 1), made.engine.get(load.streams)
            records.append(report.to_dict() | {
                "section": made.section, "layers": made.layers, "cpu_seconds": used,
                "cpu_us_per_token": round(1e6 * sum(used.values()) / tokens, 1),
                "share_of_engine": round(report.tokens_per_second / alone, 3) if alone else None,
                **({"very_first_ms": records[0]["first_token_ms"].get("max")} if records else {}),
            })  # fmt: skip
    finally:
        process.stop()
    return records[1:]


def line(record: Record) -> str:
    is_served = record["kind"] == "serve"
    what = f"{record['load']['kind'] if is_served else 'engine':12} {record['load']['streams']:5} streams"
    text = f"{record['section']:9} {what}: {record['tokens_per_second']:9,.0f} tokens/s"
    for name in ("first_token_ms", "between_tokens_ms"):
        text += f"; {name} " + " / ".join(f"{record[name][part]:.1f}" for part in ("p50", "p90", "p99") if record[name])
    more = ("share_of_engine", "cpu_us_per_token", "cpu_seconds", "seconds", "intruder", "errors")
    return text + "".join(f"; {name} {record[name]}" for name in more if record.get(name))
