"""The needle test: a fact, a long stretch of other text, the question. Can the model still answer?

    python tools/demo_model/needle.py --model DIR --count 24 --length 1024

Runs the checkpoint as it ships (through `dsv4.LLM`), then once more with the compressed entries hidden from attention,
so that only the sliding window is left. A model that uses CSA and HCA answers in the first case and
guesses in the second.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout without an installation

from data import MIN_DISTANCE, NeedleWords, write_needles

from dsv4.llm import LLM
from dsv4.model.transformer import Transformer
from dsv4.ops.attention import sparse_attention_ref

HERE = Path(__file__).parent


def hide_entries(llm: LLM) -> LLM:
    """The same model and weights, its attention blind to compressed entries. `llm` itself is left as it is."""

    def window_only(
        q: Tensor, rows: Any, window: Any, entries: Any, picks: Any, sink: Tensor, batch: Any, *, window_len: int
    ) -> Tensor:
        return sparse_attention_ref(q, rows, window, None, None, sink, batch, window_len=window_len)

    blind = LLM.from_params(
        llm.config, llm.model.params, numerics=llm.numerics, dtype=llm.model.context.dtype, engine=llm.cache.engine,
        tokenizer=llm.tokenizer,
    )  # fmt: skip
    ops = replace(llm.model.context.ops, sparse_attention=window_only)
    blind.model = Transformer(llm.config, llm.model.params, llm.model.context.dtype, ops=ops)
    return blind


def needle_prompts(
    filler: np.ndarray, words: NeedleWords, count: int, length: int, seed: int = 0, min_distance: int = MIN_DISTANCE
) -> list[tuple[list[int], int]]:
    """`count` prompts that end right before the answer, each with the answer's id."""
    generator = np.random.default_rng(seed)
    prompts = []
    for start in generator.integers(0, len(filler) - length, count):
        ids = filler[start : start + length].astype(np.int64)
        place = write_needles(ids, words, generator, 1, min_distance)[0]
        prompts.append((ids[:place].tolist(), int(ids[place])))
    return prompts


def accuracy(llm: LLM, prompts: list[tuple[list[int], int]]) -> float:
    """Share of prompts whose most likely next token is the answer."""
    right = [int(llm.logits(prompt)[-1].argmax()) == answer for prompt, answer in prompts]
    return sum(right) / len(right)


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask the demo model for facts beyond its sliding window.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=HERE / "data")
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--length", type=int, default=1024)
    options = parser.parse_args()
    meta = json.loads((options.data / "meta.json").read_text(encoding="utf-8"))
    tokenizer = tokenizers.Tokenizer.from_file(str(options.model / "tokenizer.json"))
    words = NeedleWords.choose(tokenizer, meta["token_counts"])
    filler = np.fromfile(options.data / "heldout.bin", dtype=np.uint16)
    prompts = needle_prompts(filler, words, options.count, options.length)
    llm = LLM(options.model)
    print(f"with compressed entries     {accuracy(llm, prompts):.2f}")
    print(f"compressed entries hidden   {accuracy(hide_entries(llm), prompts):.2f}")
    print(f"chance among the things     {1 / len(words.things):.2f}")


if __name__ == "__main__":
    main()
