"""Where the checkpoints and the text that ship with the package are: `dsv4/demo/`. They are data, not modules."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from dsv4.hub import fetch_checkpoint, is_hub_name
from dsv4.loader.header import CheckpointError
from dsv4.loader.progress import byte_progress

DEFAULT_SHIPPED = "flash-mini"
DSPARK_TWIN = "flash-mini-dspark"  # the same model with a DSpark head instead of its MTP block
NVFP4_TWIN = "flash-mini-nvfp4"  # in a checkout only: a wheel has one format


def shipped_checkpoint(name: str = DEFAULT_SHIPPED) -> Path:
    """Folder of a shipped checkpoint (`flash-mini`); `CheckpointError` names those there are."""
    if name not in shipped_names():
        hint = f"; make it with: dsv4 quantize {DEFAULT_SHIPPED} FOLDER --experts nvfp4" if name == NVFP4_TWIN else ""
        raise CheckpointError(
            f"no shipped checkpoint {name!r}; there are: {', '.join(shipped_names()) or 'none'}{hint}"
        )
    return _demo_folder() / name


def shipped_names() -> list[str]:
    """The shipped checkpoints, sorted."""
    return sorted(path.parent.name for path in _demo_folder().glob("*/config.json"))


def is_shipped(folder: Path) -> bool:
    return folder.resolve().parent == _demo_folder().resolve()


def shipped_text() -> Path:
    """Text held out from the shipped checkpoints' training, in the public domain."""
    file = _demo_folder() / "heldout.txt"
    if not file.is_file():
        raise CheckpointError(f"the installation lacks {file}")
    return file


def find_checkpoint(path: str | Path | None, *, weights: bool = True) -> Path:
    """A checkpoint folder as people name it: a path, the name of a shipped one, a name on the hub (`dsv4.hub`, which
    downloads it, without its weights if they are not wanted), or None for the default shipped one.

    A folder that exists is always meant before a shipped one of that name. A path that leads nowhere is returned as it
    is, for the reader to refuse.
    """
    if path is None:
        return shipped_checkpoint()
    folder = Path(path)
    if not folder.exists() and str(path) in (*shipped_names(), NVFP4_TWIN):
        return shipped_checkpoint(str(path))
    return fetch_checkpoint(str(path), byte_progress, weights=weights) if is_hub_name(path) else folder


def how_to_install(extra: str) -> str:
    """The command that adds an extra to this installation."""
    checkout = Path(str(resources.files("dsv4"))).parent
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e '.[{extra}]' in {checkout}"
    return f"pip install 'dsv4[{extra}]'"  # of what is there already: no index is asked for dsv4


def _demo_folder() -> Path:
    return Path(str(resources.files("dsv4"))) / "demo"
