"""Renews dsv4/testing/data/golden_flash_mini.json: greedy continuations of the shipped checkpoints, with tokens' leads.

    python tools/demo_model/golden.py

The prompts are those of the file: choose others where a new checkpoint's least certain token hardly leads its rival,
or where a text recites a recall task.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout without an installation

from dsv4 import LLM, EngineConfig, SamplingParams

OUT = Path(__file__).parents[2] / "dsv4" / "testing" / "data" / "golden_flash_mini.json"
NUM_TOKENS = 16
LIMITS = EngineConfig(max_context_tokens=128, max_concurrent_requests=16)


def continuations(llm: LLM, prompts: list[str]) -> list[dict[str, Any]]:
    """Greedy text of each prompt; `gaps` are the nats between a token and its closest rival."""
    rows = []
    for found, prompt in zip(
        llm.generate(prompts, SamplingParams(max_tokens=NUM_TOKENS, temperature=0)), prompts, strict=True
    ):
        start = len(llm.encode(prompt))
        logits = llm.logits([*llm.encode(prompt), *found.token_ids[:-1]])[start - 1 :].double()
        best = logits.log_softmax(-1).topk(2, -1).values
        gaps = [round(gap, 4) for gap in (best[:, 0] - best[:, 1]).tolist()]
        rows.append({"prompt": prompt, "text": found.text, "token_ids": list(found.token_ids), "gaps": gaps})
    return rows


def main() -> None:
    prompts = [row["prompt"] for row in json.loads(OUT.read_text(encoding="utf-8"))["flash-mini/official"]]
    golden = {
        f"{name}/{numerics}": continuations(LLM(name, numerics=numerics, engine=LIMITS), prompts)
        for name, numerics in (("flash-mini", "official"), ("flash-mini", "exact"), ("flash-mini-nvfp4", "official"))
    }
    OUT.write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for name, found in golden.items():
        print(f"{name}: least lead {min(min(row['gaps']) for row in found):.3f} nats")


if __name__ == "__main__":
    main()
