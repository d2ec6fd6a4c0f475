"""`AnswerReader`: what every interface to a chat wants to know of one choice while its tokens come."""

from __future__ import annotations

from collections.abc import Sequence

from dsv4.engine.events import EndEvent, TokenEvent
from dsv4.http.apis.request_builder import Job
from dsv4.http.apis.schemas import CompletionDetails, FinishWord, PromptDetails, Usage
from dsv4.text.parse import Event, StreamParser, ToolCallEnd


class AnswerReader:
    """Reasoning, content and calls as they become certain; tokens by kind; why it ended."""

    def __init__(self, thinking: bool) -> None:
        self._parser = StreamParser(thinking)
        self._has_complete_call = False
        self.num_tokens = 0
        self.num_reasoning = 0
        self.finish: FinishWord | None = None

    def take(self, event: TokenEvent | EndEvent) -> list[Event]:
        """What becomes certain with this token; often nothing inside a tag."""
        if event.token_id is not None:
            self.num_tokens += 1
            self.num_reasoning += self._parser.is_reasoning
        events = self._parser.feed(event.text)
        if event.finish_reason is not None:
            events += self._parser.finish()
        self._has_complete_call |= any(isinstance(one, ToolCallEnd) and one.is_complete for one in events)
        if event.finish_reason is not None:
            ended = "tool_calls" if self._has_complete_call else "stop"
            self.finish = "length" if event.finish_reason == "length" else ended  # type: ignore[assignment]
        return events


def usage_of(job: Job, num_written: int, num_reasoning: int = 0) -> Usage:
    """Tokens read, and these written, so far. A prompt with several answers counts once."""
    return Usage(
        prompt_tokens=job.num_prompt_tokens,
        completion_tokens=num_written,
        total_tokens=job.num_prompt_tokens + num_written,
        prompt_tokens_details=PromptDetails(cached_tokens=job.num_cached_tokens),
        completion_tokens_details=CompletionDetails(reasoning_tokens=num_reasoning),
    )


def usage_of_chat(job: Job, readers: Sequence[AnswerReader]) -> Usage:
    """The same, by the readers of a job's choices."""
    return usage_of(job, sum(one.num_tokens for one in readers), sum(one.num_reasoning for one in readers))
