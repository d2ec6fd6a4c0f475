"""Tokenizer, chat template, parsing of answers and stop strings. No torch."""
