"""Completions as the engine has them: without the text, which `LLM` makes of their tokens."""

from dataclasses import replace


def bare(found):
    """One completion, or a list of them."""
    return [bare(one) for one in found] if isinstance(found, list) else replace(found, text=None)
