"""Checkpoints by their name on a hub: `deepseek-ai/DeepSeek-V4-Flash`, downloaded once and checked. No torch.

A name may carry a revision: `ORG/NAME@main`. huggingface_hub does the transfer, into its own cache (HF_HOME) from
HF_ENDPOINT, with HF_TOKEN where a model is gated. Sizes and SHA-256 of what was fetched are compared with what the hub
says before any of it is read. A whole file in the cache is not fetched again; one whose connection broke is fetched on
from there, by the same command. Without a connection the cache serves.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4.errors import Dsv4Error

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_CHECKED = "dsv4-checked.json"  # beside the files of a model in the hub's cache: those whose bytes were compared
INDEX_FILE = "model.safetensors.index.json"
_SLACK_BYTES = 2**28  # left free on the disk
_PIECE_BYTES = 2**24
_GIB = 2**30
Bar = Callable[[bool, int, str], AbstractContextManager[Callable[[int], None]]]  # loader/progress.py


class HubError(Dsv4Error, ValueError):
    """A checkpoint that a hub does not give, or gave damaged."""


@dataclass(frozen=True)
class HubFile:
    """A file as the hub describes it. `sha256` is None for small files, which it keeps without one."""

    name: str
    size: int
    sha256: str | None


def is_hub_name(path: str | Path) -> bool:
    """Whether this can only mean a model on a hub: `ORG/NAME`, and nothing of that name is on the disk."""
    text = str(path)
    return _NAME.fullmatch(text) is not None and not Path(text).exists()


def fetch_checkpoint(name: str, bar: Bar, *, weights: bool = True) -> Path:
    """The folder of a model, with every file that dsv4 reads, checked; `weights` False: only the small ones."""
    repository, _, revision = name.partition("@")
    with _explained(repository, revision):
        return _fetch(repository, revision or None, weights, bar)


def _fetch(repository: str, revision: str | None, weights: bool, bar: Bar) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    try:
        info = HfApi(endpoint=os.environ.get("HF_ENDPOINT")).model_info(
            repository, revision=revision, files_metadata=True
        )
    except Exception as error:
        if not _is_unreachable(error):
            raise
        return _cached(repository, revision, weights, error)
    listed = {one.rfilename: one for one in info.siblings or ()}
    if "config.json" not in listed:
        raise HubError(f"{repository} has no config.json: expected a checkpoint of DeepSeek-V4")
    files = [
        HubFile(name, one.size or 0, None if one.lfs is None else one.lfs.sha256)
        for name, one in listed.items()
        if name.endswith(".json" if not weights else (".json", ".safetensors")) and "/" not in name
    ]
    if weights and not any(file.name.endswith(".safetensors") for file in files):
        raise HubError(f"{repository} has no .safetensors files: expected the weights in that format")
    folder = _cache_folder(repository)
    if weights and INDEX_FILE in listed:  # before the shards: it may name one that is not there
        small = Path(snapshot_download(repository, revision=info.sha, allow_patterns=[INDEX_FILE]))
        _check_index(repository, small / INDEX_FILE, listed)
    _check_disk(repository, folder, files, str(info.sha))
    snapshot = Path(snapshot_download(repository, revision=info.sha, allow_patterns=[file.name for file in files]))
    if revision is None or revision != info.sha:  # so that the same name is found without a connection
        reference = folder / "refs" / (revision or "main")
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(str(info.sha), encoding="ascii")
    check_files(repository, snapshot, files, folder / _CHECKED, bar)
    return snapshot


def _check_index(repository: str, index: Path, listed: Collection[str]) -> None:
    try:
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return  # the reader says what is wrong with it
    missing = sorted(named - set(listed))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise HubError(
            f"{repository} is incomplete on the hub: its index names {missing[0]}{more}, and it has no such file"
        )


def check_files(repository: str, snapshot: Path, files: Sequence[HubFile], record: Path, bar: Bar) -> None:
    """Sizes of all, SHA-256 of those not compared before; a damaged file is deleted and named."""
    known: dict[str, Any] = {}
    if record.is_file():
        known = json.loads(record.read_text(encoding="utf-8"))
    fresh: list[tuple[HubFile, Path]] = []
    for file in files:
        place = snapshot / file.name
        if not place.is_file():
            raise HubError(f"{repository}: {file.name} is missing in {snapshot}: run the command again")
        stat = place.stat()
        if stat.st_size != file.size:
            _delete(place)
            raise HubError(
                f"{repository}: {file.name} should have {file.size:,} bytes, found {stat.st_size:,}; it was deleted: "
                "run the command again"
            )
        if file.sha256 is not None and known.get(file.sha256) != [stat.st_size, stat.st_mtime_ns]:
            fresh.append((file, place))
    for file, place, found in _hashed(fresh, bar):
        if found != file.sha256:
            _delete(place)
            raise HubError(
                f"{repository}: {file.name} is damaged: SHA-256 should be {file.sha256}, found {found}; it was "
                "deleted: run the command again"
            )
        stat = place.stat()
        known[str(file.sha256)] = [stat.st_size, stat.st_mtime_ns]
    if fresh:
        record.write_text(json.dumps(known), encoding="utf-8")


def _hashed(fresh: Sequence[tuple[HubFile, Path]], bar: Bar) -> Iterator[tuple[HubFile, Path, str]]:
    """On several cores, with a bar."""
    with bar(bool(fresh), sum(file.size for file, _ in fresh), "checking files") as advance:

        def digest(place: Path) -> str:
            state = hashlib.sha256()
            with place.open("rb") as stream:
                while piece := stream.read(_PIECE_BYTES):
                    state.update(piece)
                    advance(len(piece))
            return state.hexdigest()

        with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
            digests = pool.map(digest, [place for _, place in fresh])
            for (file, place), found in zip(fresh, digests, strict=True):
                yield file, place, found


def _delete(place: Path) -> None:
    """The link of a snapshot, and the bytes it leads to."""
    place.resolve().unlink(missing_ok=True)
    place.unlink(missing_ok=True)


def _cache_folder(repository: str) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"


def _check_disk(repository: str, folder: Path, files: Sequence[HubFile], commit: str) -> None:
    """Before the first byte: a download that cannot end takes an hour to find out otherwise."""
    snapshot, blobs = folder / "snapshots" / commit, folder / "blobs"
    # equal files, and those of another revision, are one blob
    needed = sum(
        {
            file.sha256 or file.name: file.size
            for file in files
            if not (snapshot / file.name).exists() and not (blobs / (file.sha256 or "-")).exists()
        }.values()
    )
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if needed and needed + _SLACK_BYTES > free:
        raise HubError(
            f"{repository}: {needed / _GIB:,.1f} GiB are to be downloaded, and the disk of {existing} has "
            f"{free / _GIB:,.1f} GiB free: make room, or set HF_HOME to a folder on a larger disk"
        )


def _cached(repository: str, revision: str | None, weights: bool, error: Exception) -> Path:
    """What an earlier download left, where the hub cannot be asked."""
    folder = _cache_folder(repository)
    name = revision or "main"
    reference = folder / "refs" / name
    commit = reference.read_text(encoding="ascii").strip() if reference.is_file() else name
    snapshot = folder / "snapshots" / commit
    there = {file.name for file in snapshot.glob("*")}
    if "config.json" not in there or (weights and not any(file.endswith(".safetensors") for file in there)):
        raise HubError(
            f"{repository} is not in the cache ({folder}), and the hub cannot be reached: {_first_line(error)}; "
            "connect once, or give a folder"
        )
    return snapshot


def _is_unreachable(error: Exception) -> bool:
    """No answer at all, or downloads are switched off (HF_HUB_OFFLINE)."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return error.response is not None and error.response.status_code >= 500
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, ConnectionError) or bool(names & {"OfflineModeIsEnabled", "TransportError"})


@contextmanager
def _explained(repository: str, revision: str) -> Iterator[None]:
    """What the library raises, as a sentence that says what to do."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError:
        raise HubError(
            f"{repository} is gated: accept its conditions on its page, then set HF_TOKEN to a token of that account"
        ) from None
    except errors.RevisionNotFoundError:
        raise HubError(f"{repository} has no revision {revision!r}: see its branches and tags on its page") from None
    except errors.RepositoryNotFoundError:
        raise HubError(
            f"{repository} is neither a folder here nor a model on the hub; a private one needs HF_TOKEN"
        ) from None
    except errors.HfHubHTTPError as error:
        raise HubError(f"{repository}: the hub answered: {_first_line(error)}") from None
    except HubError:
        raise
    except OSError as error:
        raise HubError(f"{repository}: the download failed: {_first_line(error)}; run the command again") from None
    except Exception as error:  # a transport's own errors have no common base
        if not _is_unreachable(error):
            raise
        raise HubError(f"{repository}: the download broke off: {_first_line(error)}; run the command again") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
