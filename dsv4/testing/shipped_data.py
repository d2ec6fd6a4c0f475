"""What ships with the package for tests and the self-test: recorded texts of the miniature, vectors of single ops."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

DATA = Path(__file__).parent / "data"
GOLDEN_TEXTS = DATA / "golden_flash_mini.json"
OP_VECTORS = DATA / "op_vectors.safetensors"


@cache
def golden_texts(checkpoint: str, numerics: str) -> list[dict[str, Any]]:
    """Greedy continuations: prompt, text, token_ids, and gaps, each token's distance (nats) from the second best."""
    rows: list[dict[str, Any]] = json.loads(GOLDEN_TEXTS.read_text(encoding="utf-8"))[f"{checkpoint}/{numerics}"]
    return rows


@cache
def _vectors() -> dict[str, Tensor]:
    return load_file(OP_VECTORS)


def op_vectors(name: str) -> dict[str, Tensor]:
    """The tensors of one recorded operation (op_vectors.json lists and explains them)."""
    return {key.removeprefix(f"{name}."): value for key, value in _vectors().items() if key.startswith(f"{name}.")}
