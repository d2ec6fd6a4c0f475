"""Running the requests of a record again, and saying what differs, where first.

What ran then and what runs now are compared before any token: a difference of weights, numerics, kernels or processor
is reported as what it is. Then every request goes through the engine as it did then, in batches of today's limits.
"""

import struct
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dsv4.engine.request import Request
from dsv4.engine.step.constraint import Constraint
from dsv4.llm import LLM
from dsv4.request import RequestError
from dsv4.text.output import TextOutput
from dsv4.tools.receipts.contents import Contents
from dsv4.tools.receipts.lines import Answer, Header, Receipt, answer_of, float_bits

Constrain = Callable[[str], Constraint]  # from a grammar's text
_ANSWER_PARTS = {
    "output": "tokens", "logprobs": "log-probabilities", "top_logprobs": "listed log-probabilities",
    "prompt_logprobs": "log-probabilities of the prompt",
}  # fmt: skip


@dataclass(frozen=True)
class Change:
    """Something that decides bits and is not what it was."""

    what: str
    recorded: str
    now: str


@dataclass(frozen=True)
class Difference:
    """A request that did not give what it gave.

    kind   tokens, finish, log-probabilities, ...; `failed` where it gave nothing; `changed` where its line was
           changed after it was recorded, and it was not run
    token  the first output token that differs; None where that is not known
    """

    file: str
    line: int
    request_id: str
    choice: int
    kind: str
    text: str
    token: int | None = None


@dataclass
class ReplayReport:
    """The result of a replay; `to_dict` for JSON."""

    changes: list[Change] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    num_requests: int = 0  # that were run again, or found changed
    num_tokens: int = 0
    num_tokens_only: int = 0  # of them, those recorded without log-probabilities
    num_without_content: int = 0
    num_lost: int = 0  # by the recording server's own count
    damaged: list[str] = field(default_factory=list)
    seconds: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def is_same(self) -> bool:
        return not self.differences

    def to_dict(self) -> dict[str, Any]:
        return {"is_same": self.is_same, **asdict(self)}


def replay(
    llm: LLM, now: Header, contents: Contents, constrain: Constrain, *, limit: int | None = None,
    on_done: Callable[[ReplayReport], None] = lambda report: None,
) -> ReplayReport:  # fmt: skip
    """Run everything again. `now` is what `llm` runs (`header_of`); `on_done` is called before the first request and
    after each."""
    changes: dict[Change, None] = {}
    for header in contents.headers:
        changes |= dict.fromkeys(compare_headers(header, now))
    report = ReplayReport(
        changes=list(changes), damaged=contents.damaged, num_lost=contents.num_lost,
        num_without_content=contents.num_without_content,
    )  # fmt: skip
    on_done(report)
    started = time.perf_counter()
    for receipt, difference in run_again(llm, constrain, contents.requests(limit)):
        report.num_requests += 1
        report.num_tokens += receipt.num_output
        report.num_tokens_only += "logprobs" not in receipt.digests and receipt.num_output > 0
        if difference is not None:
            report.differences.append(difference)
        on_done(report)
    report.seconds = time.perf_counter() - started
    order = {str(path): place for place, path in enumerate(contents.paths)}
    report.differences.sort(key=lambda one: (order[one.file], one.line))
    return report


def compare_headers(recorded: Header, now: Header) -> list[Change]:
    """What decides bits and differs between two runs, in words."""
    changes = []
    parts = [name for name in {**recorded.parts, **now.parts} if recorded.parts.get(name) != now.parts.get(name)]
    if recorded.parts and now.parts and parts:
        first = parts[0]
        then, here = recorded.parts.get(first, "none"), now.parts.get(first, "none")
        changes.append(Change(f"checkpoint ({_few(parts)})", then, here))
    words = {"numerics": "numerics", "libraries": "libraries", "kernels": "kernel version", "processor": "processor"}
    if not (recorded.parts and now.parts):
        words["checkpoint"] = "checkpoint"  # its samples; with all bytes known, other files of the same bytes are equal
    if recorded.identity["kernels"] == now.identity["kernels"]:
        words["package"] = "package outside its kernels"
    return changes + [
        Change(word, recorded.identity[name], now.identity[name])
        for name, word in words.items()
        if recorded.identity[name] != now.identity[name]
    ]


def run_again(
    llm: LLM, constrain: Constrain, receipts: Iterable[tuple[str, Header, Receipt]]
) -> Iterator[tuple[Receipt, Difference | None]]:
    """Each receipt once it is done, with what differs; as many at once as the model has slots. Receipts must have
    content. `constrain` makes the constraint of a recorded grammar."""
    waiting = iter(receipts)
    running: dict[Request, tuple[TextOutput, str, Receipt]] = {}
    try:
        while True:
            while len(running) < 2 * llm.engine.num_slots and (following := next(waiting, None)) is not None:
                file, header, receipt = following
                begun = _begin(llm, constrain, file, header, receipt)
                if isinstance(begun, Difference):
                    yield receipt, begun
                else:
                    running[begun[0]] = (begun[1], file, receipt)
            if not running:
                return
            llm.step()
            for request in [one for one, (output, _, receipt) in running.items() if _is_enough(output, receipt)]:
                llm.abort(request)  # one that was recorded in part need not go on
                output, file, receipt = running.pop(request)
                yield receipt, compare(file, receipt, output)
    finally:
        for request in running:
            llm.abort(request)


def _begin(
    llm: LLM, constrain: Constrain, file: str, header: Header, receipt: Receipt
) -> tuple[Request, TextOutput] | Difference:
    if changed := receipt.changed:
        text = f"its {_few(changed)} was changed after it was recorded; not run"
        return _difference(file, receipt, "changed", text)
    assert receipt.prompt is not None, "a receipt without content cannot be run"
    # the end that the recorded context gave it, and no deadline: time decides no bit
    params, room = receipt.sampling(), int(header.settings["max_context_tokens"]) - len(receipt.prompt)
    max_tokens = min(params.max_tokens, max(room, 0))
    params = replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens), deadline=None)
    try:
        constraint = None if receipt.grammar is None else constrain(receipt.grammar)
        return llm.start(receipt.prompt, params, constraint)
    except (RequestError, ValueError) as error:
        return _difference(file, receipt, "failed", f"it cannot be run here: {error}")


def compare(file: str, receipt: Receipt, output: TextOutput) -> Difference | None:
    """What a request gave now against its receipt; None if every recorded bit is the same."""
    if output.error is not None and receipt.is_whole:
        return _difference(file, receipt, "failed", f"it failed: {output.error}")
    now = answer_of(output, receipt.grammar, None)
    if not receipt.is_whole:
        now = _first(now, receipt)
    digests = now.digests()
    wrong = [part for part in _ANSWER_PARTS if part in receipt.digests and receipt.digests[part] != digests.get(part)]
    if not wrong:
        return None
    if wrong[0] == "output":
        return _token_difference(file, receipt, now)
    kind = _ANSWER_PARTS[wrong[0]]
    then = receipt.logprob_bits
    if wrong[0] == "logprobs" and then is not None and now.logprobs is not None:
        bits = [float_bits(one.logprob) for one in now.logprobs]
        place = next(idx for idx, (old, new) in enumerate(zip(then, bits, strict=True)) if old != new)
        text = f"the same tokens; log-probability of token {place} is {_bits(then[place])} in the record, "
        return _difference(file, receipt, kind, text + f"{_bits(bits[place])} now", place)
    return _difference(file, receipt, kind, f"the same tokens; {kind} differ")


def _token_difference(file: str, receipt: Receipt, now: Answer) -> Difference:
    if receipt.output is None:
        return _difference(file, receipt, "tokens", "tokens differ (hashes alone do not say where)")
    then = receipt.output
    place = next((idx for idx, (old, new) in enumerate(zip(then, now.output, strict=False)) if old != new), None)
    if place is not None:
        text = f"token {place} is {then[place]} in the record, {now.output[place]} now"
        return _difference(file, receipt, "tokens", text, place)
    text = f"it ended with {receipt.finish} after {len(then)} tokens in the record, with {now.finish} after "
    return _difference(file, receipt, "finish", text + f"{len(now.output)} now", min(len(then), len(now.output)))


def _difference(file: str, receipt: Receipt, kind: str, text: str, token: int | None = None) -> Difference:
    return Difference(file, receipt.line, receipt.request_id, receipt.choice, kind, text, token)


def _is_enough(output: TextOutput, receipt: Receipt) -> bool:
    return output.is_done or (not receipt.is_whole and output.num_output >= receipt.num_output)


def _first(now: Answer, receipt: Receipt) -> Answer:
    """As much of it as was recorded of one that ended early."""
    count = receipt.num_output
    logprobs = None if now.logprobs is None else now.logprobs[:count]
    return replace(now, output=now.output[:count], logprobs=logprobs, finish=receipt.finish)


def _bits(bits: int) -> str:
    return f"{struct.unpack('<f', struct.pack('<I', bits))[0]:.9g} (0x{bits:08x})"


def _few(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")
