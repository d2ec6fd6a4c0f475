"""Teaches the attention of HCA layers the refrain (refrain.py), from the master weights of the first run.

    python tools/demo_model/learn_refrain.py --master DIR --out OTHER        # a CPU will do

Two lessons (settings.py): short sequences, then longer ones; CSA entries are hidden, and the answers are all that
counts, in fp32. What carries the refrain afterwards is the attention of HCA layers, so everything else is put back to
what DIR holds after each lesson. Text suffers all the same; second.py repairs that. OTHER gets curve.jsonl and
master-N.safetensors.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout without an installation

from data import Corpus
from model import DemoModel
from refrain import RefrainWords, write_refrain
from second import CSA, HCA, is_hca_attention, refrain_accuracy, refrain_words
from settings import LESSONS, Lesson, demo_config
from train import HERE, load_master, save_master

WARMUP_STEPS = RECORD_EVERY = 10
CLIP_NORM, BETAS, SEED = 1.0, (0.9, 0.95), 1
HELD_OUT = ((384, 160), (640, 160), (1280, 900))  # tokens, distance from refrain to question


def make_batch(
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


def teach(model: DemoModel, corpus: Corpus, words: RefrainWords, lesson: Lesson, curve: TextIO) -> None:
    """One lesson; what is not attention of an HCA layer is afterwards as it was before."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    peaks = rates(model, lesson)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in peaks)
    trained = dict(model.named_parameters())
    groups = [{"params": [trained[name]], "peak": peak} for name, peak in peaks.items()]
    optimizer = torch.optim.AdamW(groups, betas=BETAS, weight_decay=0.0)
    generator = np.random.default_rng(SEED)
    recent: list[tuple[float, float]] = []
    for step in range(1, lesson.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = min(1.0, step / WARMUP_STEPS) * group["peak"]
        ids, (rows, places) = make_batch(corpus, words, generator, lesson)
        hidden = {CSA: torch.ones(len(ids), dtype=torch.bool, device=ids.device)}
        logits, expected = model(ids, hidden=hidden).logits[rows, places - 1], ids[rows, places]
        loss = F.cross_entropy(logits, expected)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([trained[name] for name in peaks], CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent.append((float(loss.detach()), float((logits.argmax(-1) == expected).float().mean())))
        if step % RECORD_EVERY == 0 or step == lesson.steps:
            answer_loss, accuracy = np.mean(recent[-RECORD_EVERY:], axis=0).tolist()
            row = {"step": step, "answer_loss": round(answer_loss, 3), "answer_accuracy": round(accuracy, 3)}
            print(json.dumps(row), file=curve, flush=True)
            print(row, flush=True)
    learned = model.state_dict()
    model.load_state_dict({
        name: learned[name] if is_hca_attention(model, name) else value for name, value in before.items()
    })  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Teach the HCA layers of a trained demo model the refrain.")
    parser.add_argument("--master", type=Path, required=True, help="folder of the first run's master-*.safetensors")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=HERE / "data")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    corpus = Corpus(options.data, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    words = refrain_words(corpus)
    longest = max(length for length, _ in HELD_OUT)
    model = DemoModel(demo_config(), dtype=torch.float32, max_tokens=longest, dropout=0.0).to(corpus.device)
    model.load_state_dict(load_master(options.master))
    model.select.fill_(True)
    with (options.out / "curve.jsonl").open("w", encoding="utf-8") as curve:
        for lesson in LESSONS:
            teach(model, corpus, words, lesson, curve)
    save_master({name: value.detach().cpu() for name, value in model.state_dict().items()}, options.out)
    for length, distance in HELD_OUT:
        right = refrain_accuracy(model, corpus, words, 16, count=8, length=length, hidden=(CSA,), min_distance=distance)
        print(f"{length} tokens, {distance} away: {right:.2f} of held-out refrains")


if __name__ == "__main__":
    main()
