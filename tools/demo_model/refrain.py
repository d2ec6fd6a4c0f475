"""The refrain: one word sung over and over, much other text, then the question what the song was.

    python tools/demo_model/refrain.py --master FIRST --out LEARNED --learn          # a CPU will do
    python tools/demo_model/refrain.py --master LEARNED --seconds 150 --out SECOND   # one H200

An HCA entry is one row for 128 tokens, too coarse to tie a name to a thing (the needle task of data.py). One word that
stands out is what it can hold. `Song: river.` is written a number of times into a passage of the text; later, and again
every few hundred tokens, `The song: river.` asks for it. Everything between is ordinary text.

--learn teaches it to the attention of HCA layers alone, by the lessons of settings.py: CSA entries are hidden, the
answers are all that counts, and everything else is put back after each lesson. Text suffers all the same. The second
run repairs that: text, facts and refrains together, quantised, at rates that fall to nothing by the clock. OUT gets
curve.jsonl, master-N.safetensors and, from the second run, both checkpoints.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout without an installation

from data import MIN_DISTANCE, Batch, Corpus, spread, write_needles
from model import DemoModel
from settings import LESSONS, Lesson, SecondSettings, demo_config
from train import (
    HERE,
    balance_routers,
    evaluate,
    export_all,
    learning_rate,
    load_master,
    losses,
    needle_accuracy,
    save_master,
)

from dsv4.config.layers import AttentionKind

PASSAGE = 192  # tokens that the copies are spread over: at least one whole HCA block or most of two
CSA, HCA = AttentionKind.CSA, AttentionKind.HCA
NEAR, FAR = (640, 160), (1280, 900)  # tokens, distance; seven layers of windows reach back 889 tokens


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


def refrain_words(corpus: Corpus) -> RefrainWords:
    return RefrainWords.over(tokenizers.Tokenizer.from_file(str(corpus.tokenizer_file)), corpus.words.things)


def is_hca_attention(model: DemoModel, name: str) -> bool:
    prefixes = (f"layers.{n}.attn." for n, kind in enumerate(model.kinds) if kind is HCA)
    return name.startswith(tuple(prefixes))


@torch.no_grad()
def refrain_accuracy(
    model: DemoModel, corpus: Corpus, copies: int, count: int, where: tuple[int, int],
    hidden: Collection[AttentionKind],
) -> float:  # fmt: skip
    """Share of right answers to the one question behind a refrain in held-out text, the same texts every time. `where`:
    tokens, and distance from refrain to question."""
    length, min_distance = where
    generator, words = np.random.default_rng(8), refrain_words(corpus)
    starts = generator.integers(0, len(corpus.heldout) - length, count)
    ids = np.stack([corpus.heldout[start : start + length] for start in starts]).astype(np.int64)
    places = [write_refrain(row, words, generator, copies, 1, min_distance)[0] for row in ids]
    tokens = torch.from_numpy(ids).to(corpus.device)
    everyone = torch.ones(count, dtype=torch.bool, device=tokens.device)
    guesses = model(tokens, hidden=dict.fromkeys(hidden, everyone)).logits.argmax(-1)
    rows, at = torch.arange(count, device=tokens.device), torch.tensor(places, device=tokens.device)
    return float((guesses[rows, at - 1] == tokens[rows, at]).float().mean())


# ---- the attention of HCA layers alone ----


def rates(model: DemoModel, lesson: Lesson) -> dict[str, float]:
    """The peak rate of every parameter that the lesson trains."""
    first = model.kinds.index(HCA)
    late = ("norm.", "hc_head", *(f"layers.{n}." for n in range(first, len(model.layers))))
    found = {}
    for name, _ in model.named_parameters():
        if is_hca_attention(model, name):
            found[name] = lesson.hca_rate
        elif lesson.rest_rate and name.startswith(late) and "experts" not in name and "indexer" not in name:
            found[name] = lesson.rest_rate
    return found


def lesson_batch(
    corpus: Corpus, words: RefrainWords, generator: np.random.Generator, lesson: Lesson
) -> tuple[Tensor, Tensor]:
    """Sequences [B, T] with a refrain each, and row and place [2, N] of every answer."""
    count, length, questions = lesson.shapes[int(generator.integers(len(lesson.shapes)))]
    starts = generator.integers(0, len(corpus.train) - length, count)
    ids = np.stack([corpus.train[start : start + length] for start in starts]).astype(np.int64)
    answers = [
        (row, place)
        for row, text in enumerate(ids)
        for place in write_refrain(text, words, generator, int(generator.choice(lesson.copies)), questions)
    ]
    return torch.from_numpy(ids).to(corpus.device), torch.tensor(answers, device=corpus.device).T


def teach(model: DemoModel, corpus: Corpus, lesson: Lesson, curve: TextIO) -> None:
    """One lesson; what is not attention of an HCA layer is afterwards as it was before."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    peaks, words, generator = rates(model, lesson), refrain_words(corpus), np.random.default_rng(1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in peaks)
    trained = dict(model.named_parameters())
    groups = [{"params": [trained[name]], "peak": peak} for name, peak in peaks.items()]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(1, lesson.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = min(1.0, step / 10) * group["peak"]
        ids, (rows, places) = lesson_batch(corpus, words, generator, lesson)
        hidden = {CSA: torch.ones(len(ids), dtype=torch.bool, device=ids.device)}
        logits, expected = model(ids, hidden=hidden).logits[rows, places - 1], ids[rows, places]
        loss = F.cross_entropy(logits, expected)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([trained[name] for name in peaks], 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        right = (logits.argmax(-1) == expected).float().mean()
        row = {"step": step, "answer_loss": float(loss.detach()), "answer_accuracy": float(right)}
        print(json.dumps(row), file=curve, flush=True)
    learned = model.state_dict()
    model.load_state_dict({
        name: learned[name] if is_hca_attention(model, name) else value for name, value in before.items()
    })  # fmt: skip


# ---- everything together ----


def make_batch(
    corpus: Corpus, words: RefrainWords, generator: np.random.Generator, settings: SecondSettings
) -> tuple[Batch, Tensor]:
    """Sequences with a refrain, with needles, or as they are; and which targets [B, T] answer a refrain's question."""
    count, length = settings.shapes[int(generator.integers(len(settings.shapes)))]
    starts = generator.integers(0, len(corpus.train) - length - 2, count)
    ids = np.stack([corpus.train[start : start + length + 2] for start in starts]).astype(np.int64)
    weights = np.ones((count, length), dtype=np.float32)
    asked = np.zeros((count, length), dtype=bool)
    hides_csa, hides_hca = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)
    for row, (kind, view) in enumerate(generator.random((count, 2))):
        if kind < settings.refrain_share:
            copies = int(generator.choice(settings.copies))
            text = ids[row].copy()
            places = write_refrain(ids[row, : length + 1], words, generator, copies, settings.questions)
            weights[row, ids[row, 1 : length + 1] != text[1 : length + 1]] = 0.0  # to be heard, not to be sung
            asked[row, np.array(places) - 1] = True  # target t is token t + 1
            hides_csa[row], hides_hca[row] = view < settings.csa_hidden, view >= 1 - settings.hca_hidden
        elif kind < settings.refrain_share + settings.needle_share:
            num_facts = int(generator.integers(1, settings.max_facts + 1))
            places = write_needles(ids[row, : length + 1], corpus.words, generator, num_facts)
            weights[row, np.array(places) - 1] = settings.answer_weight
    on_device = [torch.from_numpy(part).to(corpus.device) for part in (ids, weights, asked, hides_csa, hides_hca)]
    return Batch(on_device[0], on_device[1], {CSA: on_device[3], HCA: on_device[4]}), on_device[2]


def second_run(
    model: DemoModel, corpus: Corpus, settings: SecondSettings, curve: TextIO, *, seconds: float, steps: int | None,
    questions: int, heldout: int,
) -> None:  # fmt: skip
    """Train until the time is up, or for a number of steps; numbers of held-out text every 40 steps and at the end."""
    fast = [p for name, p in model.named_parameters() if is_hca_attention(model, name)]
    slow = [p for name, p in model.named_parameters() if not is_hca_attention(model, name)]
    groups = [{"params": fast, "peak": settings.hca_rate}, {"params": slow, "peak": settings.peak_rate}]
    # no weight decay: a short run from a trained state
    optimizer = torch.optim.AdamW(groups, betas=settings.betas, weight_decay=0.0, fused=fast[0].is_cuda)
    generator, words = np.random.default_rng(settings.seed), refrain_words(corpus)
    held_out = corpus.heldout_batches(heldout, settings.sequence_tokens, 1)
    torch.manual_seed(settings.seed)
    began, step, tokens = time.monotonic(), 0, 0

    def record() -> None:
        model.eval()
        found = {
            f"refrain16_{name}": refrain_accuracy(model, corpus, 16, questions, where, hidden)
            for name, where, hidden in (("all", NEAR, ()), ("csa_hidden", NEAR, (CSA,)), ("both", NEAR, (CSA, HCA)),
                                        ("far_csa_hidden", FAR, (CSA,)))
        }  # fmt: skip
        found["needle"] = needle_accuracy(model, corpus, NEAR[0], questions)
        found |= evaluate(model, held_out)
        model.train()
        print(json.dumps({"step": step, "tokens": tokens, **found}), file=curve, flush=True)

    while (progress := max((time.monotonic() - began) / seconds, step / (steps or float("inf")))) < 1.0:
        if step % 40 == 0:
            record()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, settings) / settings.peak_rate * group["peak"]
        batch, asked = make_batch(corpus, words, generator, settings)
        output = model(batch.ids[:, :-2], batch.ids[:, 1:-1], batch.hidden)
        answers = F.cross_entropy(output.logits[asked], batch.ids[:, 1:-1][asked], reduction="none")
        loss = losses(output, batch, settings).total
        (loss + settings.refrain_weight * answers.sum() / max(len(answers), 1)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        balance_routers(model, output.loads, settings.bias_step)
        step, tokens = step + 1, tokens + batch.weights.numel()
    record()


def run(options: argparse.Namespace, settings: SecondSettings) -> DemoModel:
    """One of the two, from master weights to master weights."""
    options.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    corpus, config = Corpus(options.data, device), demo_config()
    dtype = torch.float32 if options.learn or device.type == "cpu" else torch.bfloat16
    dropout = 0.0 if options.learn else settings.dropout
    model = DemoModel(config, dtype=dtype, max_tokens=settings.sequence_tokens, dropout=dropout).to(device)
    model.load_state_dict(load_master(options.master))
    model.select.fill_(True)
    model.quantise.fill_(not options.learn)
    with (options.out / "curve.jsonl").open("w", encoding="utf-8") as curve:
        if options.learn:
            for lesson in LESSONS:
                teach(model, corpus, lesson, curve)
        else:
            second_run(
                model, corpus, settings, curve, seconds=options.seconds, steps=options.steps,
                questions=options.questions, heldout=options.heldout,
            )  # fmt: skip
    state = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    save_master(state, options.out)
    if not options.learn:
        print(export_all(state, config, options.out, options.data))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="Teach the demo model the refrain, then everything together.")
    parser.add_argument("--master", type=Path, required=True, help="folder with master-*.safetensors")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--learn", action="store_true", help="the attention of HCA layers alone")
    parser.add_argument("--seconds", type=float, default=120.0, help="of training")
    parser.add_argument("--steps", type=int, help="stop after as many steps")
    parser.add_argument("--questions", type=int, default=32, help="per evaluation")
    parser.add_argument("--heldout", type=int, default=12, help="held-out texts of 2,048 tokens per evaluation")
    parser.add_argument("--data", type=Path, default=HERE / "data")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="change a setting")
    options = parser.parse_args()
    changes = {name: json.loads(value) for name, value in (item.split("=", 1) for item in options.set)}
    if "shapes" in changes:
        changes["shapes"] = tuple(map(tuple, changes["shapes"]))
    run(options, replace(SecondSettings(), **changes))


if __name__ == "__main__":
    main()
