"""Structured output: JSON schemas, regular expressions and grammars as token masks."""
