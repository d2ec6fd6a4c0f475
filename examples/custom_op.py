"""Exchange one op of the model for your own, and see whether any bit of the logits changes.

    python examples/custom_op.py [CHECKPOINT]      without CHECKPOINT: the miniature that ships with dsv4

Every op has a torch oracle that defines it (`dsv4/ops/<family>/op.py`). `TORCH` holds all oracles and `TRITON` all
kernels; `with_ops` exchanges single ones and keeps the rest. On a GPU, take `TRITON` and device="cuda". To call the
kernels from your own model instead: `import dsv4.ops.torch_library`, then `torch.ops.dsv4.rms_norm(x, weight, eps)`.
"""

import sys

import torch

from dsv4 import LLM
from dsv4.ops import TORCH

PROMPT = "And it came to pass"


def my_rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """The same formula, but torch chooses the order of the sum."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed if weight is None else normed * weight.float()).to(x.dtype)


def main(path: str | None = None) -> None:
    # `exact` numerics quantise nothing on the way; `official` ones call `rms_norm_quant` here instead
    oracle = LLM(path, numerics="exact", backend=TORCH)
    mine = LLM(path, numerics="exact", backend=TORCH.with_ops(rms_norm=my_rms_norm))
    token_ids = oracle.encode(PROMPT)
    expected, found = oracle.logits(token_ids), mine.logits(token_ids)
    changed = (expected != found).float().mean().item()
    print(f"logits with other bits: {changed:.0%}, largest difference {(expected - found).abs().max().item():.2g}")
    print("same most likely tokens:", torch.equal(expected.argmax(-1), found.argmax(-1)))


if __name__ == "__main__":
    main(*sys.argv[1:2])
