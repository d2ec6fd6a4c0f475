"""Constraints from grammars, through llguidance: `GrammarCompiler` once per model, `GrammarConstraint` per request.

A grammar is Lark text as llguidance reads it; `<[id]>` in it is a special token. Special tokens match nothing else, so
text rules cannot produce a marker of the protocol. What the grammars are is in `http/grammar/answer.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask_par
from numpy.typing import NDArray

from dsv4.engine.grammar.errors import GrammarError, first_line
from dsv4.engine.step.constraint import Constraint, ConstraintError, Words, pack_tokens
from dsv4.text.protocol import PROTOCOL
from dsv4.text.tokenizer import Tokenizer, TokenizerError


class GrammarCompiler:
    """Compiles grammars for one tokenizer and one vocabulary. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        special_ids = {idx for idx, token in enumerate(tokens) if not token}
        for marker in PROTOCOL.markers:
            try:
                special_ids.add(tokenizer.special_id(marker))
            except TokenizerError:  # a small test tokenizer has only some of them
                continue
        special_ids.add(eos_token_id)
        wrapper = _Vocabulary(tokenizer, tokens, sorted(special_ids), eos_token_id)
        self._grammar_tokens = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(wrapper), n_vocab=vocab_size, eos_token=eos_token_id
        )
        # ids that stand for no text must never be drawn, whatever the grammar
        self._group = GrammarGroup(pack_tokens(np.array([bool(token) for token in tokens])))

    def compile(self, lark: str, opening: Sequence[int] = ()) -> CompiledGrammar:
        """Compile a grammar that was checked (`GrammarChecks`): `GrammarError` with what llguidance says nevertheless,
        or where no token may follow the tokens `opening`."""
        matcher = llguidance.LLMatcher(
            self._grammar_tokens, llguidance.LLMatcher.grammar_from_lark(lark), log_level=0, limits=_limits()
        )
        if matcher.is_error():
            raise GrammarError(first_line(matcher.get_error()))
        compiled = CompiledGrammar(lark, matcher, self._group)
        if not _can_go_on(compiled.constraint(), opening):
            raise GrammarError("no text follows this rule")
        return compiled


class CompiledGrammar:
    """A grammar at its start; every request takes a copy."""

    def __init__(self, lark: str, matcher: llguidance.LLMatcher, group: GrammarGroup) -> None:
        self.lark = lark
        self._matcher = matcher
        self._group = group

    def constraint(self) -> GrammarConstraint:
        return GrammarConstraint(self._matcher, self._group, self.lark)


class GrammarGroup:
    """The constraints of one compiler: their masks are computed together, on several cores, into one array."""

    def __init__(self, has_text: Words) -> None:
        self._has_text = has_text
        self._executor = llguidance.LLExecutor()

    @property
    def num_words(self) -> int:
        return len(self._has_text)

    def allowed(self, rules: Sequence[Constraint], words: Words) -> dict[int, Exception]:
        """See `dsv4.engine.step.constraint.ConstraintGroup`."""
        matchers = [rule.matcher for rule in rules if isinstance(rule, GrammarConstraint)]
        assert len(matchers) == len(rules), "a group has constraints of one compiler"
        fill_next_token_bitmask_par(self._executor, [(one, place) for place, one in enumerate(matchers)], words)
        np.bitwise_and(words, self._has_text, out=words)
        return {place: _failure(matcher) for place, matcher in enumerate(matchers) if matcher.is_error()}


def _failure(matcher: llguidance.LLMatcher) -> ConstraintError:
    return ConstraintError(f"the grammar cannot go on: {first_line(matcher.get_error())}")


class GrammarConstraint:
    """One request's place in a grammar; implements `dsv4.engine.step.constraint.Constraint`. `start` stays as it is.

    source  from which another rank makes the same: the grammar's text, and ids that need no check any more
    """

    def __init__(self, start: llguidance.LLMatcher, group: GrammarGroup, lark: str) -> None:
        self.source: tuple[str, list[int]] = (lark, [])
        self._start = start
        self.matcher = start.deep_copy()
        self.group = group
        self._token_ids: list[int] = []

    def allowed(self) -> Words:
        words: NDArray[np.int32] = np.empty((1, self.group.num_words), dtype=np.int32)
        for error in self.group.allowed([self], words).values():
            raise error
        return words[0]

    def accept(self, token_id: int) -> None:
        self._token_ids.append(token_id)
        if not self.matcher.consume_token(token_id):
            raise ConstraintError(f"the grammar does not allow token {token_id}")

    def rollback(self, count: int) -> None:
        del self._token_ids[len(self._token_ids) - count :]
        matcher = self.matcher
        # a matcher that has failed does not come back, and one at its end does not count an end of sequence
        if matcher.is_error() or matcher.is_stopped() or not matcher.rollback(count):
            self.matcher = self._start.deep_copy()
            self.matcher.consume_tokens(self._token_ids)


def _can_go_on(constraint: GrammarConstraint, opening: Sequence[int]) -> bool:
    try:
        for token_id in opening:
            constraint.accept(token_id)
        return bool(constraint.allowed().any())
    except ConstraintError:
        return False


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], special_ids: list[int], eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = eos_token_id
        self.bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8"))


def _limits() -> llguidance.LLParserLimits:
    """Smaller than the library's: a schema comes from outside, and its errors go back there."""
    return llguidance.LLParserLimits(max_grammar_size=100_000, max_lexer_states=50_000, verbose_errors=False)
