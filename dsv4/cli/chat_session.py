"""`ChatSession`: a conversation with a model in this process: history, streaming turns, saving. No terminal here."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dsv4.llm import LLM
from dsv4.request import FinishReason, RequestError, SamplingParams, new_seed
from dsv4.text.chat import ChatOptions, render_segments
from dsv4.text.parse import Event, StreamParser, parse_completion


@dataclass
class ChatSession:
    """`messages` is the history; each turn of `ask` adds the question and, once it has ended, the answer.

    `seed` None draws another one for every turn. `last_finish` says how the last answer ended, None if it was stopped.
    """

    llm: LLM
    options: ChatOptions
    params: SamplingParams
    seed: int | None = None
    system: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list, init=False)
    last_finish: FinishReason | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.llm.tokenizer is None:
            raise RequestError("this checkpoint has no tokenizer.json; a chat needs one")
        self.reset()

    def reset(self) -> None:
        """Forget the conversation; the system message stays."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def ask(self, text: str) -> Iterator[Event]:
        """The events of one answer. Closing the iterator early ends the answer; the text so far is kept."""
        history = [*self.messages, {"role": "user", "content": text}]
        assert self.llm.tokenizer is not None
        prompt = self.llm.tokenizer.encode_segments(render_segments(history, self.options))
        room = self.llm.cache.limits.max_context_tokens - len(prompt)
        if room < 1:
            raise RequestError(f"the conversation has {len(prompt)} tokens and no room for an answer: /reset it")
        seed = self.seed if self.seed is not None else new_seed()
        params = replace(self.params, seed=seed, max_tokens=min(self.params.max_tokens, room))
        request, output = self.llm.start(prompt, params)
        parser, num_read = StreamParser(self.options.thinking), 0
        try:
            while not output.is_done:
                self.llm.step()
                yield from parser.feed(output.text[num_read:])
                num_read = len(output.text)
            output.completion()  # raises if the request failed
            yield from parser.finish()
        finally:
            self.llm.abort(request)
            self.last_finish = output.finish_reason
            if output.error is None:
                answer = parse_completion(output.text, self.options.thinking).to_message()
                self.messages = [*history, answer]

    def save(self, file: Path) -> None:
        """The conversation as JSON; `dsv4 render` reads it."""
        file.write_text(json.dumps(self.messages, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
