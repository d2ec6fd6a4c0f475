"""The engine's socket: an engine in a process or thread of its own, and those who send it requests."""
