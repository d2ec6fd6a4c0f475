"""Grammars as token masks: compiled from text, one place in it a request."""
