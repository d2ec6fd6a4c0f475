"""Fixtures of these tests; without the server's libraries they are left out."""

import importlib.util

from server_fixtures import checkpoint, dsv4, live, open_page, served_params, start, two_layer_params

__all__ = ["checkpoint", "dsv4", "live", "open_page", "served_params", "start", "two_layer_params"]

# `make test` installs the libraries of the server; a GPU machine may do without them. tests/conftest.py says so.
SERVER_LIBRARIES = (
    "starlette",
    "pydantic",
    "uvicorn",
    "prometheus_client",
    "llguidance",
    "httpx",
    "openai",
    "schemathesis",
)
if any(importlib.util.find_spec(library) is None for library in SERVER_LIBRARIES):
    collect_ignore_glob = ["test_server_*.py", "*/test_server_*.py", "page/test_page*.py"]
