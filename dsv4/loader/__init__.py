"""Safetensors checkpoints to parameters, strictly; writing them; random checkpoints."""
