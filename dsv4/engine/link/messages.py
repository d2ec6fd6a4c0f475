"""Messages between an engine and its clients: MessagePack, each after its length in four bytes. Nothing is unpickled.

    client -> engine   Submit, Cancel, Finish, Record, Control
    engine -> client   Hello once, then Step (at most one a step and client), Reply; a rank's engine: Load

A client names its requests by numbers of its own (handles). Tokens of a step are two arrays, whatever their number;
rare parts (log-probabilities, starts, ends) come beside them. No torch.
"""

import struct
from array import array
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from dsv4 import errors
from dsv4.engine.request import DeadlinePassed, RequestAborted, RequestFailed, WeightsIncomplete
from dsv4.engine.stats import EngineStats
from dsv4.errors import Dsv4Error
from dsv4.replay import ReplayLog, Rows
from dsv4.request import RequestError, SamplingParams, TokenLogprobs

_LENGTH = struct.Struct("<I")
MAX_MESSAGE_BYTES = 1 << 30
LAST_HANDLE = 2**31 - 1  # handles travel as int32
_ID_BYTES = 4


class EngineBusy(Dsv4Error, RuntimeError):
    """The queue is full; try again later."""


class EngineStopped(RequestAborted):
    """The engine takes no more requests, or did not finish this one: it is shutting down, or has."""


class EngineLost(RequestAborted):
    """The engine's process has died or does not answer."""


class ControlFailed(Dsv4Error, RuntimeError):
    """A command to the engine failed with an error that has no class of its own."""


class RejectedGrammar(RequestError):
    """The engine cannot enforce the request's grammar; the text says why."""


# ---- from a client ----


class Submit(msgspec.Struct, tag=0, array_like=True):
    """Requests `first`, `first` + 1, ...: request i continues prompt `owners[i]` (int32 ids) under `params[i]`. All
    follow `grammar`, whose text must be able to go on after the ids `opening`. `name` is what `abort` knows them by.
    They have waited for `waited` seconds already."""

    first: int
    prompts: list[bytes]
    owners: list[int]
    params: list[SamplingParams]
    grammar: str | None = None
    opening: list[int] = []
    name: str = ""
    waited: float = 0.0

    @property
    def handles(self) -> range:
        return range(self.first, self.first + len(self.params))

    def check(self) -> None:
        """`ValueError` for a message that no client of ours sends."""
        if not self.params or self.first < 0 or self.handles[-1] > LAST_HANDLE:
            raise ValueError(f"handles must be from 0 to {LAST_HANDLE}, found {len(self.params)} from {self.first}")
        if len(self.owners) != len(self.params) or not all(0 <= one < len(self.prompts) for one in self.owners):
            raise ValueError(f"{len(self.params)} requests and {len(self.prompts)} prompts, found owners {self.owners}")
        if any(len(prompt) % _ID_BYTES for prompt in self.prompts):
            raise ValueError("a prompt must be ids of four bytes each")


class Cancel(msgspec.Struct, tag=1, array_like=True):
    """Abort these requests: their clients have gone."""

    handles: list[int]


class Finish(msgspec.Struct, tag=2, array_like=True):
    """The text of these is complete (a stop string was found)."""

    handles: list[int]


class Record(msgspec.Struct, tag=4, array_like=True):
    """A line for the engine's record of answers."""

    payload: bytes


class Control(msgspec.Struct, tag=5, array_like=True):
    """A question or a command (`EngineControl`), answered by `Reply` between two steps."""

    number: int
    verb: str
    arguments: dict[str, Any] = {}


# ---- from the engine ----


class EngineInfo(msgspec.Struct, frozen=True):
    """What clients must know of an engine before they send it anything. It comes again when the weights change.

    fingerprint   checkpoint, numerics, kernels and processor in one word
    records       "": nothing is recorded; "whole", or "hashes": what `Record` lines hold. The engine keeps them
    expert_bytes, pick_bytes
                  what a token's routed experts and its picks (`ReplayLog`) take at most, engine and JSON included
    """

    fingerprint: str
    vocab_size: int
    eos_token_id: int
    max_context_tokens: int
    num_slots: int
    num_blocks: int
    records: Literal["", "whole", "hashes"] = ""
    weight_version: str = "0"
    expert_bytes: int = 0
    pick_bytes: int = 0

    def replay_bytes(self, asked: Mapping[str, Any]) -> int:
        """Of a token, by the fields of `SamplingParams`."""
        return (
            asked.get("routed_experts", False) * self.expert_bytes + asked.get("indexer_topk", False) * self.pick_bytes
        )


class Hello(msgspec.Struct, tag=10, array_like=True):
    info: EngineInfo


class PackedLogprobs(msgspec.Struct, array_like=True):
    """Tokens with their log-probabilities: int32 and float32 arrays [N], then [N, num_top] of the likeliest."""

    token_ids: bytes
    chosen: bytes
    num_top: int
    top_ids: bytes
    top: bytes


class PackedRows(msgspec.Struct, array_like=True):
    """An array of whole numbers [N, layers, k]."""

    data: bytes
    dtype: str
    shape: list[int]


class Replay(msgspec.Struct, array_like=True):
    """What a request's tokens from number `position` on were computed with (`ReplayLog`)."""

    handle: int
    position: int
    experts: PackedRows | None = None
    picks: PackedRows | None = None


class Start(msgspec.Struct, array_like=True):
    """A request's prompt has been read; once more where the weights change under it (`Completion.weight_versions`).
    `admitted_seconds`: the clock when it got a slot."""

    handle: int
    num_cached: int
    prompt_logprobs: PackedLogprobs | None = None
    weight_versions: list[tuple[int, str]] = []
    admitted_seconds: float = 0.0


class End(msgspec.Struct, array_like=True):
    """A request is over: `kind` is a finish reason, or the kind of the error that `text` describes."""

    handle: int
    kind: str
    text: str = ""
    field: str | None = None


class Step(msgspec.Struct, tag=11, array_like=True):
    """What happened since the last one. `seconds` is the clock (`time.perf_counter`) at the end of the step."""

    seconds: float
    handles: bytes
    token_ids: bytes
    accepted: list[int] = []
    starts: list[Start] = []
    logprobs: list[tuple[bytes, PackedLogprobs]] = []  # of these rows; those that list as many tokens together
    ends: list[End] = []
    replays: list[Replay] = []


class Load(msgspec.Struct, tag=13, array_like=True):
    """How much room an engine has, and which prefixes it has got or lost since it said so last: keys, one after the
    other. `num_tokens`: that requests which run have yet to feed. `stats`: where they are new."""

    num_waiting: int
    num_free_slots: int
    num_free_blocks: int
    num_tokens: int
    added: bytes = b""
    removed: bytes = b""
    stats: EngineStats | None = None


class Reply(msgspec.Struct, tag=12, array_like=True):
    """An answer, or the name of an error and its text."""

    number: int
    payload: bytes = b""
    error: str = ""
    text: str = ""
    field: str | None = None


ToEngine = Submit | Cancel | Finish | Record | Control
FromEngine = Hello | Step | Load | Reply
_ENCODER = msgspec.msgpack.Encoder()
TO_ENGINE = msgspec.msgpack.Decoder(ToEngine)
FROM_ENGINE = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    """The message, after its length."""
    body = _ENCODER.encode(message)
    return _LENGTH.pack(len(body)) + body


def pack_reply(number: int, value: Any) -> Reply:
    return Reply(number, _ENCODER.encode(value))


class Frames:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[memoryview]:
        """The bodies that are complete now. Use each before the next is asked for."""
        held = self._held
        held += data
        start = 0
        while len(held) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(held, start)
            if length > MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of {length} bytes; at most {MAX_MESSAGE_BYTES} are read")
            end = start + _LENGTH.size + length
            if end > len(held):
                break
            with memoryview(held) as view, view[start + _LENGTH.size : end] as body:
                yield body
            start = end
        del held[:start]


# ---- values ----


def free_handles(start: int, count: int, used: Container[int]) -> int:
    """The first of `count` handles in a row that are not in use, from `start` on; behind the last one, from 0."""
    first = start
    while True:
        if first + count - 1 > LAST_HANDLE:
            first = 0
        taken = next((handle for handle in range(first + count - 1, first - 1, -1) if handle in used), None)
        if taken is None:
            return first
        first = taken + 1


def pack_ids(token_ids: Sequence[int]) -> bytes:
    return array("i", token_ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    return array("i", data).tolist()


def pack_logprobs(scored: Sequence[TokenLogprobs]) -> PackedLogprobs:
    """Exact: log-probabilities are float32 numbers. All list as many likeliest tokens as the first."""
    num_top = len(scored[0].top) if scored else 0
    top = [pair for one in scored for pair in one.top]
    return PackedLogprobs(
        pack_ids([one.token_id for one in scored]),
        array("f", [one.logprob for one in scored]).tobytes(),
        num_top,
        pack_ids([token_id for token_id, _ in top]),
        array("f", [logprob for _, logprob in top]).tobytes(),
    )


def unpack_logprobs(packed: PackedLogprobs) -> list[TokenLogprobs]:
    chosen = array("f", packed.chosen).tolist()
    ids, values = unpack_ids(packed.top_ids), array("f", packed.top).tolist()
    pairs, num_top = list(zip(ids, values, strict=True)), packed.num_top
    return [
        TokenLogprobs(token_id, chosen[row], tuple(pairs[row * num_top : (row + 1) * num_top]))
        for row, token_id in enumerate(unpack_ids(packed.token_ids))
    ]


def pack_rows(rows: "Rows | None") -> PackedRows | None:
    return None if rows is None else PackedRows(rows.tobytes(), str(rows.dtype), list(rows.shape))


def unpack_rows(packed: PackedRows | None) -> "Rows | None":
    import numpy as np  # see replay.py

    return None if packed is None else np.frombuffer(packed.data, dtype=packed.dtype).reshape(packed.shape)


class Answered(Protocol):
    """What a client keeps of an answer: a `TextOutput`, or a `Request`."""

    num_cached_tokens: int
    admitted_seconds: float
    weight_versions: list[tuple[int, str]]
    prompt_logprobs: list[TokenLogprobs | None]
    replay: ReplayLog | None


def begin(answer: Answered, start: Start) -> None:
    answer.num_cached_tokens, answer.admitted_seconds = start.num_cached, start.admitted_seconds
    answer.weight_versions = start.weight_versions
    if start.prompt_logprobs is not None:
        answer.prompt_logprobs = [None, *unpack_logprobs(start.prompt_logprobs)]


def add_replay(answer: Answered, replay: Replay) -> None:
    if answer.replay is not None:
        answer.replay.add(replay.position, unpack_rows(replay.experts), unpack_rows(replay.picks))


def logprobs_by_row(step: Step) -> dict[int, TokenLogprobs]:
    found: dict[int, TokenLogprobs] = {}
    for rows, packed in step.logprobs:
        found.update(zip(unpack_ids(rows), unpack_logprobs(packed), strict=True))
    return found


_ERRORS: dict[str, type[Exception]] = {
    "failed": RequestFailed, "expired": DeadlinePassed, "aborted": RequestAborted, "busy": EngineBusy,
    "stopped": EngineStopped, "lost": EngineLost, "invalid": RequestError, "grammar": RejectedGrammar,
    "incomplete": WeightsIncomplete,
}  # fmt: skip
_KINDS = {error: kind for kind, error in _ERRORS.items()}


def end_of(handle: int, error: Exception) -> End:
    kind = next(_KINDS[one] for one in type(error).__mro__ if one in _KINDS)
    return End(handle, kind, str(error), getattr(error, "field", None))


def error_of(end: End) -> Exception | None:
    """Why a request has no result; None if it ended well."""
    error = _ERRORS.get(end.kind)
    if error is None:
        return None
    return error(end.text, field=end.field) if issubclass(error, RequestError) else error(end.text)


# errors of commands that arrive as what they were; any other is a `ControlFailed`
_COMMAND_ERRORS = ("CheckpointError", "ConfigError", "RequestError", "RequestAborted", "WeightsIncomplete")


def pack_error(number: int, error: BaseException) -> Reply:
    kinds = [one.__name__ for one in type(error).__mro__ if one.__name__ in _COMMAND_ERRORS]
    text = str(error) if kinds else f"{type(error).__name__}: {error}"
    return Reply(number, b"", kinds[0] if kinds else "ControlFailed", text, getattr(error, "field", None))


def error_in(reply: Reply) -> Exception | None:
    """What went wrong, if something did."""
    if not reply.error:
        return None
    kind = getattr(errors, reply.error) if reply.error in _COMMAND_ERRORS else ControlFailed
    return kind(reply.text, field=reply.field) if kind is RequestError else kind(reply.text)
