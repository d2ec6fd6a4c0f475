"""`AnswerReader`: what every interface to a chat wants to know of one choice while its tokens come."""

import secrets
from collections.abc import Sequence
from typing import Any, Literal

from dsv4.engine.link.stream import TokenEvent
from dsv4.http.apis.fields import SamplingFields
from dsv4.http.apis.request_builder import Job
from dsv4.request import FinishReason
from dsv4.text.parse import Event, StreamParser, ToolCallEnd

FinishWord = Literal["stop", "length", "tool_calls", "abort"]


class AnswerReader:
    """Reasoning, content and calls as they become certain; tokens by kind; why it ended."""

    def __init__(self, thinking: bool) -> None:
        self._parser = StreamParser(thinking)
        self._has_complete_call = False
        self.num_tokens = 0
        self.num_reasoning = 0
        self.finish: FinishWord | None = None

    def take(self, event: TokenEvent) -> list[Event]:
        """What becomes certain with this token; often nothing inside a tag."""
        parser = self._parser
        if event.token_id is not None:
            self.num_tokens += 1
            self.num_reasoning += parser.is_reasoning
        events = parser.feed(event.text)
        if event.finish_reason is not None:
            events += parser.finish()
        for one in events:
            if type(one) is ToolCallEnd and one.is_complete:
                self._has_complete_call = True
        if event.finish_reason is not None:
            ended: FinishWord = "tool_calls" if self._has_complete_call else "stop"
            early: dict[FinishReason, FinishWord] = {FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}
            self.finish = early.get(event.finish_reason, ended)
        return events


def usage_of(job: Job, num_written: int, num_reasoning: int = 0) -> dict[str, Any]:
    """Tokens read, and these written, so far: the fields of `Usage`. A prompt with several answers counts once."""
    return {
        "prompt_tokens": job.num_prompt_tokens,
        "completion_tokens": num_written,
        "total_tokens": job.num_prompt_tokens + num_written,
        "prompt_tokens_details": {"cached_tokens": job.num_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": num_reasoning},
    }


def usage_of_chat(job: Job, readers: Sequence[AnswerReader]) -> dict[str, Any]:
    """The same, by the readers of a job's choices."""
    return usage_of(job, sum(one.num_tokens for one in readers), sum(one.num_reasoning for one in readers))


def new_id(prefix: str, asked: SamplingFields | None = None) -> str:
    """An answer's id: the request's own where it has one."""
    given = None if asked is None else asked.request_id or asked.rid
    return prefix + (given or secrets.token_hex(12))
