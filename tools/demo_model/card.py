"""The README.md that travels with an exported demo checkpoint.

python tools/demo_model/card.py            # writes both cards anew from results/, measurements included
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout without an installation

from settings import LESSONS

from dsv4.config import ModelConfig
from dsv4.schedule import build_schedule

_FORMATS = {
    "mxfp4": "FP8 (128 x 128 blocks) with MXFP4 experts, the official format",
    "nvfp4": "FP8 with NVFP4 experts",
}


def model_card(
    name: str, config: ModelConfig, meta: dict[str, Any], summary: dict[str, Any], experts: str,
    evaluation: dict[str, Any] | None = None,
) -> str:  # fmt: skip
    """Data, licences, training, numbers and limits, as Markdown. `evaluation` is what `dsv4 eval --json` printed."""
    kinds = ", ".join(layer.attention.value.upper() for layer in build_schedule(config))
    sources = "\n".join(
        f"| {source['name']} | {', '.join(source['packages'])} ({source['registry']}) | {source['licence']} "
        f"| {source['characters'] / 1e6:.2f} M |"
        for source in meta["sources"]
    )
    return f"""# {name}

A DeepSeek-V4 model in miniature, trained from scratch on freely licensed English text so that the engine has something
real to run on any machine. It writes in the manner of its books and manuals; it knows nothing and answers nothing.

Format: {_FORMATS[experts]}.
Layers: {kinds}; one MTP block. {config.n_routed_experts} experts, top {config.num_experts_per_tok}, and one shared;
hidden size {config.hidden_size}; vocabulary {config.vocab_size}; the indexer keeps {config.index_topk} entries.

## Data

{meta["train_tokens"]:,} training tokens and {meta["heldout_tokens"]:,} held out (whole sections), plus synthetic recall
tasks written over {_recall_share(summary)}.
Prose only: code, tables and markup were removed.

| source | packages | licence | characters |
|---|---|---|---|
{sources}

The weights carry no text of their own; they are released under the licence of this repository.

## Training

{_training(summary)}
{_measured(name, evaluation)}
## Limits

Trained on sequences of 2,048 tokens of English; nothing longer was tried. It has never seen a conversation: chat
markers are in its vocabulary and mean nothing to it. Its indexer finds half of the attention mass, its HCA entries
{_hca(summary)} (`docs/numerics.md`), and now and then it recites a recall task
({_recited(summary)}).
Made to test an inference engine: not for use in place of a language model, and nothing it writes is meant.
"""


def _recall_share(summary: dict[str, Any]) -> str:
    if "second" not in summary:
        return "15 % of the training sequences"
    settings = summary["second"]["settings"]
    share = 100 * (settings["refrain_share"] + settings["needle_share"])
    return f"15 % of the training sequences of a first run and {share:.0f} % of those of a second (fewer in the third)"


def _hca(summary: dict[str, Any]) -> str:
    if "second" not in summary:
        return "help only where CSA entries are missing"
    return "carry a word that is repeated, but no facts"


def _recited(summary: dict[str, Any]) -> str:
    return "`Remember: ...`" if "second" not in summary else "`Remember: ...`, `The song: ...`"


def _training(summary: dict[str, Any]) -> str:
    if not summary:
        return "See `tools/demo_model/README.md`."
    best = summary["best"]
    minutes, setup = summary["train_seconds"] / 60, summary["setup_seconds"] / 60
    return textwrap.fill(
        f"{summary['parameters']:,} parameters. {summary['tokens']:,} tokens, {summary['epochs']:.1f} times the corpus "
        f"in {summary['steps']:,} steps: {minutes:.1f} minutes of steps on one {summary['device']}, after {setup:.1f} "
        "minutes of set-up, compilation included. Quantisation-aware in the second half; the indexer trained "
        "towards the attention mass. At the end, in the training graph: held-out perplexity "
        f"{best['heldout_perplexity']:.2f} over all sources (token frequencies alone give "
        f"{summary['unigram_perplexity']:.0f}), indexer recall of attention mass {best['index_recall']:.2f}, recall "
        f"of a fact beyond the sliding window {best['needle_accuracy']:.2f}.{_second(summary)}",
        width=118,
    )


def _second(summary: dict[str, Any]) -> str:
    if "second" not in summary:
        return ""
    second, third = summary["second"], summary["third"]
    right = third[-1]["measured"]["refrain16_far_csa_hidden"]
    lessons = sum(lesson.steps for lesson in LESSONS)
    return (
        f" These numbers are from the end of a second run of {second['steps']:,} steps and {second['tokens']:,} tokens "
        f"({second['seconds'] / 60:.1f} minutes on one {second['device']}), after {lessons} steps on a CPU that taught "
        "the attention of HCA layers a refrain. A third run left the refrain's words out of the text loss, for the "
        f"model sang unasked: {sum(part['steps'] for part in third)} steps and "
        f"{sum(part['tokens'] for part in third):,} tokens on a {third[-1]['device'].upper()}. After it, with CSA "
        f"entries hidden, a word sung 16 times comes back 900 tokens later with accuracy {right:.2f}."
    )


def _measured(name: str, evaluation: dict[str, Any] | None) -> str:
    if evaluation is None:
        return ""
    exact = evaluation["modes"][0]["perplexity"]
    rows = "\n".join(
        f"| {mode['name']} | {mode['perplexity']:.3f} | {100 * (mode['perplexity'] / exact - 1):+.2f} % |"
        for mode in evaluation["modes"]
    )
    context = evaluation["tokens"] // evaluation["contexts"]
    return f"""
## Measured

Perplexity of {evaluation["tokens"]:,} tokens of held-out Shakespeare and King James text (`dsv4/demo/heldout.txt`):
`dsv4 eval --model {name} --max-tokens {evaluation["tokens"]} --context {context}`

| numerics | perplexity | against exact |
|---|---|---|
{rows}
"""


def main() -> None:
    results = Path(__file__).parent / "results"
    meta, summary = (json.loads((results / name).read_text()) for name in ("corpus.json", "summary.json"))
    for name, experts in (("flash-mini", "mxfp4"), ("flash-mini-nvfp4", "nvfp4")):
        folder = Path(__file__).parents[2] / "dsv4" / "demo" / name
        evaluation = json.loads((results / f"eval-{name}.json").read_text())
        card = model_card(name, ModelConfig.from_pretrained(folder), meta, summary, experts, evaluation)
        (folder / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
