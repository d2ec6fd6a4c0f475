"""Commands about what others left on the disk: prefixes and compiled kernels."""
