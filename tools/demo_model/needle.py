"""The needle test: a fact, a long stretch of other text, the question. Can the model still answer?

    python tools/demo_model/needle.py --numerics exact --count 16 --length 512
    python tools/demo_model/needle.py --numerics exact --refrain 4 --length 1280 --min-distance 900
    python tools/demo_model/needle.py --numerics exact --perplexity 9

Runs the checkpoint as it ships (through `dsv4.LLM`), then with the CSA entries, the HCA entries, or both hidden from
attention. With both hidden only the sliding window is left, and the answer is a guess. `--refrain N` asks for a word
sung N times instead of a fact; `--perplexity N` gives the perplexity of N contexts of held-out text in each case.

A fact (`Alice has the river.`) ties a name to a thing, one token each. An HCA entry is one row for 128 tokens, too
coarse for that; what it can hold is one word that stands out: the refrain (`Song: river.`, many times in one passage).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout without an installation

from dsv4.config.layers import AttentionKind
from dsv4.llm import LLM
from dsv4.loader.shipped import shipped_checkpoint, shipped_text
from dsv4.ops.attention import sparse_attention_ref

WORDS_FILE = Path(__file__).parent / "results" / "needle_words.json"
NUM_NAMES, NUM_THINGS = 48, 64
MIN_DISTANCE = 160  # more than the 128-token window and the few tokens of a fact
PASSAGE = 192  # tokens that the copies of a refrain are spread over: at least one whole HCA block or most of two
CONTEXT, LATE = 2048, 256  # from token 256 on there is more behind the window than in it
COMPRESSED = (AttentionKind.CSA, AttentionKind.HCA)
VARIANTS: dict[str, tuple[AttentionKind, ...]] = {
    "nothing hidden": (),
    "CSA entries hidden": (AttentionKind.CSA,),
    "HCA entries hidden": (AttentionKind.HCA,),
    "both hidden": COMPRESSED,
}


def hide_entries(llm: LLM, kinds: Collection[AttentionKind] = COMPRESSED) -> LLM:
    """The same model and weights, its layers of these kinds blind to compressed entries. `llm` is left as it is."""

    def partly_blind(
        q: Tensor, rows: Any, window: Any, entries: Any, picks: Any, sink: Tensor, batch: Any, **rest: Any
    ) -> Tensor:
        kind = AttentionKind.HCA if picks is None else AttentionKind.CSA  # only CSA layers pick
        if kind in kinds:
            entries = picks = None
        return sparse_attention_ref(q, rows, window, entries, picks, sink, batch, **rest)

    return LLM.from_params(
        llm.config, llm.model.weights, numerics=llm.numerics, dtype=llm.model.context.dtype, engine=llm.cache.limits,
        tokenizer=llm.tokenizer, backend=llm.model.context.backend.with_ops(sparse_attention=partly_blind),
    )  # fmt: skip


@dataclass(frozen=True)
class NeedleWords:
    """Token ids: what introduces a fact, one token per name and per thing, and what stands between and after."""

    opening: tuple[int, ...]
    question: tuple[int, ...]
    middle: tuple[int, ...]
    closing: tuple[int, ...]
    names: tuple[int, ...]
    things: tuple[int, ...]

    @classmethod
    def from_words(cls, tokenizer: tokenizers.Tokenizer, names: list[str], things: list[str]) -> NeedleWords:
        """Over words that are one token each after a space; `results/needle_words.json` holds those of the shipped
        models."""
        if len(names) < NUM_NAMES or len(things) < NUM_THINGS:
            raise ValueError(
                f"the vocabulary has {len(names)} names and {len(things)} things; expected {NUM_NAMES} and {NUM_THINGS}"
            )
        vocab = tokenizer.get_vocab(with_added_tokens=False)

        def encode(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

        return cls(
            opening=encode("\n\nRemember:"), question=encode("\n\nAgain:"), middle=encode(" has the"),
            closing=encode("."), names=tuple(vocab["Ġ" + word] for word in names),
            things=tuple(vocab["Ġ" + word] for word in things),
        )  # fmt: skip

    def fact(self, name: int, thing: int) -> list[int]:
        return [*self.opening, self.names[name], *self.middle, self.things[thing], *self.closing]

    def asked(self, name: int, thing: int) -> list[int]:
        return [*self.question, self.names[name], *self.middle, self.things[thing], *self.closing]

    @property
    def answer_offset(self) -> int:
        """Place of the answer token within `asked`."""
        return len(self.question) + 1 + len(self.middle)


def write_needles(
    ids: np.ndarray,
    words: NeedleWords,
    generator: np.random.Generator,
    num_facts: int,
    min_distance: int = MIN_DISTANCE,
) -> list[int]:
    """Write facts into the first part of `ids` and questions about each into the rest, in place.

    Returns the places of the answer tokens. Every question is at least `min_distance` tokens after its fact.
    """
    room = max(len(words.fact(0, 0)), len(words.asked(0, 0)))
    lowest = max(len(ids) // 8, num_facts * room)
    highest = min(len(ids) // 2, len(ids) - min_distance - (num_facts + 1) * room)
    if highest < lowest:
        raise ValueError(f"{num_facts} facts and questions {min_distance} apart do not fit into {len(ids)} tokens")
    split = int(generator.integers(lowest, highest + 1))
    names = generator.choice(NUM_NAMES, num_facts, replace=False)
    things = generator.choice(NUM_THINGS, num_facts, replace=False)
    fact_places = spread(generator, 0, split, num_facts, room)
    first_question = split + min_distance
    ask_places = spread(generator, first_question, len(ids) - room, num_facts, room)
    answers = []
    for place, name, thing in zip(fact_places, names, things, strict=True):
        tokens = words.fact(int(name), int(thing))
        ids[place : place + len(tokens)] = tokens
    for place, fact in zip(ask_places, generator.permutation(num_facts), strict=True):
        tokens = words.asked(int(names[fact]), int(things[fact]))
        ids[place : place + len(tokens)] = tokens
        answers.append(int(place) + words.answer_offset)
    return answers


def spread(generator: np.random.Generator, start: int, end: int, count: int, room: int) -> np.ndarray:
    """`count` places in [start, end), `room` apart at least, in ascending order."""
    slack = end - start - count * room
    assert slack >= 0, (start, end, count, room)
    return start + np.sort(generator.integers(0, slack + 1, count)) + room * np.arange(count)


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


def needle_prompts(
    filler: np.ndarray, words: NeedleWords, count: int, length: int, seed: int = 0, min_distance: int = MIN_DISTANCE
) -> list[tuple[list[int], int]]:
    """`count` prompts that end right before the answer, each with the answer's id."""
    generator = np.random.default_rng(seed)
    prompts = []
    for start in generator.integers(0, len(filler) - length, count):
        ids = filler[start : start + length].astype(np.int64)
        place = write_needles(ids, words, generator, 1, min_distance)[0]
        prompts.append((ids[:place].tolist(), int(ids[place])))
    return prompts


def shipped_needles(count: int, length: int, *, min_distance: int = MIN_DISTANCE) -> list[tuple[list[int], int]]:
    """Prompts for the shipped checkpoints: their words, over text they never saw."""
    _, words, filler = _shipped()
    return needle_prompts(filler, words, count, length, min_distance=min_distance)


def shipped_refrains(
    count: int, length: int, copies: int, *, min_distance: int = MIN_DISTANCE
) -> list[tuple[list[int], int]]:
    """Prompts that ask the shipped checkpoints for the word of a refrain sung `copies` times."""
    tokenizer, words, filler = _shipped()
    refrain = RefrainWords.over(tokenizer, words.things)
    generator = np.random.default_rng(0)
    prompts = []
    for start in generator.integers(0, len(filler) - length, count):
        ids = filler[start : start + length].copy()
        place = write_refrain(ids, refrain, generator, copies, 1, min_distance)[0]
        prompts.append((ids[:place].tolist(), int(ids[place])))
    return prompts


def _shipped() -> tuple[tokenizers.Tokenizer, NeedleWords, np.ndarray]:
    """Tokenizer and words of the shipped checkpoints, and the ids of text they never saw."""
    tokenizer = tokenizers.Tokenizer.from_file(str(shipped_checkpoint() / "tokenizer.json"))
    lists = json.loads(WORDS_FILE.read_text(encoding="utf-8"))
    words = NeedleWords.from_words(tokenizer, lists["names"], lists["things"])
    text = shipped_text().read_text(encoding="utf-8")
    return tokenizer, words, np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)


def accuracy(llm: LLM, prompts: list[tuple[list[int], int]]) -> float:
    """Share of prompts whose most likely next token is the answer."""
    right = [int(llm.logits(prompt)[-1].argmax()) == answer for prompt, answer in prompts]
    return sum(right) / len(right)


def late_losses(llm: LLM, token_ids: list[int], contexts: int) -> Tensor:
    """float64 [contexts, n]: loss (nats) of every token from LATE on, in contexts of CONTEXT tokens side by side."""
    rows = []
    for start in range(0, contexts * CONTEXT, CONTEXT):
        piece = torch.tensor(token_ids[start : start + CONTEXT])
        log_probs = llm.logits(piece.tolist())[LATE:-1].double().log_softmax(-1)
        rows.append(-log_probs.gather(-1, piece[LATE + 1 :].unsqueeze(-1)).squeeze(-1))
    return torch.stack(rows)


def print_perplexities(llm: LLM, contexts: int) -> None:
    """Of each variant, with the mean difference of loss from the variant above it and its standard error."""
    token_ids = llm.encode(shipped_text().read_text(encoding="utf-8"))
    if not 1 <= contexts <= len(token_ids) // CONTEXT:
        raise ValueError(f"--perplexity must be from 1 to {len(token_ids) // CONTEXT}, found {contexts}")
    losses = {name: late_losses(hide_entries(llm, kinds), token_ids, contexts) for name, kinds in VARIANTS.items()}
    for name, found in losses.items():
        print(f"{name:20} {found.mean().exp():.3f}")
    for first, second in (
        *(("nothing hidden", name) for name in list(VARIANTS)[1:]),
        ("CSA entries hidden", "both hidden"),
    ):
        change = (losses[second] - losses[first]).flatten()
        error = change.std() / change.numel() ** 0.5
        print(f"{first} -> {second}: {change.mean():+.4f} +- {error:.4f} nats")


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a demo model for facts beyond its sliding window.")
    parser.add_argument("--model", type=Path, default=shipped_checkpoint())
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--length", type=int, default=512, help="tokens of fact, filler and question")
    parser.add_argument("--min-distance", type=int, default=MIN_DISTANCE, help="tokens from fact to question")
    parser.add_argument("--refrain", type=int, metavar="N", help="instead of a fact: a word sung N times")
    parser.add_argument("--numerics", choices=("official", "exact"), default="official")
    parser.add_argument(
        "--perplexity", type=int, metavar="N", help="instead: perplexity of N contexts of held-out text"
    )
    options = parser.parse_args()
    llm = LLM(options.model, numerics=options.numerics)
    if options.perplexity is not None:
        print_perplexities(llm, options.perplexity)
        return
    if options.refrain is not None:
        prompts = shipped_refrains(options.count, options.length, options.refrain, min_distance=options.min_distance)
    else:
        prompts = shipped_needles(options.count, options.length, min_distance=options.min_distance)
    for name, kinds in VARIANTS.items():
        print(f"{name:20} {accuracy(hide_entries(llm, kinds) if kinds else llm, prompts):.2f}", flush=True)


if __name__ == "__main__":
    main()
