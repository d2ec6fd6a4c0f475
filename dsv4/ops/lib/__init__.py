"""What kernels share: guarded Triton import, launch tables, number formats, maths, counters. Import from its files."""
