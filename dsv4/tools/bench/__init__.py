"""`dsv4 bench`: speed of ops, layers, ranks, drafts and a running server."""
