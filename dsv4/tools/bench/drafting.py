"""What a checkpoint's drafter brings on text: how many drafts come true by place, tokens a step, tokens a second.

Requests go on with stretches of a text. Random prompts would say nothing: what is drawn behind them repeats itself, and
is drafted too well. Every setting must write what is written without drafts; `DraftsDiffer` says where one did not.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dsv4.config import BLOCK_TOKENS, ConfigError, EngineConfig
from dsv4.engine.draft.options import Drafts
from dsv4.errors import Dsv4Error
from dsv4.llm import LLM
from dsv4.loader.shipped import find_checkpoint, shipped_text
from dsv4.request import SamplingParams
from dsv4.text.tokenizer import Tokenizer
from dsv4.tools.bench.context import BenchModel, build_model
from dsv4.tools.bench.model import Record, Report, describe_machine

_WARM_TOKENS = 8  # of a first request, which is not timed


class DraftsDiffer(Dsv4Error, RuntimeError):
    """Drafts changed a token, which they never may."""


@dataclass(frozen=True)
class DraftLoad:
    """prompts of `prompt_tokens` each, spread over the text, `concurrency` at once, each continued by `output_tokens`.

    counts: what `drafts` may be, one after the other; empty: every number the model can, and "auto". "off" is always
    measured, first.
    """

    counts: tuple[Drafts, ...] = ()
    temperatures: tuple[float, ...] = (0.0, 1.0)
    prompts: int = 8
    prompt_tokens: int = 64
    output_tokens: int = 64
    concurrency: int = 1
    text: Path | None = None  # default: held out from the shipped models' training


def measure_drafts(
    target: str | None, device: str, load: DraftLoad, note: Callable[[str], None] = lambda what: None
) -> Report:
    """One checkpoint under every setting. Settings take turns, group by group of prompts, so that what else a machine
    does meets all of them."""
    model = build_model(target, device=device)
    prompts = _prompts(find_checkpoint(target), load)
    most = model.config.max_drafts
    if not most or not model.params.draft_blocks:
        raise ConfigError(f"{model.name} has no drafter; a checkpoint with an MTP block or a DSpark head has")
    counts = load.counts or (*range(1, most + 1), "auto")
    runs: list[_Run] = []
    for drafts in ("off", *(count for count in counts if count not in ("off", 0))):
        note(f"{model.name}, drafts {drafts}")
        runs.append(_Run(drafts, _open(model, drafts, load)))
    records: list[Record] = []
    for temperature in load.temperatures:
        note(f"{model.name}, temperature {temperature}")
        for run in runs:
            run.begin(temperature, prompts[0], load)
        for start in range(0, len(prompts), load.concurrency):
            group = prompts[start : start + load.concurrency]
            expected = runs[0].go_on(group, start)
            for run in runs[1:]:
                found = run.go_on(group, start)
                if found != expected:
                    raise DraftsDiffer(_difference(expected, found, f"drafts={run.drafts}, {temperature=}"))
        rows = [run.record(load) for run in runs]
        clock = "tokens_per_processor_second" if model.device.type == "cpu" else "tokens_per_second"
        drafter = "mtp" if model.config.dspark is None else "dspark"
        records += (
            {"kind": "drafts", "drafter": drafter, **one, "speedup": round(one[clock] / rows[0][clock], 3)}
            for one in rows
        )
    return Report(model.name, describe_machine(model.device), tuple(records))


def _open(model: BenchModel, drafts: Drafts, load: DraftLoad) -> LLM:
    limits = EngineConfig(
        max_context_tokens=load.prompt_tokens + load.output_tokens, max_concurrent_requests=load.concurrency,
        max_chunk_tokens=max(BLOCK_TOKENS, load.concurrency * load.prompt_tokens),  # no more is fed: less to compile
    )  # fmt: skip
    return LLM.from_params(model.config, model.params, engine=limits, drafts=drafts)


def _prompts(folder: Path, load: DraftLoad) -> list[list[int]]:
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"{folder} has no tokenizer.json; drafts are measured on text")
    ids = Tokenizer.from_pretrained(folder).encode((load.text or shipped_text()).read_text(encoding="utf-8"))
    room = len(ids) - load.prompt_tokens
    if room < 0:
        raise ConfigError(f"the text has {len(ids)} tokens; expected at least {load.prompt_tokens} for a prompt")
    starts = [room * place // load.prompts for place in range(load.prompts)]
    return [ids[start : start + load.prompt_tokens] for start in starts]


class _Run:
    """A model with one setting of drafts: seconds and counts of what it has written at one temperature."""

    def __init__(self, drafts: Drafts, llm: LLM) -> None:
        self.drafts = drafts
        self._engine = llm.engine

    def begin(self, temperature: float, prompt: Sequence[int], load: DraftLoad) -> None:
        """Count from here on, after a short request that is not counted."""
        self._temperature, self._output_tokens = temperature, min(_WARM_TOKENS, load.output_tokens)
        self._reset()
        self.go_on([prompt], 0)
        self._output_tokens = load.output_tokens
        self._reset()
        self._before = self._engine.stats().drafts

    def _reset(self) -> None:
        self._num_tokens, self._wall, self._processor = 0, 0.0, 0.0

    def go_on(self, prompts: Sequence[Sequence[int]], first_seed: int) -> list[list[int]]:
        """Tokens of requests served together; their time counts from their first tokens on."""
        engine = self._engine
        params = SamplingParams(max_tokens=self._output_tokens, temperature=self._temperature, ignore_eos=True, seed=0)
        requests = [
            engine.add(list(prompt), replace(params, seed=seed)) for seed, prompt in enumerate(prompts, first_seed)
        ]
        while any(request.num_output == 0 for request in requests):
            engine.step()
        num_first = sum(request.num_output for request in requests)
        started = time.perf_counter(), time.process_time()
        while engine.has_work:
            engine.step()
        self._wall += time.perf_counter() - started[0]
        self._processor += time.process_time() - started[1]
        written = [list(request.completion().token_ids) for request in requests]
        self._num_tokens += sum(map(len, written)) - num_first
        return written

    def record(self, load: DraftLoad) -> Record:
        record: Record = {
            "drafts": self.drafts, "temperature": self._temperature, "concurrency": load.concurrency,
            "prompts": load.prompts, "prompt_tokens": load.prompt_tokens, "output_tokens": load.output_tokens,
            "tokens_per_second": round(self._num_tokens / self._wall, 2),
            "tokens_per_processor_second": round(self._num_tokens / self._processor, 2),
        }  # fmt: skip
        before, after = self._before, self._engine.stats().drafts
        if before is not None and after is not None:
            steps = after.num_steps - before.num_steps
            verified, accepted = (
                [b - a for a, b in zip(getattr(before, name), getattr(after, name), strict=True)]
                for name in ("verified_by_place", "accepted_by_place")
            )
            record |= {
                "steps": steps, "verified_by_place": verified, "accepted_by_place": accepted,
                "tokens_per_step": round(1 + sum(accepted) / max(steps, 1), 3),
            }  # fmt: skip
        return record


def _difference(expected: list[list[int]], found: list[list[int]], setting: str) -> str:
    request = next(place for place, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b)
    token = next(place for place, (a, b) in enumerate(zip(expected[request], found[request], strict=True)) if a != b)
    return (
        f"with {setting}, request {request} wrote token {found[request][token]} at place {token}; without drafts it "
        f"wrote {expected[request][token]}"
    )
