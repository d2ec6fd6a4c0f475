"""The README.md that travels with an exported demo checkpoint.

    python tools/demo_model/card.py            # writes every card anew from results/, measurements included

Also renews the table of docs/drafts.md, which the card of the DSpark head shows too.
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
from dsv4.config.layers import build_schedule
from dsv4.loader.shipped import DSPARK_TWIN, shipped_checkpoint
from dsv4.tools.bench.drafting import acceptance

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
DRAFT_RECORDS = ROOT / "benchmarks" / "results" / "mini-drafts.json"  # of `dsv4 bench drafts --json`, by device
DRAFT_PAGE = ROOT / "docs" / "drafts.md"
DRAFT_TABLE = "| drafter | drafts | temperature | came true, by place | tokens a step |"

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


def head_card(config: ModelConfig, summary: dict[str, Any], reports: dict[str, Any]) -> str:
    """Of the folder with a DSpark head: what it is, how it learned, how many of its drafts come true."""
    dspark, settings = config.dspark, summary["settings"]
    assert dspark is not None
    taps = ", ".join(map(str, dspark.target_layer_ids))
    trained = textwrap.fill(
        f"{summary['parameters']:,} parameters, started from flash-mini's MTP block; flash-mini itself did not change. "
        f"The head learned flash-mini's distribution of the next {dspark.block_size} tokens behind "
        f"{summary['anchors']:,} anchors, in {summary['steps']:,} steps: {summary['train_seconds']:.0f} s on one "
        f"{summary['device']}, after {summary['setup_seconds']:.0f} s in which flash-mini read "
        f"{summary['own_tokens']:,} tokens of its own continuations (temperatures 0, 0.7 and 1) and "
        f"{summary['text_tokens']:,} of its training text. Quantisation-aware from "
        f"{100 * settings['quantise_from']:.0f} % of the time on. Confidences learned how often the engine accepts a "
        "draft at temperature 1.",
        width=118, break_on_hyphens=False,
    )  # fmt: skip
    return f"""# {DSPARK_TWIN}

flash-mini with a DSpark draft head instead of its MTP block. It writes what flash-mini writes, bit for bit: a drafter
changes the speed only. This folder holds the head; its index takes every other tensor from `../flash-mini`.

Head: {config.num_draft_layers} layers, blocks of {dspark.block_size} drafts, taps of layers {taps}, Markov bias of
rank {dspark.markov_rank}. FP8 (128 x 128 blocks) with MXFP4 experts.

## Training

{trained}

Data and licences are those of flash-mini (its README lists them). The weights carry no text of their own; they are
released under the licence of this repository.

## Measured

Continuations of held-out Shakespeare and King James text (`dsv4 bench drafts`); a draft comes true with all before it.

{drafts_table(reports)}

## Limits

Made to test an inference engine: it drafts for flash-mini and for no other model.
"""


def drafts_table(reports: dict[str, Any]) -> str:
    """What `dsv4 bench drafts --json` printed, by the name of the device: a row for every setting, and a column of
    tokens a second (of a CPU, by the time of its processor) for every device, with the ratio to that without drafts."""
    names = list(reports)
    lines = [
        f"{DRAFT_TABLE} {' | '.join(f'tokens/s, {name}' for name in names)} |",
        "|---" * (5 + len(names)) + "|",
    ]
    rows: dict[tuple[str, str, float], dict[str, dict[str, Any]]] = {}
    for name, found in reports.items():
        for origin, record in ((report["origin"], record) for report in found for record in report["records"]):
            key = record["drafter"], str(record["drafts"]), record["temperature"]
            clock = "tokens_per_second" if "NVIDIA" in origin["device"] else "tokens_per_processor_second"
            rows.setdefault(key, {})[name] = record | {"speed": record[clock]}
    drafters = {"mtp": "MTP", "dspark": "DSpark"}
    for (drafter, drafts, temperature), records in rows.items():
        first = next(iter(records.values()))
        shares = " ".join(f"{100 * share:.0f}" for share in acceptance(first))
        cells = [_speed(records.get(name)) for name in names]
        places = f"{shares} %" if shares else ""
        step = f"{first['tokens_per_step']:.2f}" if shares else "1.00"
        lines.append(f"| {drafters[drafter]} | {drafts} | {temperature:g} | {places} | {step} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _speed(record: dict[str, Any] | None) -> str:
    if record is None:
        return ""
    speed = record["speed"]
    return f"{speed:,.0f} ({record['speedup']:.2f} x)" if speed >= 100 else f"{speed:.1f} ({record['speedup']:.2f} x)"


def with_drafts_table(page: str, table: str) -> str:
    """The page with its table of drafts renewed."""
    lines = page.splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith(DRAFT_TABLE))
    end = next(place for place in range(start, len(lines) + 1) if place == len(lines) or not lines[place].strip())
    return "\n".join([*lines[:start], *table.splitlines(), *lines[end:]]) + "\n"


def draft_documents() -> dict[Path, str]:
    """The head's card and the page of drafts, as the records have them."""
    reports = json.loads(DRAFT_RECORDS.read_text(encoding="utf-8"))
    summary = json.loads((RESULTS / "head.json").read_text(encoding="utf-8"))
    folder = shipped_checkpoint(DSPARK_TWIN)
    page = DRAFT_PAGE.read_text(encoding="utf-8")
    return {
        folder / "README.md": head_card(ModelConfig.from_pretrained(folder), summary, reports),
        DRAFT_PAGE: with_drafts_table(page, drafts_table(reports)),
    }


def main() -> None:
    meta, summary = (json.loads((RESULTS / name).read_text()) for name in ("corpus.json", "summary.json"))
    for name, experts in (("flash-mini", "mxfp4"), ("flash-mini-nvfp4", "nvfp4")):
        folder = ROOT / "dsv4" / "demo" / name
        evaluation = json.loads((RESULTS / f"eval-{name}.json").read_text())
        card = model_card(name, ModelConfig.from_pretrained(folder), meta, summary, experts, evaluation)
        (folder / "README.md").write_text(card, encoding="utf-8")
    for file, text in draft_documents().items():
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
