"""`dsv4 serve`: its options, its file of options, and the command."""
