"""Judges a run against one set of numeric vectors; tests/vectors/README.md states and explains the limits."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

PURE_LOGITS_ABS = 1e-4
PURE_LAYER_RELATIVE = 2e-5
ROW_ABS, ROW_ABS_NOISE = 0.8, 2.5
ROW_COSINE, ROW_COSINE_NOISE = 1e-2, 4.0
MEAN_COSINE_NOISE, MEDIAN_ABS_NOISE, TOP1_AGREEMENT, MIN_ROWS = 1.2, 1.25, 0.80, 30
# published rounding points: relative L2 of a sublayer's output, of the streams' update, share of entries that differ
STRICT_LAYER = {"attn_out": 0.035, "ffn_out": 0.05, "streams": 0.045, "entries": 0.025}


@dataclass(frozen=True)
class VectorSet:
    """A folder with `model/`, `expected/` and `cases.json`."""

    root: Path
    cases: dict[str, Any]

    @classmethod
    def open(cls, root: Path) -> VectorSet:
        return cls(root, json.loads((root / "cases.json").read_text()))

    @property
    def model_path(self) -> Path:
        return self.root / "model"

    def expected(self, name: str) -> dict[str, Tensor]:
        return load_file(self.root / "expected" / f"{name}.safetensors")

    def token_ids(self, case: dict[str, Any]) -> list[int]:
        """The first `n` tokens of a case's sequence."""
        ids: list[int] = self.cases["sequences"][case["seq"]]
        return ids[: case["n"]]

    @staticmethod
    def chunks(case: dict[str, Any]) -> list[int]:
        """How the case was fed: in one go, or k tokens at once and the rest singly (MTP counts pairs)."""
        total = case["n"] - 1 if case["kind"].startswith("mtp") else case["n"]
        return [case["k"]] + [1] * (total - case["k"]) if "k" in case else [total]


def pure_deviation(logits: Tensor, expected: Tensor) -> float:
    """Largest absolute difference; NaN counts as infinite."""
    difference = (logits.double() - expected.double()).abs()
    return float(torch.where(difference.isfinite(), difference, torch.inf).max())


def quantised_failures(logits: Tensor, expected: Tensor, noise_abs: Tensor, noise_cosine: Tensor) -> list[str]:
    """What exceeds the limits of the official numerics, in words; empty when the rows pass."""
    got, want = logits.double(), expected.double()
    row_abs = (got - want).abs().amax(-1)
    row_cosine = (1 - torch.nn.functional.cosine_similarity(got, want, dim=-1)).clamp_min(0)
    failures = []
    if bool((~(row_abs <= (ROW_ABS_NOISE * noise_abs.double()).clamp_min(ROW_ABS))).any()):
        failures.append(f"a row deviates by {row_abs.max():.3f}")
    if bool((~(row_cosine <= (ROW_COSINE_NOISE * noise_cosine.double()).clamp_min(ROW_COSINE))).any()):
        failures.append(f"a row's cosine distance is {row_cosine.max():.4f}")
    if len(got) >= MIN_ROWS:
        if row_cosine.mean() > MEAN_COSINE_NOISE * noise_cosine.double().mean():
            failures.append(f"mean cosine distance {row_cosine.mean():.5f}")
        if row_abs.median() > MEDIAN_ABS_NOISE * noise_abs.double().median():
            failures.append(f"median row deviation {row_abs.median():.3f}")
        agreement = (got.argmax(-1) == want.argmax(-1)).double().mean()
        if agreement < TOP1_AGREEMENT:
            failures.append(f"top-1 agreement {agreement:.3f}")
    return failures


def relative_l2(got: Tensor, want: Tensor, reference: Tensor | None = None) -> float:
    """|got - want| / |reference|, the reference being `want` unless given."""
    scale = (want if reference is None else reference).double().norm()
    return float((got.double() - want.double()).norm() / scale)


def entries_missed(got: Tensor, want: Tensor) -> float:
    """Share of the wanted entries not picked, over the rows in which some entry was left out (no -1 padding)."""
    rows = [(set(a), set(b)) for a, b in zip(got.tolist(), want.tolist(), strict=True) if -1 not in b]
    wanted = sum(len(b) for _, b in rows)
    return 1 - sum(len(a & b) for a, b in rows) / wanted if wanted else 0.0
