"""Fixtures of these tests; `test_server_command.py` needs the server's libraries."""

import importlib.util

from server_fixtures import checkpoint, dsv4, start

__all__ = ["checkpoint", "dsv4", "start"]

if importlib.util.find_spec("starlette") is None:
    collect_ignore_glob = ["test_server_*.py"]
