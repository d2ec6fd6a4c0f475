"""`TextOutput`: one request's answer as it comes: token ids, the text they make, log-probabilities, why it ended.

The engine knows token ids only. `LLM`, `AsyncLLM` and the HTTP front ends keep one of these per request, feed it what
the engine drew, and end the request where a stop string is found.
"""

from array import array
from collections.abc import Sequence

from dsv4.replay import ReplayLog, replayed
from dsv4.request import Completion, FinishReason, SamplingParams, TokenLogprobs
from dsv4.text.collected import GrowingText, LogprobList
from dsv4.text.stop import StopBuffer
from dsv4.text.tokenizer import Detokenizer, Tokenizer


class TextOutput:
    """Feed tokens with `take`. Compact: ids are 4 bytes each, log-probabilities arrays, and the text
    is kept once.

    finish_reason      set with the last token: by the engine, or here where a stop string is complete
    error              why the request failed, if it did
    num_cached_tokens  prompt tokens that came from the prefix cache
    admitted_seconds   the engine's clock when the request got its place; 0 where that is not known
    prompt_logprobs    grow as the prompt is read, where they were asked for
    weight_versions    see `Completion`
    replay             grows as tokens are fed, where it was asked for
    """

    def __init__(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, eos_token_id: int, tokenizer: Tokenizer | None
    ) -> None:
        self.prompt_ids = prompt_ids
        self.params = params
        self.token_ids = array("i")
        self.logprobs = LogprobList()
        self.prompt_logprobs: list[TokenLogprobs | None] = [] if params.prompt_logprobs is None else [None]
        self.num_cached_tokens = 0
        self.admitted_seconds = 0.0
        self.weight_versions: list[tuple[int, str]] = []
        self.replay = ReplayLog.of(params)
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        self._eos_token_id = eos_token_id
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._stop = StopBuffer(params.stop) if params.stop else None
        self._text = GrowingText()

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids)

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def text(self) -> str:
        """All the text that is certain."""
        return str(self._text)

    @property
    def stopped_by(self) -> str | int | None:
        """The stop string or stop id that ended it; None for the end of sequence, or another end."""
        if self._stop is not None and self._stop.found is not None:
            return self._stop.found
        if self.finish_reason is not FinishReason.STOP or not self.token_ids:
            return None
        last = self.token_ids[-1]
        return last if last in self.params.stop_token_ids and last != self._eos_token_id else None

    def take(
        self, token_id: int, logprobs: TokenLogprobs | None = None, finish_reason: FinishReason | None = None
    ) -> str:  # fmt: skip
        """The next token; returns the text that became certain with it. `finish_reason`: the engine says it is the
        last one. The text of a token that ends the answer (`STOP`) is not part of it."""
        self.token_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        self.finish_reason = finish_reason
        if self._detokenizer is None:
            return ""
        text = "" if finish_reason is FinishReason.STOP else self._detokenizer.push(token_id)
        if finish_reason is not None:
            text += self._detokenizer.flush()
        if self._stop is not None and len(self.token_ids) >= self.params.min_tokens:  # before, no stop string counts
            text = self._stop.push(text)
            if self._stop.found is not None:
                self.finish_reason = FinishReason.STOP
            elif finish_reason is not None:
                text += self._stop.flush()
        if text:
            self._text.add(text)
        return text

    def end(self, finish_reason: FinishReason) -> str:
        """It ends without another token; returns the text that was held back."""
        self.finish_reason = finish_reason
        text = "" if self._detokenizer is None else self._detokenizer.flush()
        if self._stop is not None:
            text = self._stop.push(text) + self._stop.flush()
        if text:
            self._text.add(text)
        return text

    def completion(self) -> Completion:
        """The result, once done; raises the error of a request that failed."""
        if self.error is not None:
            raise self.error
        assert self.finish_reason is not None, "the request is still running"
        assert self.params.seed is not None, "a request has one"
        return Completion(
            prompt_token_ids=tuple(self.prompt_ids),
            token_ids=tuple(self.token_ids),
            text=None if self._detokenizer is None else self.text,
            finish_reason=self.finish_reason,
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=None if self.params.prompt_logprobs is None else tuple(self.prompt_logprobs),
            num_cached_tokens=self.num_cached_tokens,
            seed=self.params.seed,
            weight_versions=tuple(run for run in self.weight_versions if run[0] < max(1, len(self.token_ids))),
            **replayed(self.replay, len(self.prompt_ids) + len(self.token_ids)),
        )
