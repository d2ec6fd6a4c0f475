"""The refrain: one word sung over and over, much other text, then the question what the song was.

An HCA entry is one row for 128 tokens, too coarse to tie a name to a thing (the needle task of data.py). One word that
stands out is what it can hold. `Song: river.` is written a number of times into a passage of the text; later, and again
every few hundred tokens, `The song: river.` asks for it. Everything between is ordinary text.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tokenizers
from data import MIN_DISTANCE, spread

PASSAGE = 192  # tokens that the copies are spread over: at least one whole HCA block or most of two


@dataclass(frozen=True)
class RefrainWords:
    """Token ids: what stands before and after the word in a copy and in a question, and the words themselves."""

    copy: tuple[int, ...]
    question: tuple[int, ...]
    closing: tuple[int, ...]
    words: tuple[int, ...]

    @classmethod
    def over(cls, tokenizer: tokenizers.Tokenizer, words: tuple[int, ...]) -> RefrainWords:
        """`words` are ids of one-token words that begin with a space."""

        def encode(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

        return cls(copy=encode("\nSong:"), question=encode("\n\nThe song:"), closing=encode("."), words=words)

    def sung(self, word: int) -> list[int]:
        return [*self.copy, self.words[word], *self.closing]

    def asked(self, word: int) -> list[int]:
        return [*self.question, self.words[word], *self.closing]


def write_refrain(
    ids: np.ndarray, words: RefrainWords, generator: np.random.Generator, copies: int, questions: int,
    min_distance: int = MIN_DISTANCE,
) -> list[int]:  # fmt: skip
    """Write `copies` of one word into a passage of `ids` and up to `questions` questions behind it, in place.

    Returns the places of the answer tokens. The first question is `min_distance` behind the passage at least, and so is
    each from the one before it; the last ones are left out where they do not fit. One fits, or ValueError.
    """
    word = int(generator.integers(len(words.words)))
    sung, asked = words.sung(word), words.asked(word)
    passage = max(PASSAGE, copies * len(sung))
    slack = len(ids) - passage - min_distance - len(asked)
    if slack < 0:
        raise ValueError(f"{copies} copies and a question {min_distance} apart do not fit into {len(ids)} tokens")
    step = min_distance + len(asked)
    questions = min(questions, 1 + slack // step)
    slack -= (questions - 1) * step
    cuts = np.sort(generator.integers(0, slack + 1, questions + 1))  # slack before the passage and between questions
    start = int(cuts[0])
    for place in spread(generator, start, start + passage, copies, len(sung)):
        ids[place : place + len(sung)] = sung
    answers = []
    for number in range(questions):
        place = passage + min_distance + number * step + int(cuts[number + 1])
        ids[place : place + len(asked)] = asked
        answers.append(place + len(words.question))
    return answers
