"""Draws the training curve and what each number format costs, from the committed results. Needs matplotlib.

python tools/demo_model/plot.py            # writes docs/images/flash-mini.png
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
RESULTS = HERE / "results"
CHECKPOINTS = ("flash-mini", "flash-mini-nvfp4")
PHASES = ("select_from", "quantise_from")


def draw_curve(axes: Any, rows: list[dict[str, float]], summary: dict[str, Any]) -> None:
    """Perplexity of training batches and of held-out text against tokens seen; where the two phases begin."""
    steps = [row for row in rows if "loss" in row]
    checks = [row for row in rows if "heldout_perplexity" in row]
    axes.plot([row["tokens"] / 1e6 for row in steps], [math.exp(row["loss"]) for row in steps], label="training text")
    tokens = [row["tokens"] / 1e6 for row in checks]
    axes.plot(tokens, [row["heldout_perplexity"] for row in checks], marker="o", label="held out")
    axes.axhline(summary["unigram_perplexity"], color="grey", linestyle=":", label="token frequencies alone")
    for name in PHASES:
        start = next(row for row in steps if row["progress"] >= summary["settings"][name])
        axes.axvline(start["tokens"] / 1e6, color="lightgrey")
        axes.text(start["tokens"] / 1e6 + 1, 300, name.removesuffix("_from"), color="grey", fontsize=8)
    axes.set_yscale("log")
    axes.set_xlabel("million tokens")
    axes.set_ylabel("perplexity")
    axes.legend(fontsize=8)


def draw_costs(axes: Any, evaluations: dict[str, dict[str, Any]]) -> None:
    """Change of perplexity against the first checkpoint in exact numerics, per checkpoint and mode."""
    base = evaluations[CHECKPOINTS[0]]["modes"][0]["perplexity"]
    values = {
        f"{name}\n{mode['name']}": 100 * (mode["perplexity"] / base - 1)
        for name, evaluation in evaluations.items()
        for mode in evaluation["modes"]
    }
    bars = axes.barh(list(values), list(values.values()))
    axes.bar_label(bars, fmt="%+.2f %%", padding=3, fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    margin = 0.3 * (max(values.values()) - min(values.values()))
    axes.set_xlim(min(0, *values.values()) - margin * (min(values.values()) < 0), max(values.values()) + margin)
    axes.set_xlabel(f"perplexity against {base:.3f}, %")
    axes.invert_yaxis()


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the demo model's results.")
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / "docs" / "images" / "flash-mini.png")
    options = parser.parse_args()
    rows = [json.loads(line) for line in (RESULTS / "curve.jsonl").read_text().splitlines()]
    summary = json.loads((RESULTS / "summary.json").read_text())
    evaluations = {name: json.loads((RESULTS / f"eval-{name}.json").read_text()) for name in CHECKPOINTS}
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    draw_curve(left, rows, summary)
    draw_costs(right, evaluations)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    main()
