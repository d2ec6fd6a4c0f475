"""What the benchmarks share: options, the clock, records with their origin, the model of four Flash layers.

A benchmark is a module with `run(session)`, and where it needs them `SECTIONS`, `add_options(parser)`, `line(record)`
(one line for a person) and `conclusions(records)` (lines after all records). See `__main__.py`.
"""

import argparse
import gc
import re
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.power import Load, Meter, open_meter
from benchmarks.records import RESULTS, Record, origin_of, write_records
from dsv4.loader.write.config_file import ExpertFormat
from dsv4.tools.bench.context import BenchModel, build_model
from dsv4.tools.plan.targets import PRESETS

SCHEDULE = ("swa", "csa", "hca", "csa")  # the four layers
FLASH_COUNTS = {"swa": 2, "csa": 21, "hca": 20}  # layers of each kind in all of Flash
NUM_LAYERS = sum(FLASH_COUNTS.values())


def add_common_options(parser: argparse.ArgumentParser, sections: Iterable[str]) -> None:
    parser.add_argument("--out", type=Path, help="append records here; default on a GPU: results/<gpu>-NAME.jsonl")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the benchmark")
    parser.add_argument("--preset", default="flash", help=f"{', '.join(PRESETS)}; tiny to try the benchmark")
    parser.add_argument("--seconds", type=float, default=560.0, help="begin nothing after this time")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of each kind")
    parser.add_argument("--commit", help="commit to record where there is no git repository")
    if sections:
        parser.add_argument("--section", action="append", choices=tuple(sections), help="only this; may be repeated")


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


class Session:
    """One run of a benchmark: its options, the clock, and its records so far."""

    def __init__(self, name: str, options: argparse.Namespace, line: Callable[[Record], str] | None = None) -> None:
        self.options = options
        self.is_cuda = options.device != "cpu"
        self.device = torch.device(options.device)
        self.records: list[Record] = []
        self.origin = origin_of(self.device, options.commit)
        self.meter: Meter | None = open_meter() if self.is_cuda else None
        self.facts: Record = {}  # of all records that follow
        self._began, self._line = time.monotonic(), line
        self.out: Path | None = options.out
        if self.is_cuda and self.out is None:
            self.out = RESULTS / f"{file_name(self.origin['gpu'])}-{name}.jsonl"

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def wants(self, section: str) -> bool:
        return not self.options.section or section in self.options.section

    def add(self, found: Record | Iterable[Record]) -> None:
        """Written one by one: a crash keeps what was measured."""
        for one in [found] if isinstance(found, dict) else found:
            record = one | self.facts
            self.records.append(record)
            if self.out is not None:
                write_records(self.out, [record], self.origin)
            line = as_line if self._line is None or record["kind"] in ("error", "skipped") else self._line
            print(line(record)[:900], flush=True)

    def attempt(self, what: str, measure: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """One measurement; whatever goes wrong becomes a record, and the next one may well work."""
        if self.elapsed > self.options.seconds:
            self.add({"kind": "skipped", "what": what})
            return
        began = self.elapsed
        try:
            if self.meter is None:
                self.add(measure(*arguments, **options) or [])
            else:
                with Load(self.meter) as load:
                    found = measure(*arguments, **options) or []
                records = [found] if isinstance(found, dict) else found
                self.add([record | {"load_of_gpu": load.summary()} for record in records])
            print(f"[{self.elapsed:6.1f}] {what}: {self.elapsed - began:.1f} s", flush=True)
        except Exception as error:
            lines = traceback.format_exc().strip().splitlines()[-12:]
            self.add({"kind": "error", "what": what, "error": f"{type(error).__name__}: {error}"[:500], "lines": lines})
        free_memory()

    def four_layers(self, experts: ExpertFormat = "nvfp4", num_layers: int | None = None) -> BenchModel:
        """SWA, CSA, HCA and CSA of the preset with random weights; or its first `num_layers`."""
        cut = {"schedule": SCHEDULE, "hash_layers": 1} if num_layers is None else {"layers": num_layers}
        model = build_model(self.options.preset, **cut, experts=experts, device=self.options.device)
        print(f"[{self.elapsed:6.1f}] {model.config.num_hidden_layers} layers are built", flush=True)
        free_memory()
        return model


def as_line(record: Record) -> str:
    """For a person: without what is long."""
    short = {name: value for name, value in record.items() if not isinstance(value, (list, dict)) or len(value) < 8}
    return f"{short.pop('kind')}: {', '.join(f'{name} {value}' for name, value in short.items())}"


def is_bad(record: Record) -> bool:
    """A measurement that failed, or bits that differ from those they must equal."""
    same = [value for name, value in record.items() if name.startswith(("same", "is_same", "is_finite"))]
    same += [value for group in same if isinstance(group, dict) for value in group.values()]
    return record["kind"] == "error" or any(value is False for value in same) or bool(record.get("wrong"))


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def used_bytes() -> int:
    """Of the GPU, by everybody."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def random_prompts(vocab_size: int, count: int, length: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocab_size, (count, length), generator=generator).tolist()


def file_name(gpu: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
