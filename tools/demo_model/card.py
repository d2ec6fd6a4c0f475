"""The README.md that travels with an exported demo checkpoint."""

from __future__ import annotations

from typing import Any

from dsv4.config import ModelConfig
from dsv4.schedule import build_schedule

_FORMATS = {
    "mxfp4": "FP8 (128 x 128 blocks) with MXFP4 experts, the official format",
    "nvfp4": "FP8 with NVFP4 experts",
}


def model_card(name: str, config: ModelConfig, meta: dict[str, Any], summary: dict[str, Any], experts: str) -> str:
    """Data, licences, training, numbers and limits, as Markdown."""
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
tasks written over 15 % of the training sequences. Prose only: code, tables and markup were removed.

| source | packages | licence | characters |
|---|---|---|---|
{sources}

The weights carry no text of their own; they are released under the licence of this repository.

## Training

{_training(summary)}

## Limits

Trained on sequences of 2,048 tokens. Made to test an inference engine: not for use in place of a language model.
"""


def _training(summary: dict[str, Any]) -> str:
    if not summary:
        return "See `tools/demo_model/README.md`."
    best = summary["best"]
    return (
        f"{summary['parameters']:,} parameters, {summary['tokens']:,} tokens in {summary['steps']:,} steps "
        f"({summary['train_seconds'] / 60:.1f} minutes on one {summary['device']}), quantisation-aware in the second "
        f"half, the indexer trained towards the attention mass. Held-out perplexity {best['heldout_perplexity']:.2f} "
        f"(unigram baseline {summary['unigram_perplexity']:.0f}), indexer recall of attention mass "
        f"{best['index_recall']:.3f}, recall of a fact beyond the sliding window {best['needle_accuracy']:.2f}."
    )
