"""Trains a DSpark head for the shipped miniature, which stays as it is, and exports it.

    python tools/demo_model/own_text.py --seconds 90 --out OWN
    python tools/demo_model/learn_drafts.py --own OWN --seconds 120 --out DIR

What the head needs of the model, the taps and what the vocabulary is projected from, is computed once for every
sequence: the model's own continuations (own_text.py) and text. The head learns the model's distribution of the tokens
behind many anchors; a row counts by how often drafts reach it. On a GPU a step is one CUDA graph. Progress is wall
time, as in train.py. DIR gets curve.jsonl (as it goes), and at the end summary.json, the unquantised weights
(head.safetensors) and flash-mini-dspark, the folder that ships.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout without an installation

from draft_head import Anchors, DraftHead
from export import export_head, shipped_state
from model import DemoModel
from own_text import PROMPT_TOKENS, TEMPERATURES, TOKENS, own_file
from settings import HeadSettings, head_config
from train import HERE, learning_rate

from dsv4.config import ModelConfig
from dsv4.loader.shipped import shipped_checkpoint

RESERVE_S = 8.0  # the last evaluation and the export
WARM_STEPS = 3  # before a step is captured


# ---- what is learned ----


def shared_rates(target: Tensor, draft: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities [..., V] and tokens [...] that the target drew -> the probability [...] that the draft, drawn
    with the same Gumbel noise, is the same token: the engine's rule of acceptance at temperature 1.

    Both choose x if the noise of x beats that of every j by the larger of the two ratios to x, so P(both x) is
    1 / sum_j max(p_j / p_x, q_j / q_x).
    """
    at = tokens.unsqueeze(-1)
    target_at, draft_at = target.gather(-1, at), draft.gather(-1, at)
    both = -torch.logsumexp(torch.maximum(target - target_at, draft - draft_at), -1)
    return torch.exp(both - target_at.squeeze(-1)).clamp(max=1.0)


def reach(rates: Tensor) -> Tensor:
    """[R, g] -> the probability that all drafts before each row are accepted."""
    return torch.cat((torch.ones_like(rates[:, :1]), rates[:, :-1]), 1).cumprod(1)


@dataclass(frozen=True)
class Lessons:
    """Sequences with all that a head needs of them: ids [N, T]; taps [N, T, taps * D]; last [N, T, D], what the
    vocabulary is projected from."""

    ids: Tensor
    taps: Tensor
    last: Tensor

    def take(self, rows: Tensor) -> Lessons:
        return Lessons(self.ids[rows], self.taps[rows], self.last[rows])


@torch.no_grad()
def make_lessons(
    model: DemoModel, ids: np.ndarray, tapped: tuple[int, ...], *, batch: int, device: torch.device
) -> Lessons:
    """The model over ids [N, T], some sequences at a time."""
    tokens = torch.from_numpy(ids.astype(np.int64)).to(device)
    taps, last = [], []  # and nothing else: the logits of all sequences would be many
    for part in tokens.split(batch):
        output = model(part, tapped=tapped)
        taps.append(output.taps)
        last.append(output.last)
    return Lessons(tokens, torch.cat(taps), torch.cat(last))


@dataclass(frozen=True)
class HeadLoss:
    """total to be differentiated; the others are means over all rows, rates [g] by place."""

    total: Tensor
    divergence: Tensor
    rates: Tensor
    confidence: Tensor
    loads: Tensor


def head_loss(
    head: DraftHead, model: DemoModel, lessons: Lessons, anchors: Anchors, settings: HeadSettings
) -> HeadLoss:
    """KL divergence from the model's distribution and what is not accepted, by row; confidences towards acceptance."""
    size, ids = head.dspark.block_size, lessons.ids
    with torch.no_grad():
        target = model.head.wide_linear(anchors.gather(lessons.last, size), model.dtype).log_softmax(-1)  # [R, g, V]
        drawn = (target - torch.empty_like(target).exponential_().log()).argmax(-1)
    blocks = head(model, lessons.taps, ids, anchors)
    logits, confidence = head.follow(blocks, anchors.gather(ids, size))
    draft = logits.log_softmax(-1)
    divergence = (target.exp() * (target - draft)).sum(-1)  # [R, g]
    rates = shared_rates(target, draft, drawn)
    with torch.no_grad():
        reached = reach(shared_rates(target, draft, anchors.gather(ids, size, offset=1)))
        weights = settings.least_weight + (1 - settings.least_weight) * reached
        weights = weights / weights.sum()
    sure = F.binary_cross_entropy_with_logits(confidence, rates.detach(), reduction="none")
    terms = divergence + settings.rate_weight * (1 - rates) + settings.confidence_weight * sure
    means = divergence.detach().mean(), rates.detach().mean(0), sure.detach().mean()
    return HeadLoss((weights * terms).sum(), *means, blocks.loads)


@torch.no_grad()
def acceptance(
    head: DraftHead, model: DemoModel, lessons: Lessons, anchors: Anchors, temperature: float
) -> tuple[list[float], list[float]]:
    """Share of drafts accepted with all before them, by place, and the mean confidence there. At temperature 0 drafts
    are chosen and compared with the sequences; otherwise by `shared_rates` along them."""
    size, ids = head.dspark.block_size, lessons.ids
    blocks = head(model, lessons.taps, ids, anchors)
    following = anchors.gather(ids, size, offset=1)
    logits, confidence = head.follow(blocks, anchors.gather(ids, size))
    if temperature == 0:
        right = head.greedy_drafts(blocks, ids[anchors.rows, anchors.positions]) == following
        survived = right.float().cumprod(1)
    else:
        target = model.head.wide_linear(anchors.gather(lessons.last, size), model.dtype)
        survived = shared_rates(*(x.div(temperature).log_softmax(-1) for x in (target, logits)), following).cumprod(1)
    return survived.mean(0).tolist(), torch.sigmoid(confidence).cumprod(1).mean(0).tolist()


# ---- a run ----


class HeadRun:
    """Model, head, optimizer, clock and files."""

    def __init__(self, options: argparse.Namespace, settings: HeadSettings) -> None:
        self.started = time.monotonic()
        self.out, self.settings = options.out, settings
        self.out.mkdir(parents=True, exist_ok=True)
        self.max_steps: int = options.steps or sys.maxsize
        self.end = self.started + options.seconds - min(RESERVE_S, options.seconds / 3)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(settings.seed)
        torch.set_float32_matmul_precision("high")
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.base: Path = options.base
        base = ModelConfig.from_pretrained(self.base)
        self.model = DemoModel(base, dtype=dtype, max_tokens=TOKENS).to(self.device).eval()
        self.model.load_state_dict(shipped_state(self.base))
        self.model.requires_grad_(False)
        self.model.select.fill_(True)
        self.model.quantise.fill_(True)
        config = head_config(base, num_layers=settings.num_layers, markov_rank=settings.markov_rank)
        self.head = DraftHead(config, dtype=dtype).to(self.device)
        self.head.start_from(self.model)
        self.generator = np.random.default_rng(settings.seed)
        self._read_lessons(options.own, options.data)
        self.optimizer = self._make_optimizer()
        self.captures = self.device.type == "cuda" and not options.eager
        count = settings.batch_sequences
        self.rows = torch.zeros(count, dtype=torch.int64, device=self.device)
        self.places = self._choose_places(self.generator, self.lessons, count, settings.anchors)
        self.curve = (self.out / "curve.jsonl").open("w", encoding="utf-8")
        self.steps = 0
        self.last: dict[str, Any] = {}
        self.ready = time.monotonic()

    def _read_lessons(self, own: Path, data: Path) -> None:
        """Own continuations by temperature, held-out ones apart, and text of the same length."""
        settings, generator = self.settings, self.generator

        def lessons(ids: np.ndarray) -> Lessons:
            tapped, batch = self.head.dspark.target_layer_ids, 2 * settings.batch_sequences
            return make_lessons(self.model, ids, tapped, batch=batch, device=self.device)

        found = {part: _own_text(own, part) for part in ("train", "heldout")}
        self.heldout = {name: lessons(ids) for name, ids in found["heldout"].items()}
        length = next(iter(found["train"].values())).shape[1]
        text = np.fromfile(data / "train.bin", dtype=np.uint16)
        starts = generator.integers(0, len(text) - length, settings.text_sequences)
        written = np.concatenate(list(found["train"].values()))
        read = np.stack([text[start : start + length] for start in starts])
        self.num_own = len(written)
        self.lessons = lessons(np.concatenate((written, read)))

    def _make_optimizer(self) -> torch.optim.AdamW:
        """Weight decay on matrices only, as in train.py. On a GPU the rate is a tensor that a captured step reads."""
        parameters = list(self.head.named_parameters())
        decayed = [p for name, p in parameters if p.dim() > 1 and "hc_" not in name]
        others = [p for name, p in parameters if p.dim() <= 1 or "hc_" in name]
        settings, is_cuda = self.settings, self.device.type == "cuda"
        groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.rate = torch.tensor(settings.peak_rate, device=self.device)
        return torch.optim.AdamW(groups, lr=self.rate, betas=settings.betas, fused=is_cuda, capturable=is_cuda)

    @property
    def progress(self) -> float:
        by_time = (time.monotonic() - self.ready) / max(self.end - self.ready, 1e-3)
        return max(by_time, self.steps / self.max_steps)

    def train(self) -> None:
        step = self._captured() if self.captures else self._update
        next_evaluation = time.monotonic() + self.settings.evaluate_every_s
        while (progress := self.progress) < 1.0:
            self._prepare(progress)
            loss = step()
            self.steps += 1
            if self.steps % 100 == 0:
                self._record({
                    "progress": round(progress, 4), "loss": float(loss.total.detach()),
                    "divergence": float(loss.divergence), "confidence_loss": float(loss.confidence),
                    "rates": _rounded(loss.rates.tolist()),
                })  # fmt: skip
            if time.monotonic() >= next_evaluation:
                self.evaluate()
                next_evaluation = time.monotonic() + self.settings.evaluate_every_s
        self.evaluate()

    def _prepare(self, progress: float) -> None:
        """Rate, rounding, and which sequences and anchors the next step looks at, where a captured step reads them."""
        settings, generator = self.settings, self.generator
        self.head.quantise.fill_(progress >= settings.quantise_from)
        self.rate.fill_(learning_rate(progress, settings))
        (count, num_anchors), num_all = self.places.shape, len(self.lessons.ids)
        own, text = generator.integers(0, self.num_own, count), generator.integers(self.num_own, num_all, count)
        self.rows.copy_(torch.from_numpy(np.where(generator.random(count) < settings.own_share, own, text)))
        self.places.copy_(self._choose_places(generator, self.lessons, count, num_anchors))

    def _choose_places(self, generator: np.random.Generator, lessons: Lessons, rows: int, count: int) -> Tensor:
        """Positions of anchors [rows, count], different in a row: behind the prompt, with a whole block to follow."""
        end = lessons.ids.shape[1] - self.head.dspark.block_size
        order = generator.random((rows, end - PROMPT_TOKENS)).argsort(1)
        return torch.from_numpy(PROMPT_TOKENS + order[:, :count]).to(self.device)

    def _update(self) -> HeadLoss:
        settings, head = self.settings, self.head
        lessons = self.lessons.take(self.rows)
        loss = head_loss(head, self.model, lessons, _anchors(self.places), settings)
        self.optimizer.zero_grad(set_to_none=True)
        loss.total.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), settings.clip_norm)
        self.optimizer.step()
        with torch.no_grad():
            for block, load in zip(head.mtp, loss.loads.float(), strict=True):
                block.ffn.gate.bias += settings.bias_step * torch.sign(load.mean() - load)
        return loss

    def _captured(self) -> Callable[[], HeadLoss]:
        """A step as one CUDA graph."""
        self._prepare(0.0)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_STEPS):
                self._update()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self._update()

        def replay() -> HeadLoss:
            graph.replay()
            return loss

        return replay

    def evaluate(self) -> None:
        """Own continuations of held-out prompts, as the finished head will run."""
        generator = np.random.default_rng(7)
        quantises = self.head.quantise.clone()
        self.head.quantise.fill_(True)
        for temperature, lessons in self.heldout.items():
            anchors = _anchors(self._choose_places(generator, lessons, len(lessons.ids), 64))
            accepted, confident = acceptance(self.head, self.model, lessons, anchors, temperature)
            self.last[f"temperature {temperature}"] = {
                "accepted": _rounded(accepted), "confident": _rounded(confident),
                "tokens_per_step": round(1 + sum(accepted), 3),
            }  # fmt: skip
        self.head.quantise.copy_(quantises)
        self._record(self.last)

    def _record(self, values: dict[str, Any]) -> None:
        row = {"step": self.steps, "seconds": round(time.monotonic() - self.started, 1), **values}
        if not math.isfinite(row.get("loss", 0.0)):
            raise ValueError(f"training diverged: {row}")
        self.curve.write(json.dumps(row) + "\n")
        self.curve.flush()
        print(json.dumps(row), flush=True)

    def save(self) -> int:
        """summary.json, the unquantised weights, and the checkpoint; returns its bytes."""
        num_all, length = self.lessons.ids.shape
        summary = {
            "steps": self.steps, "anchors": self.steps * self.places.numel(),
            "setup_seconds": self.ready - self.started, "train_seconds": time.monotonic() - self.ready,
            "parameters": sum(p.numel() for p in self.head.parameters()), "measured": self.last,
            "own_tokens": self.num_own * (length - PROMPT_TOKENS), "text_tokens": (num_all - self.num_own) * length,
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
            "torch": torch.__version__, "settings": asdict(self.settings),
        }  # fmt: skip
        (self.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        state = {name: value.detach().cpu() for name, value in self.head.state_dict().items()}
        master = {name: w if ".gate.bias" in name else w.to(torch.bfloat16) for name, w in state.items()}
        save_file({name: weight.contiguous() for name, weight in master.items()}, self.out / "head.safetensors")
        return export_head(state, self.head.config, self.out / "flash-mini-dspark", self.base)


def _anchors(places: Tensor) -> Anchors:
    """places [B, A] -> every anchor with its sequence."""
    rows = torch.arange(len(places), device=places.device).repeat_interleave(places.shape[1])
    return Anchors(rows, places.flatten())


def _own_text(folder: Path, part: str) -> dict[float, np.ndarray]:
    files = {temperature: own_file(folder, part, temperature) for temperature in TEMPERATURES}
    found = {temperature: np.load(file) for temperature, file in files.items() if file.exists()}
    if not found:
        raise ValueError(f"{folder} holds no {part}-*.npy; own_text.py writes them")
    return found


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 4) for value in values]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a DSpark head for the demo model.")
    parser.add_argument("--own", type=Path, default=HERE / "data" / "own", help="folder of own_text.py")
    parser.add_argument("--seconds", type=float, default=120.0, help="wall time from start to end, export included")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=HERE / "data")
    parser.add_argument("--base", type=Path, default=shipped_checkpoint(), help="the model's checkpoint")
    parser.add_argument("--steps", type=int, help="stop after so many steps")
    parser.add_argument("--eager", action="store_true", help="no CUDA graph")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="change a setting")
    options = parser.parse_args()
    changes = {name: json.loads(value) for name, value in (item.split("=", 1) for item in options.set)}
    run = HeadRun(options, replace(HeadSettings(), **changes))
    print(f"lessons after {run.ready - run.started:.1f} s", flush=True)
    run.train()
    print(f"{run.save():,} bytes after {time.monotonic() - run.started:.1f} s, {run.steps} steps")


if __name__ == "__main__":
    main()
