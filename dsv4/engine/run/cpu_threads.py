"""How many threads a forward call takes on a CPU.

torch's own choice, one per core, is wrong for small models: their products are too small to share, and threads that
wait for one another spin. `official` numerics have the same bits on any number of threads; `exact` ones do not.
"""

import os

import torch

from dsv4.config import ModelConfig

ONE_THREAD_BELOW = 2048  # hidden_size; measured in docs/decisions/server-life.md


def choose_threads(config: ModelConfig) -> int | None:
    """1 for a small model. None leaves it to torch, which is also the choice where OMP_NUM_THREADS is set.

    The model alone decides, never a measurement: the same call must give the same bits at any time.
    """
    return 1 if config.hidden_size < ONE_THREAD_BELOW and "OMP_NUM_THREADS" not in os.environ else None


def set_threads(config: ModelConfig) -> None:
    """Apply the choice, to the whole process: torch has one setting for all its threads."""
    number = choose_threads(config)
    if number is not None:
        torch.set_num_threads(number)
