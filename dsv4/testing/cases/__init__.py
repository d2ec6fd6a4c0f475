"""Calls of every op, a module for each family: `CASES` at the real shapes of Flash and Pro, timed, compiled, and run by
the self-test; `SMALL`, of a few rows and heads, for the self-test in Triton's interpreter.
"""
