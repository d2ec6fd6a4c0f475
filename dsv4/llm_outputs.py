"""`LLM`'s answers on their way: tokens as events, and a bar of how many are done."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from dsv4.engine.link.stream import TokenEvent
from dsv4.loader.progress import Progress
from dsv4.request import FinishReason, RequestError, TokenLogprobs
from dsv4.text.output import TextOutput


class EventOutput(TextOutput):
    """Keeps each token with the text that it made certain, until it is taken from `events`."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.events: deque[TokenEvent] = deque()

    def take(
        self, token_id: int, logprobs: TokenLogprobs | None = None, finish_reason: FinishReason | None = None
    ) -> str:  # fmt: skip
        text = super().take(token_id, logprobs, finish_reason)
        self.events.append(TokenEvent(0, token_id, text, logprobs, self.finish_reason, time.perf_counter()))
        return text


@contextmanager
def answer_progress(progress: Progress, outputs: Sequence[TextOutput]) -> Iterator[Callable[[], None]]:
    """Yields a function to call after each step."""
    total, start = len(outputs), time.perf_counter()

    def num_done() -> int:
        return sum(output.is_done for output in outputs)

    if progress is False:
        yield lambda: None
    elif progress is True:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (
            TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]:.0f} tokens/s"),
            TimeRemainingColumn(),
        )  # fmt: skip
        with Bar(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=total, speed=0.0)

            def show() -> None:
                seconds = max(time.perf_counter() - start, 1e-9)
                bar.update(task, completed=num_done(), speed=sum(output.num_output for output in outputs) / seconds)

            yield show
    else:
        yield lambda: progress(num_done(), total)


def check_last(messages: Any) -> Any:
    """A conversation whose last message can be answered."""
    last = messages[-1] if isinstance(messages, (list, tuple)) and messages else None
    role = last.get("role") if isinstance(last, Mapping) else "user"  # what is no message is refused with its place
    if role in ("assistant", "system"):
        raise RequestError(f"messages: the last one must be a user or tool message to answer, found {role}")
    return messages
