"""Receipts: requests and what came of them, recorded line by line, and run again bit by bit."""
