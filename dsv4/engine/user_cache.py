"""Small JSON files that save this user work: `$XDG_CACHE_HOME/dsv4/KIND`, or `~/.cache/dsv4/KIND`. None is needed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def cache_file(kind: str, name: str) -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsv4" / kind / f"{name}.json"


def write_json(file: Path, value: Any) -> Path | None:
    """Whole or not at all; None where the folder cannot be written."""
    partial = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(value, indent=1), encoding="utf-8")
        partial.replace(file)
    except OSError:
        return None
    return file


def read_json(file: Path) -> dict[str, Any]:
    """Empty where there is none, or one that cannot be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
