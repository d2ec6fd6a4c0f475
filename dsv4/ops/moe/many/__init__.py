"""Experts of many tokens on Hopper: the wide form, tiles of persistent CTAs, and the dense shared expert."""
