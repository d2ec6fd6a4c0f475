"""The engine's socket: an engine in a process or thread of its own, and the clients that send it requests."""
