"""The lines of a record: what they hold, how they are written, how a foreign line is read. No torch.

A record is a text file of JSON objects, one a line. A `header` says what ran: every request after it, up to the next
header, ran there. A `request` is one answer: what was asked of the engine and what came. Where a server could not
write, a `gap` says how many requests are missing.

Each part of a request has a digest beside it. Without content (`hashes_only`) only the digests remain. With it they
show a part that was changed after it was written.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec.structs import replace as with_fields

from dsv4.errors import Dsv4Error
from dsv4.request import Completion, SamplingParams, TokenLogprobs
from dsv4.text.output import TextOutput

FORMAT = 1
# parameters that hold words or tokens of the user
_CONTENT_PARAMS = ("stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words_ids", "cache_salt")
_HELD = ("prompt", "params", "seed", "grammar", "output", "logprobs")  # parts that stand in a line with their digest
ENDS = ("stop", "length")


class RecordError(Dsv4Error, ValueError):
    """A line, or a file, that is not part of a record."""


class Header(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="header"):
    """What ran the requests that follow it.

    identity  the fields of `dsv4.engine.fingerprint.Identity`
    parts     digests of every byte of each layer, of config and tokenizer (`checkpoint_parts`)
    model     the checkpoint's folder; None for parameters that came from none
    settings  numerics, dtype, device, max_context_tokens, max_concurrent_requests, max_chunk_tokens
    check     digest of all other fields, in a line
    """

    identity: dict[str, str]
    parts: dict[str, str]
    model: str | None
    settings: dict[str, Any]
    time: str = ""
    hashes_only: bool = False
    format: int = FORMAT
    check: str = ""

    def digest(self) -> str:
        fields = msgspec.to_builtins(self)
        del fields["check"]
        return _digest(_canonical(fields))


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


class Receipt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="request"):
    """A request's line. Where it has hashes only, `prompt` and `output` are None and `params` is incomplete.

    choice    its place among the answers of one HTTP request
    params    fields of `SamplingParams`, as they stand in the line
    logprobs  the chosen tokens' log-probabilities, fp32, where they were recorded
    line      its number in its file; never written
    """

    request_id: str = msgspec.field(name="id")
    route: str
    choice: int
    time: str
    finish: str
    num_output: int
    params: dict[str, Any]
    digests: dict[str, str]
    prompt: tuple[int, ...] | None = None
    output: tuple[int, ...] | None = None
    grammar: str | None = None
    logprobs: bytes | None = None
    line: int = 0

    def __post_init__(self) -> None:
        if self.prompt is not None:
            self.sampling()  # raises where a value cannot be
        if self.logprobs is not None and len(self.logprobs) != 4 * self.num_output:
            raise ValueError("it has another number of log-probabilities than of tokens")

    @property
    def is_whole(self) -> bool:
        return self.finish in ENDS

    @property
    def has_content(self) -> bool:
        return self.prompt is not None

    def sampling(self) -> SamplingParams:
        """The parameters that `params` stands for."""
        bias = self.params.get("logit_bias")  # JSON has no integers as keys
        bias = None if bias is None else {int(token_id): one for token_id, one in bias.items()}
        return SamplingParams(**{**self.params, "logit_bias": bias})

    @property
    def logprob_bits(self) -> tuple[int, ...] | None:
        return None if self.logprobs is None else struct.unpack(f"<{len(self.logprobs) // 4}I", self.logprobs)

    @property
    def asked(self) -> tuple[str | None, ...]:
        """The digests that name the request: two receipts of one request have the same."""
        return tuple(self.digests.get(part) for part in ("prompt", "params", "seed", "grammar"))

    @property
    def changed(self) -> tuple[str, ...]:
        """Parts that do not have the digest they had when they were written."""
        if self.prompt is None or self.output is None:
            return ()
        held = Answer(
            prompt=self.prompt, params=self.sampling(), output=self.output, finish=self.finish, grammar=self.grammar
        ).digests()
        held["params"] = _params_digest(self.params)  # as they stand there: another version may know more of them
        if self.logprobs is not None:
            held["logprobs"] = _digest(self.logprobs)
        parts = dict.fromkeys((*held, *(name for name in self.digests if name in _HELD)))
        return tuple(name for name in parts if self.digests.get(name) != held.get(name))


class Gap(msgspec.Struct, frozen=True, tag_field="kind", tag="gap"):
    """The number of requests that were answered and not recorded."""

    num_lost: int


_LINES = msgspec.json.Decoder(Header | Receipt | Gap)

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
    return msgspec.json.encode(with_fields(header, check=header.digest())) + b"\n"


def gap_line(gap: Gap) -> bytes:
    return msgspec.json.encode(gap) + b"\n"


def request_line(
    answer: Answer, *, hashes_only: bool, request_id: str = "", route: str = "", choice: int = 0, time: str = ""
) -> bytes:  # fmt: skip
    receipt = Receipt(
        request_id=request_id, route=route, choice=choice, time=time, finish=answer.finish,
        num_output=len(answer.output), params=asdict(answer.params), digests=answer.digests(),
    )  # fmt: skip
    if hashes_only:
        shown = {name: value for name, value in receipt.params.items() if name not in _CONTENT_PARAMS}
        receipt = with_fields(receipt, params=shown)
    else:
        logprobs = None if answer.logprobs is None else _packed([one.logprob for one in answer.logprobs])
        receipt = with_fields(
            receipt, prompt=answer.prompt, output=answer.output, grammar=answer.grammar, logprobs=logprobs
        )
    return msgspec.json.encode(receipt) + b"\n"


# ---- reading ----


def parse_line(line: bytes) -> Header | Receipt | Gap:
    """`RecordError` says what is wrong with a line that is damaged or of another kind."""
    try:
        entry = _LINES.decode(line)
    except (msgspec.ValidationError, AttributeError) as error:
        raise RecordError(f"it is not a line of a record: {str(error)[:200]}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise RecordError("it is truncated or not JSON") from None
    if not isinstance(entry, Header):
        return entry
    if entry.format != FORMAT:
        raise RecordError(f"format {entry.format!r}; this version reads format {FORMAT}")
    if entry.check != entry.digest():
        raise RecordError("it was changed after it was written")
    return with_fields(entry, check="")


def with_content(receipt: Receipt, source: Receipt) -> Receipt:
    """A receipt that has hashes only, with the request of another one that was asked the same."""
    assert receipt.asked == source.asked
    return with_fields(receipt, prompt=source.prompt, params=source.params, grammar=source.grammar)


def float_bits(value: float) -> int:
    """The 32 bits of a value of fp32."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits


def _params_digest(params: Mapping[str, Any]) -> str:
    return _digest(_canonical({**params, "seed": None}))


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
