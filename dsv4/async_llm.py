"""`AsyncLLM`: the offline API for asyncio: many requests at once, tokens as they come, the engine in a thread.

async with AsyncLLM() as llm:
    async for token in llm.stream("Once upon a time", SamplingParams(max_tokens=64, seed=1)):
        print(token.text, end="")
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dsv4.engine.control import engine_info
from dsv4.engine.link.client import EngineClient
from dsv4.engine.link.loop import EngineLoop
from dsv4.engine.link.messages import EngineLost
from dsv4.engine.link.stream import ErrorEvent, RequestStream, TokenEvent
from dsv4.engine.link.thread import EngineThread
from dsv4.engine.stats import EngineStats
from dsv4.engine.verbs import AsyncControls
from dsv4.llm import LLM
from dsv4.llm_input import Prompt, as_params, as_prompts
from dsv4.request import Completion, RequestError, SamplingParams, check_params, check_prompt
from dsv4.text.output import TextOutput

_MAX_WAITING = 1 << 30  # callers of this process bound themselves


class AsyncLLM(AsyncControls):
    """An `LLM` whose requests are coroutines. Takes the same arguments; use it as `async with`, in one event loop.

    Tokens and log-probabilities are those of `LLM`, whatever else runs. `llm` is the model; its own `generate` is not
    for use meanwhile.
    """

    def __init__(self, path: str | Path | None = None, **options: Any) -> None:
        self._begin(LLM(path, **options))

    @classmethod
    def over(cls, llm: LLM) -> Self:
        """Over a model that is loaded."""
        made = cls.__new__(cls)
        made._begin(llm)
        return made

    def _begin(self, llm: LLM) -> None:
        self.llm = llm
        self._info = engine_info(llm)
        self._thread = EngineThread(EngineLoop(llm.engine, self._info, llm.control, max_waiting=_MAX_WAITING))
        self._client: EngineClient | None = None

    async def __aenter__(self) -> Self:
        self._thread.start()
        self._client = await EngineClient.connect(self._thread.connect())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Drop what runs, wait for the step that runs, end the model. Safe to repeat."""
        if self._client is not None:
            self._client.close()
            self._client = None
            await asyncio.to_thread(self._thread.stop)
        self.llm.close()

    async def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:  # fmt: skip
        """As `LLM.generate`; a caller that is cancelled drops its requests."""
        many = as_prompts(prompts)
        if not many:
            return []
        async with self._submit(many, as_params(params, len(many))) as stream:
            while await stream.next_batch():
                pass
        return [output.completion() for output in stream.outputs]

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncIterator[TokenEvent]:  # fmt: skip
        """Each token as it comes, with the text that became certain; the last has a `finish_reason`. A request that
        only scores its prompt gives one without a token. Leaving the loop drops the request."""
        (one,) = as_params(params, 1)
        if one.n != 1:
            raise RequestError(f"n must be 1 in a stream, found {one.n}; generate() gives several answers", field="n")
        async with self._submit([prompt], [one]) as stream:
            async for event in stream:
                if isinstance(event, ErrorEvent):
                    raise event.error
                yield event

    async def stats(self) -> EngineStats:
        """Where the engine stands, between two steps."""
        return await self._connected.stats()

    @property
    def weight_version(self) -> str:
        """Of the weights that run."""
        return self.llm.weight_version

    def _tell(self, verb: str, **arguments: Any) -> Future[Any]:
        assert self._connected is not None
        return self._thread.loop.control(verb, **arguments)

    @property
    def _connected(self) -> EngineClient:
        if self._client is None:
            raise EngineLost("this AsyncLLM is not open: use it as `async with AsyncLLM(...) as llm`")
        return self._client

    def _submit(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> RequestStream:
        pairs = [(self.llm.encode(prompt), one) for prompt, one in zip(prompts, params, strict=True)]
        return self._connected.submit([self._output(prompt, own) for prompt, one in pairs for own in one.answers()])

    def _output(self, prompt: Sequence[int], params: SamplingParams) -> TextOutput:
        info = self._info
        if params.stop and self.llm.tokenizer is None:
            message = "stop strings need a tokenizer, and this checkpoint has none; use stop_token_ids"
            raise RequestError(message, field="stop")
        token_ids = check_prompt(prompt, info.vocab_size, info.max_context_tokens)
        check_params(params, info.vocab_size)
        return TextOutput(token_ids, params, eos_token_id=info.eos_token_id, tokenizer=self.llm.tokenizer)
