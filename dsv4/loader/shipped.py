"""Where the checkpoints that ship with the package are: `dsv4/demo/<name>/`. They are data, not modules."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from dsv4.loader.header import CheckpointError

DEFAULT_SHIPPED = "flash-mini"


def shipped_checkpoint(name: str = DEFAULT_SHIPPED) -> Path:
    """Folder of a shipped checkpoint (`flash-mini`, `flash-mini-nvfp4`); `CheckpointError` names those there are."""
    root = Path(str(resources.files("dsv4"))) / "demo"
    folder = root / name
    if not (folder / "config.json").is_file():
        found = sorted(path.parent.name for path in root.glob("*/config.json"))
        raise CheckpointError(f"no shipped checkpoint {name!r}; there are: {', '.join(found) or 'none'}")
    return folder
