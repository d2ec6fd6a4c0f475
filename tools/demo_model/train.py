"""Trains the demo model within a time budget and exports it.

    python tools/demo_model/train.py --minutes 8 --out DIR

Progress is wall time: the rate schedule, the switches (selection, quantisation) and the end all follow the clock, so a
run ends in time on any machine. DIR gets curve.jsonl (as it goes) and, now and then and at the end, the best state so
far: flash-mini.tar and flash-mini-nvfp4.tar (checkpoints), master-N.safetensors (unquantised, bf16) and summary.json.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout without an installation

from data import Batch, Corpus, hash_table, write_needles
from export import export_checkpoint
from model import DemoModel, Output
from settings import RateSettings, TrainSettings, demo_config

from dsv4.config import ModelConfig
from dsv4.loader.config_write import ExpertFormat

HERE = Path(__file__).parent
EXPORT_RESERVE_S = 25.0  # the last evaluation and the export
PACK_EVERY_S = 110.0  # between saves of the best state, so that a killed run leaves something
MASTER_FILE_BYTES = 15_000_000
EXPORTS: tuple[tuple[str, ExpertFormat], ...] = (("flash-mini", "mxfp4"), ("flash-mini-nvfp4", "nvfp4"))


@dataclass(frozen=True)
class Loss:
    total: Tensor
    text: Tensor
    mtp: Tensor
    index: Tensor


def losses(output: Output, batch: Batch, settings: TrainSettings) -> Loss:
    """Weighted mean cross entropy, the MTP block's, and the indexer's."""
    text = F.cross_entropy(output.logits.flatten(0, 1), batch.ids[:, 1:-1].flatten(), reduction="none")
    mean = (text * batch.weights.flatten()).sum() / batch.weights.sum()
    mtp = F.cross_entropy(output.mtp_logits.flatten(0, 1), batch.ids[:, 2:].flatten())
    total = mean + settings.mtp_weight * mtp + settings.index_weight * output.index_loss
    return Loss(total, mean.detach(), mtp.detach(), output.index_loss.detach())


def learning_rate(progress: float, settings: RateSettings) -> float:
    """Linear warm-up, then a cosine down to `final_rate_share` of the peak."""
    if progress < settings.warmup_share:
        return settings.peak_rate * max(progress / settings.warmup_share, 0.01)
    along = min((progress - settings.warmup_share) / (1 - settings.warmup_share), 1.0)
    low = settings.final_rate_share
    return settings.peak_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * along)))


def make_optimizer(model: DemoModel, settings: TrainSettings) -> torch.optim.AdamW:
    """Weight decay on matrices only: norms, hyper-connections, sinks and position biases have none."""
    decayed = [p for name, p in model.named_parameters() if p.dim() > 1 and "hc_" not in name and ".ape" not in name]
    ids = {id(p) for p in decayed}
    others = [p for p in model.parameters() if id(p) not in ids]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=settings.peak_rate, betas=settings.betas, fused=fused)


@torch.no_grad()
def balance_routers(model: DemoModel, loads: Tensor, step: float) -> None:
    """Move every router bias a little towards the experts that got fewer tokens than the mean."""
    for block, load in zip([*model.layers, *model.mtp], loads.float(), strict=True):
        if not block.ffn.gate.is_hash:
            block.ffn.gate.bias += step * torch.sign(load.mean() - load)


@torch.no_grad()
def evaluate(model: DemoModel, batches: list[Tensor]) -> dict[str, float]:
    """Held-out perplexity of the main and the MTP head, and the indexer's recall of attention mass."""
    sums = [0.0, 0.0, 0.0]
    for ids in batches:
        output = model(ids[:, :-2], ids[:, 1:-1])
        sums[0] += float(F.cross_entropy(output.logits.flatten(0, 1), ids[:, 1:-1].flatten()))
        sums[1] += float(F.cross_entropy(output.mtp_logits.flatten(0, 1), ids[:, 2:].flatten()))
        sums[2] += float(output.index_recall)
    text, mtp, recall = (value / len(batches) for value in sums)
    return {"heldout_perplexity": math.exp(text), "heldout_mtp_perplexity": math.exp(mtp), "index_recall": recall}


@torch.no_grad()
def needle_accuracy(model: DemoModel, corpus: Corpus, length: int, count: int) -> float:
    """Share of answers (one fact each, beyond the window) whose most likely token is right, on held-out text."""
    generator = np.random.default_rng(7)
    starts = generator.integers(0, len(corpus.heldout) - length, count)
    ids = np.stack([corpus.heldout[start : start + length] for start in starts]).astype(np.int64)
    places = [write_needles(row, corpus.words, generator, 1)[0] for row in ids]
    tokens = torch.from_numpy(ids).to(corpus.device)
    guesses = model(tokens).logits.argmax(-1)
    rows = torch.arange(count, device=tokens.device)
    at = torch.tensor(places, device=tokens.device)
    return float((guesses[rows, at - 1] == tokens[rows, at]).float().mean())


def compile_blocks(model: DemoModel, trial: Batch, settings: TrainSettings, backend: str) -> None:
    """torch.compile every block, by a trial step that changes nothing.

    Blocks of one kind share the compiled code. Evaluation runs them uncompiled: compiling that variant too would take
    longer than it saves.
    """
    for block in [*model.layers, *model.mtp]:
        block.compile(backend=backend, dynamic=False)
    losses(model(trial.ids[:, :-2], trial.ids[:, 1:-1]), trial, settings).total.backward()
    model.zero_grad(set_to_none=True)


@contextmanager
def uncompiled(model: DemoModel) -> Iterator[None]:
    """The blocks as written, in evaluation mode, for the length of a `with`."""
    blocks = [*model.layers, *model.mtp]
    compiled = [block._compiled_call_impl for block in blocks]
    for block in blocks:
        block._compiled_call_impl = None
    model.eval()
    try:
        yield
    finally:
        model.train()
        for block, call in zip(blocks, compiled, strict=True):
            block._compiled_call_impl = call


class Run:
    """One training run: model, optimizer, clock and files."""

    def __init__(self, options: argparse.Namespace, settings: TrainSettings) -> None:
        self.started = time.monotonic()
        self.settings = settings
        self.out: Path = options.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.budget_s = 60.0 * options.minutes
        self.data: Path = options.data
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(settings.seed)
        torch.set_float32_matmul_precision("high")  # TF32: products of bf16 values stay exact
        self.corpus = Corpus(options.data, device)
        config = demo_config()
        self.model = DemoModel(
            config, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
            max_tokens=settings.sequence_tokens, dropout=settings.dropout,
        )  # fmt: skip
        table = hash_table(self.corpus.meta["token_counts"], config.n_routed_experts, config.num_experts_per_tok)
        for block in self.model.layers:
            if block.ffn.gate.is_hash:
                block.ffn.gate.tid2eid.copy_(table)
        self.model.to(device).train()
        self.optimizer = make_optimizer(self.model, settings)
        self.generator = np.random.default_rng(settings.seed)
        self.heldout = self.corpus.heldout_batches(settings.batch_sequences, settings.sequence_tokens, 4)
        self.curve = (self.out / "curve.jsonl").open("w", encoding="utf-8")
        self.best = {"heldout_perplexity": math.inf}
        self.best_state: dict[str, Tensor] = {}
        self.steps = self.tokens = 0
        backend = options.backend or ("inductor" if device.type == "cuda" else "none")
        self.backend = backend
        if backend != "none":
            compile_blocks(self.model, self._batch(), settings, backend)
        self.ready = self.packed = time.monotonic()

    def _batch(self) -> Batch:
        s = self.settings
        return self.corpus.batch(
            self.generator, s.batch_sequences, s.sequence_tokens, s.needle_share, s.max_facts, s.answer_weight
        )

    @property
    def progress(self) -> float:
        """0 when the first step starts, 1 when the budget, less what export takes, is spent."""
        end = self.started + self.budget_s - min(EXPORT_RESERVE_S, self.budget_s / 4)
        return (time.monotonic() - self.ready) / max(end - self.ready, 1e-3)

    def train(self) -> None:
        next_evaluation = self.ready + self.settings.evaluate_every_s
        while (progress := self.progress) < 1.0:
            loss = self._step(progress)
            if self.steps % 50 == 0:
                self._record(progress, {
                    "loss": float(loss.text), "mtp_loss": float(loss.mtp), "index_loss": float(loss.index),
                    "rate": learning_rate(progress, self.settings),
                })  # fmt: skip
            if time.monotonic() >= next_evaluation:
                self._evaluate(progress)
                next_evaluation = time.monotonic() + self.settings.evaluate_every_s
        self._evaluate(1.0)

    def _step(self, progress: float) -> Loss:
        settings, model = self.settings, self.model
        model.select.fill_(progress >= settings.select_from)
        model.quantise.fill_(progress >= settings.quantise_from)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(progress, settings)
        batch = self._batch()
        output = model(batch.ids[:, :-2], batch.ids[:, 1:-1])
        loss = losses(output, batch, settings)
        loss.total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        balance_routers(model, output.loads, settings.bias_step)
        self.steps += 1
        self.tokens += batch.weights.numel()
        return loss

    def _record(self, progress: float, values: dict[str, float]) -> None:
        row = {
            "step": self.steps, "tokens": self.tokens, "progress": round(progress, 4),
            "seconds": round(time.monotonic() - self.started, 1), **values,
        }  # fmt: skip
        if not all(math.isfinite(value) for value in values.values()):
            raise ValueError(f"training diverged: {row}")
        self.curve.write(json.dumps(row) + "\n")
        self.curve.flush()
        print(json.dumps(row), flush=True)

    def _evaluate(self, progress: float) -> None:
        """Held-out numbers as the finished model will run: quantised and selecting. Keeps the best quantised state."""
        model = self.model
        switches = model.select.clone(), model.quantise.clone()
        model.select.fill_(True)
        model.quantise.fill_(True)
        with uncompiled(model):
            values = evaluate(model, self.heldout)
            values["needle_accuracy"] = needle_accuracy(
                model, self.corpus, self.settings.sequence_tokens, self.settings.needle_questions
            )
        model.select.copy_(switches[0])
        model.quantise.copy_(switches[1])
        self._record(progress, values)
        if values["heldout_perplexity"] < self.best["heldout_perplexity"]:
            self.best = values | {"step": self.steps, "tokens": self.tokens, "progress": progress}
            self.best_state = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
            if time.monotonic() - self.packed >= PACK_EVERY_S:
                self.save()

    def save(self) -> dict[str, int]:
        """Write summary.json, the master weights and both checkpoints of the best state so far."""
        summary = self.summary()
        (self.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        save_master(self.best_state, self.out)
        sizes = export_all(self.best_state, self.model.config, self.out, self.data)
        self.packed = time.monotonic()
        return sizes

    def summary(self) -> dict[str, object]:
        seconds = time.monotonic() - self.ready
        return {
            "best": self.best,
            "steps": self.steps,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens / seconds,
            "epochs": self.tokens / self.corpus.meta["train_tokens"],
            "setup_seconds": self.ready - self.started,
            "train_seconds": seconds,
            "unigram_perplexity": self.corpus.meta["unigram_perplexity"],
            "compiled": self.backend != "none",
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "torch": torch.__version__,
            "settings": asdict(self.settings),
        }


def export_all(state: dict[str, Tensor], config: ModelConfig, out: Path, data: Path) -> dict[str, int]:
    """Both checkpoints as flash-mini.tar and flash-mini-nvfp4.tar in `out`; returns the bytes of each model file."""
    sizes = {}
    for name, experts in EXPORTS:
        with tempfile.TemporaryDirectory() as folder:
            sizes[name] = export_checkpoint(state, config, Path(folder), experts, data / "tokenizer.json")
            partial = out / f".{name}.partial"
            with tarfile.open(partial, "w") as archive:
                archive.add(folder, arcname=name)
            partial.replace(out / f"{name}.tar")
    return sizes


def save_master(state: dict[str, Tensor], out: Path) -> None:
    """The unquantised weights as bf16 (tables as they are), in files of at most MASTER_FILE_BYTES."""
    parts: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, value in state.items():
        weight = value if not value.is_floating_point() or ".gate.bias" in name else value.to(torch.bfloat16)
        nbytes = weight.numel() * weight.element_size()
        if filled + nbytes > MASTER_FILE_BYTES:
            parts.append({})
            filled = 0
        parts[-1][name] = weight.contiguous()
        filled += nbytes
    for number, part in enumerate(parts):
        save_file(part, out / f"master-{number}.safetensors")


def load_master(folder: Path) -> dict[str, Tensor]:
    """What `save_master` wrote, in fp32."""
    files = sorted(folder.glob("master-*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no master-*.safetensors")
    state = {name: value for file in files for name, value in load_file(file).items()}
    return {name: value.float() if value.is_floating_point() else value for name, value in state.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--minutes", type=float, default=8.0, help="wall time from start to end, export included")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=HERE / "data")
    parser.add_argument("--backend", help="of torch.compile; 'none' to do without. Default: inductor on a GPU")
    options = parser.parse_args()
    run = Run(options, TrainSettings())
    run.train()
    print(run.save())


if __name__ == "__main__":
    main()
