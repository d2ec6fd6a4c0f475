"""Training batches: random stretches of the corpus, some of them turned into needle tasks.

A needle task writes short facts (`Alice has the river.`) over the text and asks for them again much later, farther than
the sliding window reaches, so that only compressed entries can carry the answer. Facts are one token each for name and
thing; the answer is the token after ` the`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tokenizers
import torch
from torch import Tensor

from dsv4.config.layers import AttentionKind

NUM_NAMES, NUM_THINGS = 48, 64
MIN_DISTANCE = 160  # more than the 128-token window and the few tokens of a fact


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
    def choose(cls, tokenizer: tokenizers.Tokenizer, counts: list[int]) -> NeedleWords:
        """The most frequent one-token words, capitalised for names, lower case for things; deterministic."""
        vocab = tokenizer.get_vocab(with_added_tokens=False)
        by_use = sorted(vocab, key=lambda token: (-counts[vocab[token]], vocab[token]))
        words = [token[1:] for token in by_use if token.startswith("Ġ") and token[1:].isascii() and token[1:].isalpha()]
        names = [word for word in words if len(word) >= 4 and word.istitle()][:NUM_NAMES]
        things = [word for word in words if len(word) >= 4 and word.islower()][100 : 100 + NUM_THINGS]
        return cls.from_words(tokenizer, names, things)

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
class Batch:
    """ids [B, T + 2]: inputs are [:, :-2], targets one and two further. weights [B, T] of the targets. hidden: per kind
    of layer, the sequences [B] its compressed entries are hidden from."""

    ids: Tensor
    weights: Tensor
    hidden: dict[AttentionKind, Tensor] = field(default_factory=dict)


class Corpus:
    """The encoded text of one folder, as written by corpus.py."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        self.meta = meta
        self.device = device
        self.tokenizer_file = folder / "tokenizer.json"
        self.train = np.fromfile(folder / "train.bin", dtype=np.uint16)
        self.heldout = np.fromfile(folder / "heldout.bin", dtype=np.uint16)
        tokenizer = tokenizers.Tokenizer.from_file(str(self.tokenizer_file))
        self.words = NeedleWords.choose(tokenizer, meta["token_counts"])

    def batch(
        self, generator: np.random.Generator, count: int, length: int, needle_share: float, max_facts: int,
        answer_weight: float,
    ) -> Batch:  # fmt: skip
        """`count` random stretches; each becomes a needle task with probability `needle_share`."""
        starts = generator.integers(0, len(self.train) - length - 2, count)
        ids = np.stack([self.train[start : start + length + 2] for start in starts]).astype(np.int64)
        weights = np.ones((count, length), dtype=np.float32)
        for row in np.flatnonzero(generator.random(count) < needle_share):
            for place in write_needles(ids[row], self.words, generator, int(generator.integers(1, max_facts + 1))):
                if 1 <= place <= length:
                    weights[row, place - 1] = answer_weight  # target t is token t + 1
        return Batch(*(torch.from_numpy(part).to(self.device, non_blocking=True) for part in (ids, weights)))

    def heldout_batches(self, count: int, length: int, num_batches: int) -> list[Tensor]:
        """Held-out ids [count, length + 2], side by side, the same every time."""
        size = length + 1
        whole = len(self.heldout) // size - 1
        rows = [self.heldout[i * size : i * size + length + 2].astype(np.int64) for i in range(whole)]
        batches = [rows[start : start + count] for start in range(0, whole, count)][:num_batches]
        return [torch.from_numpy(np.stack(part)).to(self.device) for part in batches if part]


def hash_table(token_counts: list[int], num_experts: int, per_token: int) -> Tensor:
    """int64 [vocab, k]: experts by token id, spread so that each sees about the same share of the corpus."""
    load = [0.0] * num_experts
    table = torch.zeros(len(token_counts), per_token, dtype=torch.int64)
    for token in sorted(range(len(token_counts)), key=lambda token: (-token_counts[token], token)):
        chosen = sorted(range(num_experts), key=lambda expert: (load[expert], (expert + token) % num_experts))
        for place, expert in enumerate(chosen[:per_token]):
            table[token, place] = expert
            load[expert] += token_counts[token] + 1
    return table
