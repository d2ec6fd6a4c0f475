"""The second training run: text, facts and refrains together, so that the whole model knows the refrain.

    python tools/demo_model/second.py --master DIR --seconds 150 --out OTHER

DIR holds what learn_refrain.py left: HCA layers that carry a refrain, in a model that has forgotten how to write.
Everything is trained, quantised, at rates that fall to nothing. Progress is wall time, as in train.py. OTHER gets
curve.jsonl (as it goes), and at the end, or when the process is asked to terminate, the last state: flash-mini.tar,
flash-mini-nvfp4.tar, master-N.safetensors and summary.json.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Collection
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout without an installation

from data import Batch, Corpus, write_needles
from model import DemoModel
from refrain import RefrainWords, write_refrain
from settings import SecondSettings, demo_config
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

RESERVE_S = 25.0  # the last evaluation and the export
EVALUATE_EVERY, MASTER_EVERY_S = 40, 45.0
CSA, HCA = AttentionKind.CSA, AttentionKind.HCA
VIEWS: dict[str, tuple[AttentionKind, ...]] = {
    "all": (),
    "csa_hidden": (CSA,),
    "hca_hidden": (HCA,),
    "both": (CSA, HCA),
}
LENGTHS = {"near": (640, 160), "far": (1280, 900)}  # tokens, distance; seven layers of windows reach back 889 tokens


def refrain_words(corpus: Corpus) -> RefrainWords:
    return RefrainWords.over(tokenizers.Tokenizer.from_file(str(corpus.tokenizer_file)), corpus.words.things)


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


def is_hca_attention(model: DemoModel, name: str) -> bool:
    prefixes = (f"layers.{n}.attn." for n, kind in enumerate(model.kinds) if kind is HCA)
    return name.startswith(tuple(prefixes))


def make_optimizer(model: DemoModel, settings: SecondSettings) -> torch.optim.AdamW:
    """Two groups, the attention of HCA layers first. No weight decay: a short run from a trained state."""
    fast = [p for name, p in model.named_parameters() if is_hca_attention(model, name)]
    slow = [p for name, p in model.named_parameters() if not is_hca_attention(model, name)]
    groups = [{"params": fast, "peak": settings.hca_rate}, {"params": slow, "peak": settings.peak_rate}]
    return torch.optim.AdamW(groups, betas=settings.betas, weight_decay=0.0, fused=fast[0].is_cuda)


@torch.no_grad()
def refrain_accuracy(
    model: DemoModel, corpus: Corpus, words: RefrainWords, copies: int, *, count: int, length: int,
    hidden: Collection[AttentionKind], min_distance: int = 160,
) -> float:  # fmt: skip
    """Share of right answers to the one question behind a refrain in held-out text, the same texts every time."""
    generator = np.random.default_rng(8)
    starts = generator.integers(0, len(corpus.heldout) - length, count)
    ids = np.stack([corpus.heldout[start : start + length] for start in starts]).astype(np.int64)
    places = [write_refrain(row, words, generator, copies, 1, min_distance)[0] for row in ids]
    tokens = torch.from_numpy(ids).to(corpus.device)
    everyone = torch.ones(count, dtype=torch.bool, device=tokens.device)
    guesses = model(tokens, hidden=dict.fromkeys(hidden, everyone)).logits.argmax(-1)
    rows, at = torch.arange(count, device=tokens.device), torch.tensor(places, device=tokens.device)
    return float((guesses[rows, at - 1] == tokens[rows, at]).float().mean())


class SecondRun:
    """Model, optimizer, clock and files."""

    def __init__(self, options: argparse.Namespace, settings: SecondSettings) -> None:
        self.started = time.monotonic()
        self.out, self.data = options.out, options.data
        self.out.mkdir(parents=True, exist_ok=True)
        self.end = self.started + options.seconds - min(RESERVE_S, options.seconds / 3)
        self.max_steps: int = options.steps or sys.maxsize
        self.settings, self.questions = settings, options.questions
        self.is_stopped = False
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.set_float32_matmul_precision("high")
        self.corpus = Corpus(options.data, device)
        self.words = refrain_words(self.corpus)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = DemoModel(
            demo_config(), dtype=dtype, max_tokens=settings.sequence_tokens, dropout=settings.dropout
        ).to(device)
        self.model.load_state_dict(load_master(options.master))
        self.model.select.fill_(True)
        self.model.quantise.fill_(True)
        self.optimizer = make_optimizer(self.model, settings)
        self.heldout = self.corpus.heldout_batches(options.heldout, settings.sequence_tokens, 1)
        self.curve = (self.out / "curve.jsonl").open("w", encoding="utf-8")
        self.last: dict[str, float] = {}
        self.recent: list[Tensor] = []
        self.steps = self.tokens = 0
        self.generator = np.random.default_rng(settings.seed)
        torch.manual_seed(settings.seed)

    def train(self) -> None:
        self._evaluate()
        began = saved = time.monotonic()
        while not self.is_stopped:
            by_time = (time.monotonic() - began) / max(self.end - began, 1e-3)
            progress = max(by_time, self.steps / self.max_steps)
            if progress >= 1.0:
                break
            self._step(learning_rate(progress, self.settings) / self.settings.peak_rate)
            if self.steps % EVALUATE_EVERY == 0:
                self._evaluate()
            if time.monotonic() - saved >= MASTER_EVERY_S:
                save_master(self.state(), self.out)
                saved = time.monotonic()

    def _step(self, share: float) -> None:
        """One update at `share` of the peak rates."""
        model, settings = self.model, self.settings
        for group in self.optimizer.param_groups:
            group["lr"] = share * group["peak"]
        batch, asked = make_batch(self.corpus, self.words, self.generator, settings)
        output = model(batch.ids[:, :-2], batch.ids[:, 1:-1], batch.hidden)
        answers = F.cross_entropy(output.logits[asked], batch.ids[:, 1:-1][asked], reduction="none")
        loss = losses(output, batch, settings)
        total = loss.total + settings.refrain_weight * answers.sum() / max(len(answers), 1)
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        balance_routers(model, output.loads, settings.bias_step)
        with torch.no_grad():  # loss and accuracy of the answers that no CSA entry can give
            without_csa = (asked & batch.hidden[CSA].unsqueeze(1))[asked]
            right = (output.logits[asked].argmax(-1) == batch.ids[:, 1:-1][asked])[without_csa].float().mean()
            row = torch.stack((total.detach(), loss.text.detach(), answers.detach()[without_csa].mean(), right))
            self.recent = [*self.recent, row][-20:]
        self.steps += 1
        self.tokens += batch.weights.numel()

    def _recent(self) -> list[float]:
        """Loss, text loss, and loss and accuracy of answers without CSA, over the last steps."""
        return torch.stack(self.recent).nanmean(0).tolist()

    def _evaluate(self) -> dict[str, float]:
        """Held-out numbers as the finished model will run."""
        values: dict[str, float] = {}
        if self.recent:
            values = dict(zip(("loss", "text_loss", "answer_loss", "answer_accuracy"), self._recent(), strict=True))
        self.model.eval()
        near, far = LENGTHS["near"], LENGTHS["far"]
        for name in ("all", "csa_hidden", "both"):
            values[f"refrain16_{name}"] = self._refrain(16, VIEWS[name], *near)
        values["refrain8_csa_hidden"] = self._refrain(8, (CSA,), *near)
        values["refrain16_far_csa_hidden"] = self._refrain(16, (CSA,), *far)
        values["needle"] = needle_accuracy(self.model, self.corpus, 640, self.questions)
        values["perplexity"] = evaluate(self.model, self.heldout)["heldout_perplexity"]
        self.model.train()
        self._record(values)
        return values

    def _refrain(self, copies: int, hidden: Collection[AttentionKind], length: int, distance: int) -> float:
        return refrain_accuracy(
            self.model, self.corpus, self.words, copies, count=self.questions, length=length, hidden=hidden,
            min_distance=distance,
        )  # fmt: skip

    def final(self) -> None:
        """Perplexity of more text, and the whole table of the refrain, near and beyond the reach of stacked windows, as
        far as the time allows."""
        self.model.eval()
        length = self.settings.sequence_tokens
        found = evaluate(self.model, self.corpus.heldout_batches(len(self.heldout[0]), length, 4))
        found["needle_accuracy"] = needle_accuracy(self.model, self.corpus, length, self.questions)
        for copies, (where, (tokens, distance)) in product((16, 4, 1, 8, 2), LENGTHS.items()):
            for name, hidden in VIEWS.items():
                if self.is_stopped or time.monotonic() > self.end + RESERVE_S - 5:
                    break
                found[f"refrain{copies}_{where}_{name}"] = self._refrain(copies, hidden, tokens, distance)
        self.last = found
        self._record(found)

    def _record(self, values: dict[str, float]) -> None:
        row = {
            "step": self.steps, "tokens": self.tokens,
            "seconds": round(time.monotonic() - self.started, 1),
            **{name: round(value, 4) for name, value in values.items()},
        }  # fmt: skip
        self.curve.write(json.dumps(row) + "\n")
        self.curve.flush()
        print(" ".join(f"{name} {value}" for name, value in row.items()), flush=True)

    def state(self) -> dict[str, Tensor]:
        return {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}

    def save(self) -> None:
        """Master weights and both checkpoints, before anything that could take too long."""
        state = self.state()
        save_master(state, self.out)
        print(export_all(state, self.model.config, self.out, self.data, {}), flush=True)

    def write_summary(self, first: dict[str, Any]) -> None:
        """The first run's summary with this run's numbers in it, and what this run was."""
        second = {
            "steps": self.steps, "tokens": self.tokens, "seconds": time.monotonic() - self.started,
            "settings": asdict(self.settings), "measured": self.last, "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        }  # fmt: skip
        best = {name: self.last.get(name, value) for name, value in first["best"].items()}
        summary = first | {"best": best, "second": second}
        (self.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model with refrains among its text.")
    parser.add_argument("--master", type=Path, required=True, help="folder with master-*.safetensors")
    parser.add_argument("--seconds", type=float, default=150.0, help="wall time from start to end, export included")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=HERE / "data")
    parser.add_argument("--steps", type=int, help="stop after so many steps")
    parser.add_argument("--questions", type=int, default=32, help="per evaluation")
    parser.add_argument("--heldout", type=int, default=12, help="held-out texts of 2,048 tokens per evaluation")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="change a setting")
    options = parser.parse_args()
    changes = {name: json.loads(value) for name, value in (item.split("=", 1) for item in options.set)}
    lists = {
        name: tuple(map(tuple, v)) if name == "shapes" else tuple(v)
        for name, v in changes.items()
        if isinstance(v, list)
    }
    run = SecondRun(options, replace(SecondSettings(), **(changes | lists)))

    def stop(*_: object) -> None:
        run.is_stopped = True

    signal.signal(signal.SIGTERM, stop)
    run.train()
    run.save()
    run.final()
    run.write_summary(json.loads((HERE / "results" / "summary.json").read_text(encoding="utf-8")))
    print(f"done after {time.monotonic() - run.started:.1f} s")


if __name__ == "__main__":
    main()
