"""`python faulty_rank.py FAULT`: a rank like `python -m dsv4.rank`, to which something happens."""

import sys
import time
from pathlib import Path

from dsv4 import rank


def out_of_memory():
    """In the second step: more than any machine has is asked for."""
    import torch

    from dsv4.model.transformer import Transformer

    forward, num_calls = Transformer.forward, []

    def hungry(self, *given):
        num_calls.append(torch.empty((1 << 50) if num_calls else 1, dtype=torch.uint8))
        return forward(self, *given)

    Transformer.forward = hungry


def slow_to_load(flag):
    """Once it reads weights, it says so and goes on for ever."""
    from dsv4.engine.ranks import load

    def load_params(*given, **options):
        Path(flag).touch()
        time.sleep(600)

    load.load_params = load_params


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
    rank.main()
