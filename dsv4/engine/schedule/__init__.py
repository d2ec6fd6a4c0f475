"""The scheduler: which requests run in the next step, and with how many tokens."""
