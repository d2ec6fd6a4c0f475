"""A plan as tensors: step inputs, per-slot sampling state, constraints, prompt log-probabilities."""
