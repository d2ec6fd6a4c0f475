"""The lines of a record: what they hold, how they are written, how a foreign line is read. No torch.

A record is a text file of JSON objects, one a line. A `header` says what ran: every request after it, up to the next
header, ran there. A `request` is one answer: what was asked of the engine and what came. Where a server could not
write, a `gap` says how many requests are missing.

Each part of a request has a digest beside it. Without content (`hashes_only`) only the digests remain. With it they
tell a part that was changed after it was written.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from typing import Any

from dsv4.errors import Dsv4Error
from dsv4.request import Completion, SamplingParams, TokenLogprobs
from dsv4.text.output import TextOutput

FORMAT = 1
# of the parameters, those that hold words or tokens of whoever asked
_CONTENT_PARAMS = ("stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words_ids", "cache_salt")
_HELD = ("prompt", "params", "seed", "grammar", "output", "logprobs")  # parts that stand in a line with their digest
ENDS = ("stop", "length")


class RecordError(Dsv4Error, ValueError):
    """A line, or a file, that is not part of a record."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """What ran the requests that follow it.

    identity  the fields of `dsv4.engine.fingerprint.Identity`
    parts     digests of every byte of each layer, of config and tokenizer (`checkpoint_parts`)
    model     the checkpoint's folder; None for parameters that came from none
    settings  numerics, dtype, device, max_context_tokens, max_concurrent_requests, max_chunk_tokens
    """

    identity: Mapping[str, str]
    parts: Mapping[str, str]
    model: str | None
    settings: Mapping[str, Any]
    time: str = ""
    hashes_only: bool = False


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A request as the engine had it, and its result.

    finish   `stop` or `length`; anything else says what ended it early, and `output` is what it had until then
    grammar  the Lark text its output had to follow
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    output: tuple[int, ...]
    finish: str
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    grammar: str | None = None

    @property
    def is_whole(self) -> bool:
        return self.finish in ENDS

    @property
    def is_proof(self) -> bool:
        """Whether it is worth a line: an answer that ended early without a token proves nothing."""
        return self.is_whole or bool(self.output)

    @classmethod
    def of(cls, params: SamplingParams, completion: Completion) -> Answer:
        """From `LLM.generate`."""
        return cls(
            prompt=completion.prompt_token_ids, params=replace(params, n=1, seed=completion.seed),
            output=completion.token_ids,
            finish=completion.finish_reason.value, logprobs=completion.logprobs,
            prompt_logprobs=completion.prompt_logprobs,
        )  # fmt: skip

    def digests(self) -> dict[str, str]:
        """Of each part: the request's (prompt, params, seed, grammar) and the answer's (output and how it ended,
        log-probabilities where there are any)."""
        found = {
            "prompt": _digest(_ids(self.prompt)),
            "params": _params_digest(asdict(self.params)),
            "seed": _digest(str(self.params.seed).encode("ascii")),
            "output": _digest(_ids(self.output) + self.finish.encode("utf-8")),
        }
        if self.grammar is not None:
            found["grammar"] = _digest(self.grammar.encode("utf-8"))
        if self.logprobs is not None:
            found["logprobs"] = _digest(_packed([one.logprob for one in self.logprobs]))
            if self.params.logprobs:
                found["top_logprobs"] = _digest(b"".join(map(_listed, self.logprobs)))
        if self.prompt_logprobs is not None:
            found["prompt_logprobs"] = _digest(b"".join(map(_listed, self.prompt_logprobs)))
        return found


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """A request's line, read. Where it has hashes only, `prompt`, `params` and `output` are None.

    choice      its place among the answers of one HTTP request
    logprobs    bits of the chosen tokens' log-probabilities (fp32), where they were recorded
    changed     parts that do not have the digest they had when they were written
    """

    digests: Mapping[str, str]
    finish: str
    num_output: int
    request_id: str
    route: str
    choice: int
    time: str
    prompt: tuple[int, ...] | None = None
    params: SamplingParams | None = None
    output: tuple[int, ...] | None = None
    grammar: str | None = None
    logprobs: tuple[int, ...] | None = None
    changed: tuple[str, ...] = ()
    line: int = field(default=0, compare=False)

    @property
    def is_whole(self) -> bool:
        return self.finish in ENDS

    @property
    def has_content(self) -> bool:
        return self.prompt is not None

    @property
    def asked(self) -> tuple[str | None, ...]:
        """The digests that name the request: two receipts of one request have the same."""
        return tuple(self.digests.get(part) for part in ("prompt", "params", "seed", "grammar"))


@dataclass(frozen=True)
class Gap:
    """The number of requests that were answered and not recorded."""

    num_lost: int


# ---- writing ----


def answer_of(output: TextOutput, grammar: str | None, problem: str | None) -> Answer:
    """A request that is over. `problem` is what ended it early."""
    params = output.params
    if problem is None:
        problem = "failed" if output.finish_reason is None else output.finish_reason.value
    has_scores = params.prompt_logprobs is not None and problem in ENDS
    return Answer(
        prompt=tuple(output.prompt_ids), params=params, output=tuple(output.token_ids), finish=problem,
        logprobs=None if params.logprobs is None else tuple(output.logprobs), grammar=grammar,
        prompt_logprobs=tuple(output.prompt_logprobs) if has_scores else None,
    )  # fmt: skip


def now() -> str:
    """The time of a line."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def header_line(header: Header) -> bytes:
    content = {"kind": "header", "format": FORMAT, **asdict(header)}
    return _line({**content, "check": _digest(_canonical(content))})


def gap_line(gap: Gap) -> bytes:
    return _line({"kind": "gap", "num_lost": gap.num_lost})


def request_line(
    answer: Answer, *, hashes_only: bool, request_id: str = "", route: str = "", choice: int = 0, time: str = ""
) -> bytes:  # fmt: skip
    params = asdict(answer.params)
    content: dict[str, Any] = {
        "kind": "request", "id": request_id, "route": route, "choice": choice, "time": time, "finish": answer.finish,
        "num_output": len(answer.output),
    }  # fmt: skip
    if hashes_only:
        content["params"] = {name: value for name, value in params.items() if name not in _CONTENT_PARAMS}
    else:
        content |= {"params": params, "prompt": answer.prompt, "output": answer.output}
        if answer.grammar is not None:
            content["grammar"] = answer.grammar
        if answer.logprobs is not None:
            packed = _packed([one.logprob for one in answer.logprobs])
            content["logprobs"] = base64.b64encode(packed).decode("ascii")
    return _line({**content, "digests": answer.digests()})


# ---- reading ----


def parse_line(line: bytes) -> Header | Receipt | Gap:
    """`RecordError` says what is wrong with a line that is damaged or of another kind."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        raise RecordError("it is truncated or not JSON") from None
    kind = content.get("kind") if isinstance(content, dict) else None
    try:
        if kind == "header":
            return _parse_header(content)
        if kind == "request":
            return _parse_request(content)
        if kind == "gap":
            return Gap(int(content["num_lost"]))
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error, struct.error) as error:
        text = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise RecordError(f"a {kind} that cannot be read: {text[:200]}") from None
    raise RecordError("it is not a line of a record")


def with_content(receipt: Receipt, source: Receipt) -> Receipt:
    """A receipt that has hashes only, with the request of another one that was asked the same."""
    assert receipt.asked == source.asked
    return replace(receipt, prompt=source.prompt, params=source.params, grammar=source.grammar)


def float_bits(value: float) -> int:
    """The 32 bits of a value of fp32."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits


def _parse_header(content: dict[str, Any]) -> Header:
    check = content.pop("check", None)
    if content.get("format") != FORMAT:
        raise RecordError(f"format {content.get('format')!r}; this version reads format {FORMAT}")
    if check != _digest(_canonical(content)):
        raise RecordError("it was changed after it was written")
    return Header(**{one.name: content[one.name] for one in fields(Header)})


def _parse_request(content: dict[str, Any]) -> Receipt:
    receipt = Receipt(
        digests={str(name): str(digest) for name, digest in content["digests"].items()},
        finish=str(content["finish"]),
        num_output=int(content["num_output"]),
        request_id=str(content["id"]),
        route=str(content["route"]),
        choice=int(content["choice"]),
        time=str(content["time"]),
    )
    if "prompt" not in content:
        return receipt
    answer = Answer(
        prompt=tuple(map(int, content["prompt"])), params=_params(content["params"]), finish=receipt.finish,
        output=tuple(map(int, content["output"])), grammar=content.get("grammar"),
    )  # fmt: skip
    held, bits = answer.digests(), None
    held["params"] = _params_digest(content["params"])  # as they stand there: another version may know more of them
    if "logprobs" in content:
        packed = base64.b64decode(content["logprobs"], validate=True)
        held["logprobs"], bits = _digest(packed), struct.unpack(f"<{len(answer.output)}I", packed)
    parts = dict.fromkeys((*held, *(name for name in receipt.digests if name in _HELD)))
    changed = tuple(name for name in parts if receipt.digests.get(name) != held.get(name))
    return replace(
        receipt, prompt=answer.prompt, params=answer.params, output=answer.output, grammar=answer.grammar,
        logprobs=bits, changed=changed,
    )  # fmt: skip


def _params(given: Mapping[str, Any]) -> SamplingParams:
    values = dict(given)
    if values.get("logit_bias") is not None:  # JSON has no integers as keys
        values["logit_bias"] = {int(token_id): bias for token_id, bias in values["logit_bias"].items()}
    return SamplingParams(**values)


def _params_digest(params: Mapping[str, Any]) -> str:
    return _digest(_canonical({**params, "seed": None}))


def _line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=True, separators=(",", ":")).encode("ascii") + b"\n"


def _canonical(content: Mapping[str, Any]) -> bytes:
    """One text for one meaning: tuples and lists, integer keys and their text are the same."""
    plain = json.loads(json.dumps(content))
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode("utf-8")


def _ids(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}q", *token_ids)


def _packed(values: Sequence[float]) -> bytes:
    """fp32, every bit of it."""
    return struct.pack(f"<{len(values)}f", *values)


def _listed(scored: TokenLogprobs | None) -> bytes:
    """A token and those listed beside it: ids, and all bits of their log-probabilities."""
    if scored is None:
        return b"-"
    numbers = [number for pair in ((scored.token_id, scored.logprob), *scored.top) for number in pair]
    return struct.pack(f"<I{'qf' * (len(scored.top) + 1)}", len(scored.top), *numbers)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
