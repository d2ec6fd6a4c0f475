"""Commands for on-disk caches: prefixes and compiled kernels."""
