"""`dsv4 cache`: look at, check and delete the files of a prefix cache (`dsv4 serve --cache-dir`). Needs no model."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from dsv4.cache.tiers.disk import LOCK_NAME
from dsv4.cache.tiers.segment_file import SUFFIX, Label, SegmentFileError, read_label, verify_file
from dsv4.config import BLOCK_TOKENS, ConfigError

cache_app = typer.Typer(help="List, verify and delete the files of a prefix cache.", no_args_is_help=True)
DirectoryArgument = Annotated[Path, typer.Argument(help="The folder given to dsv4 serve as --cache-dir.")]


@dataclass(frozen=True)
class _Found:
    """A file, and what it says it is, or why it is nothing."""

    path: Path
    num_bytes: int
    label: Label | None
    problem: str | None


@cache_app.command("ls")
def ls_command(directory: DirectoryArgument) -> None:
    """One line a prefix: the model it belongs to, its tokens, its bytes. Reads headers only."""
    console = Console(soft_wrap=True)
    table = Table(
        "model", "key", Column("tokens", justify="right"), Column("bytes", justify="right"), "after", box=None
    )
    total, bad = 0, []
    for found in _files(directory):
        total += found.num_bytes
        if found.label is None:
            bad.append(found)
            continue
        label = found.label
        after = label.parent[:12] or "-"
        tokens = f"{label.end * BLOCK_TOKENS:,}"
        table.add_row(label.fingerprint[:12], label.key[:12], tokens, f"{found.num_bytes:,}", after)
    console.print(table)
    for found in bad:
        console.print(f"not usable: {found.problem}", markup=False, highlight=False)
    console.print(f"{table.row_count} prefixes, {len(bad)} unusable files, {total:,} bytes", highlight=False)


@cache_app.command("verify")
def verify_command(directory: DirectoryArgument) -> None:
    """Read every file and compare checksums. Exit code 1 if any is damaged."""
    console = Console(soft_wrap=True)
    count, num_bad = 0, 0
    for found in _files(directory):
        count += 1
        try:
            verify_file(found.path)
        except SegmentFileError as error:
            num_bad += 1
            console.print(str(error), markup=False, highlight=False)
    console.print(f"{count} files, {num_bad} damaged or foreign", highlight=False)
    if num_bad:
        raise typer.Exit(1)


@cache_app.command("rm")
def rm_command(
    directory: DirectoryArgument,
    damaged: Annotated[bool, typer.Option("--damaged", help="Only files that `verify` reports.")] = False,
) -> None:
    """Delete the cache's files; nothing else in the folder is touched. Refused while a server writes there."""
    count = 0
    for folder in _folders(directory):
        with _locked(folder):
            for path in _paths(folder):
                if damaged and _is_whole(path):
                    continue
                path.unlink()
                count += 1
    typer.echo(f"deleted {count} files")


def _folders(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a folder; expected the --cache-dir of a server")
    return sorted(folder for folder in directory.iterdir() if folder.is_dir() and (folder / LOCK_NAME).is_file())


def _paths(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in (SUFFIX, ".tmp") and path.is_file())


def _files(directory: Path) -> Iterator[_Found]:
    for folder in _folders(directory):
        for path in _paths(folder):
            num_bytes = path.stat().st_size
            try:
                label, _ = read_label(path)
            except SegmentFileError as error:
                yield _Found(path, num_bytes, None, str(error))
            else:
                yield _Found(path, num_bytes, label, None)


def _is_whole(path: Path) -> bool:
    try:
        verify_file(path)
    except SegmentFileError:
        return False
    return True


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The folder's lock, which a running server holds."""
    handle = os.open(folder / LOCK_NAME, os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ConfigError(f"{folder} is in use: stop the server that writes there first") from None
    finally:
        os.close(handle)
