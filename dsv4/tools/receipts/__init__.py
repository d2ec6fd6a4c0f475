"""Receipts: requests and their results, recorded line by line, and run again bit by bit."""
