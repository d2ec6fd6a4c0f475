"""Shared by tests, benchmarks and the self-test: cases, tolerances, the CPU interpreter."""
