"""Judges drafts against a set of draft vectors; draftA/README.md and README_mtp.md in tests/vectors explain them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from dsv4.engine.draft.trace import DraftRound
from dsv4.llm import LLM
from dsv4.testing.vectors import pure_deviation


@dataclass(frozen=True)
class DraftSet:
    """A folder with `cases.json` and `expected/` (DSpark), or a file `mtpX.json` beside its tensors (MTP)."""

    cases: dict[str, dict[str, Any]]
    expected: dict[str, Tensor]
    limit: float

    @classmethod
    def open(cls, path: Path) -> DraftSet:
        is_folder = path.is_dir()
        raw = json.loads((path / "cases.json" if is_folder else path).read_text())
        tensors = path / "expected" / "expected_pure.safetensors" if is_folder else path.with_suffix(".safetensors")
        return cls({case["id"]: case for case in raw["cases"]}, load_file(tensors), raw["tolerance"])

    def run(
        self, llm: LLM, case_id: str, chunks: Sequence[int] | None = None, num_rounds: int | None = None
    ) -> list[DraftRound]:
        """The first rounds of a case, all of them by default."""
        case = self.cases[case_id]
        verified = [(round_["accepted"], round_["bonus"]) for round_ in case["rounds"][1:num_rounds]]
        return llm.draft_trace(case["prompt"], case["anchor"], verified, chunks)

    def deviation(self, case_id: str, rounds: Sequence[DraftRound]) -> float:
        """Largest distance of any value from the expected one; a wrong draft, or NaN, counts as infinite."""
        worst = 0.0
        for expected, found in zip(self.cases[case_id]["rounds"], rounds, strict=False):
            values = {"U": found.base_logits, "z": found.logits, "logits": found.logits, "c": found.confidences}
            if found.confidences is not None:
                values["s"] = torch.logit(found.confidences.double())
            names = [name for name in values if f"{expected['id']}.{name}" in self.expected]
            assert len(names) in (1, 4), names
            for name in names:
                value = values[name]
                assert value is not None, name
                worst = max(worst, pure_deviation(value, self.expected[f"{expected['id']}.{name}"]))
            if found.drafts != expected["drafts"]:
                worst = float("inf")
        return worst
