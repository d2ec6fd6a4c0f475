"""The model's own continuations of its training text, for learn_drafts.py: a drafter meets what the model writes.

    python tools/demo_model/own_text.py --seconds 90 --out DIR        # one GPU

DIR gets train-T.npy and heldout-T.npy for each temperature T of `TEMPERATURES`: uint16 [sequences, tokens], the first
`PROMPT_TOKENS` of each from the corpus. They are written anew after every batch, so a run that is stopped leaves what
it has.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout without an installation

from dsv4 import LLM, EngineConfig, SamplingParams

HERE = Path(__file__).parent
TEMPERATURES = (1.0, 0.0, 0.7)  # one after the other
PROMPT_TOKENS, TOKENS = 128, 640


def own_file(folder: Path, part: str, temperature: float) -> Path:
    """part: "train" or "heldout", whose text the prompts are from."""
    return folder / f"{part}-{temperature:.1f}.npy"


def prompts_of(ids: np.ndarray, generator: np.random.Generator, num_prompts: int, length: int) -> list[list[int]]:
    starts = generator.integers(0, len(ids) - length, num_prompts)
    return [ids[start : start + length].tolist() for start in starts]


def continued(llm: LLM, prompts: list[list[int]], num_tokens: int, temperature: float, seed: int) -> np.ndarray:
    """Prompts and what the model makes of them, uint16 [prompts, num_tokens]; an end of text does not end it."""
    params = [
        SamplingParams(max_tokens=num_tokens - len(ids), temperature=temperature, seed=seed + place, ignore_eos=True)
        for place, ids in enumerate(prompts)
    ]
    found = llm.generate(prompts, params)
    return np.array([[*ids, *one.token_ids] for ids, one in zip(prompts, found, strict=True)], dtype=np.uint16)


def main() -> None:
    parser = argparse.ArgumentParser(description="Let the demo model continue its training text.")
    parser.add_argument("--seconds", type=float, default=90.0, help="no batch begins after this time")
    parser.add_argument("--out", type=Path, default=HERE / "data" / "own")
    parser.add_argument("--data", type=Path, default=HERE / "data")
    parser.add_argument("--model", default="flash-mini")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=512, help="sequences at once")
    parser.add_argument("--batches", type=int, default=18, help="with training prompts, at most")
    parser.add_argument("--heldout", type=int, default=96, help="sequences with held-out prompts, per temperature")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    options = parser.parse_args()
    started = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    limits = EngineConfig(
        max_context_tokens=options.tokens, max_concurrent_requests=options.batch, max_chunk_tokens=1024
    )
    llm = LLM(options.model, device=options.device, engine=limits)
    print(f"loaded after {time.monotonic() - started:.1f} s", flush=True)
    texts = {part: np.fromfile(options.data / f"{part}.bin", dtype=np.uint16) for part in ("heldout", "train")}
    generator = np.random.default_rng(40)
    made: dict[Path, list[np.ndarray]] = {}
    for batch in range(len(TEMPERATURES) + options.batches):
        temperature = TEMPERATURES[batch % len(TEMPERATURES)]
        part, size = ("heldout", options.heldout) if batch < len(TEMPERATURES) else ("train", options.batch)
        if time.monotonic() - started > options.seconds and batch >= 2 * len(TEMPERATURES):
            break
        prompts = prompts_of(texts[part], generator, size, PROMPT_TOKENS)
        file = own_file(options.out, part, temperature)
        made.setdefault(file, []).append(continued(llm, prompts, options.tokens, temperature, 1000 * batch))
        np.save(file, np.concatenate(made[file]))
        total = sum(len(rows) for found in made.values() for rows in found) * (options.tokens - PROMPT_TOKENS)
        print(f"{part} {temperature}: {total:,} tokens after {time.monotonic() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main()
