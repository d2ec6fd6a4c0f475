"""Compiled kernels without a GPU: what ptxas made of them, and in which order they add up."""
