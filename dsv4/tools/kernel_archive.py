"""Compiled kernels as one file, from Triton's cache on one machine into that of another with the same kind of GPU.

Binaries and what Triton wrote beside them, without the sources they were made from. Triton names a kernel's folder by a
hash of its own files and of the kernel. Where the second part was written down (`KEYS`, by tools/compile_ahead.py),
another build of the same Triton finds the folder under its own name; else both must have one build.
"""

import hashlib
import io
import json
import re
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from dsv4 import __version__
from dsv4.errors import Dsv4Error

KEYS = "keys.jsonl"
_MANIFEST = "manifest.json"
_FORMAT = 1
_FOLDER = re.compile(r"[A-Z2-7]{20,80}")
_FILE = re.compile(r"[\w.-]{1,200}\.(cubin|json)")
_MAX_FILE_BYTES = 2**28


class KernelArchiveError(Dsv4Error, ValueError):
    """A file of kernels that cannot be used here."""


@dataclass(frozen=True)
class Moved:
    """How many kernels were packed or unpacked, their bytes, and what is worth a word."""

    num_kernels: int
    num_bytes: int
    note: str = ""


def default_cache() -> Path:
    """Triton's, of this user."""
    from triton import knobs

    return Path(knobs.cache.dir)


def pack(cache: Path, file: Path) -> Moved:
    """Every kernel of Triton's cache that has a binary."""
    if not cache.is_dir():
        raise KernelArchiveError(f"{cache} is no folder: run the model once, or name Triton's cache with --cache")
    own_keys, kernels = _own_keys(cache), {}
    for folder in sorted(path for path in cache.iterdir() if path.is_dir() and _FOLDER.fullmatch(path.name)):
        files = [path for path in sorted(folder.iterdir()) if _is_kept(path.name)]
        if any(path.suffix == ".cubin" for path in files):
            kernels[folder.name] = files
    if not kernels:
        raise KernelArchiveError(f"{cache} holds no compiled kernel: run the model once on this machine's GPU")
    manifest = {
        "format": _FORMAT, "dsv4": __version__, **_here(), "targets": sorted(_targets(kernels)),
        "kernels": {
            name: {"own": own_keys.get(name), "files": {path.name: _digest(path.read_bytes()) for path in files}}
            for name, files in kernels.items()
        },
    }  # fmt: skip
    partial = file.with_name(f".{file.name}.partial")
    try:
        with tarfile.open(partial, "w:xz", preset=1) as archive:
            text = json.dumps(manifest).encode()
            entry = tarfile.TarInfo(_MANIFEST)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))
            for name, files in kernels.items():
                for path in files:
                    archive.add(path, f"{name}/{path.name}")
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    return Moved(len(kernels), file.stat().st_size)


def unpack(file: Path, cache: Path) -> Moved:
    """Into Triton's cache. `KernelArchiveError` for another Triton's kernels, and for a file that is damaged."""
    try:
        with tempfile.TemporaryDirectory() as temporary, tarfile.open(file) as archive:
            return _unpack(file, archive, Path(temporary), cache)
    except (tarfile.TarError, EOFError, json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, Dsv4Error):
            raise
        reason = str(error).splitlines()[0]
        raise KernelArchiveError(f"{file} is damaged, or no file of `dsv4 kernels pack`: {reason}") from None


def _unpack(file: Path, archive: tarfile.TarFile, folder: Path, cache: Path) -> Moved:
    first = archive.next()
    stream = None if first is None or first.name != _MANIFEST else archive.extractfile(first)
    manifest = None if stream is None else json.loads(stream.read(_MAX_FILE_BYTES))
    if manifest is None or manifest.get("format") != _FORMAT:
        raise KernelArchiveError(f"{file} is no file of this version's `dsv4 kernels pack`")
    _check_versions(file, manifest)
    kernels, num_bytes = manifest["kernels"], 0
    for entry in archive:
        if entry is first:
            continue
        name, _, part = entry.name.partition("/")
        known = kernels.get(name, {"files": {}})["files"]
        if not (entry.isfile() and _FOLDER.fullmatch(name) and part in known and _is_kept(part)):
            raise KernelArchiveError(f"{file}: {entry.name!r} does not belong there")
        data = (archive.extractfile(entry) or io.BytesIO()).read(_MAX_FILE_BYTES)
        if _digest(data) != known[part]:
            raise KernelArchiveError(f"{file}: {entry.name} is damaged; pack it again")
        (folder / name).mkdir(exist_ok=True)
        (folder / name / part).write_bytes(data)
        num_bytes += len(data)
    for name, kernel in kernels.items():
        if {path.name for path in (folder / name).glob("*")} != set(kernel["files"]):
            raise KernelArchiveError(f"{file} ends too early: kernel {name} is not whole; pack it again")
    for name, kernel in kernels.items():
        own = kernel["own"]
        _install(folder / name, cache / (name if own is None else folder_name(own)))
    note = ""
    if manifest["dsv4"] != __version__:
        note = f"packed by dsv4 {manifest['dsv4']}, this is {__version__}: kernels that differ are compiled again"
    return Moved(len(kernels), num_bytes, note)


def _check_versions(file: Path, manifest: dict[str, Any]) -> None:
    here = _here()
    if manifest["triton"] != here["triton"]:
        raise KernelArchiveError(
            f"{file} was packed with Triton {manifest['triton']}, and this is {here['triton']}: its kernels would "
            "never be found. Install that version, or pack on a machine with this one"
        )
    has_keys = all(kernel["own"] is not None for kernel in manifest["kernels"].values())
    if manifest["build"] != here["build"] and not has_keys:
        raise KernelArchiveError(
            f"{file} was packed with another build of Triton {here['triton']}: its kernels would never be found. "
            "Install the same wheel on both machines"
        )


def _install(folder: Path, target: Path) -> None:
    """As Triton would have left them: a group says where its files are."""
    target.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        partial = target / f".{path.name}.partial"
        partial.write_bytes(path.read_bytes())
        partial.replace(target / path.name)
    group = {"child_paths": {path.name: str(target / path.name) for path in folder.iterdir()}}
    described = next(path.name for path in folder.iterdir() if path.suffix == ".json")
    (target / f"__grp__{described}").write_text(json.dumps(group), encoding="utf-8")


def _is_kept(name: str) -> bool:
    return _FILE.fullmatch(name) is not None and not name.startswith("__grp__")


def _own_keys(cache: Path) -> dict[str, str]:
    if not (cache / KEYS).is_file():
        return {}
    return dict(map(json.loads, (cache / KEYS).read_text(encoding="utf-8").splitlines()))


def _targets(kernels: dict[str, list[Path]]) -> Iterator[str]:
    """The architectures that the binaries are for."""
    found = set()
    for files in kernels.values():
        for path in files:
            if path.suffix == ".json":
                target = json.loads(path.read_text(encoding="utf-8")).get("target", {})
                found.add(f"{target.get('backend')} {target.get('arch')}")
    yield from found


def folder_name(own: str) -> str:
    """Of a kernel's folder, by this machine's Triton."""
    from triton.runtime import cache

    name: str = cache._base32(hashlib.sha256((cache.triton_key() + own).encode()).hexdigest())
    return name


def _here() -> dict[str, str]:
    from triton.runtime import cache

    return {"triton": metadata.version("triton"), "build": _digest(cache.triton_key().encode())}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
