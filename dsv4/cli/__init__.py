"""The command line: one file a command; `main.py` is the entry point."""
