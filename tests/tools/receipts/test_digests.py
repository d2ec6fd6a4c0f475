"""Digests of all bytes of a checkpoint: computed once for a file that stays as it is."""

from __future__ import annotations

import os

import pytest

from dsv4.config import ModelConfig
from dsv4.loader.checkpoint import Checkpoint
from dsv4.loader.write.synth import write_checkpoint
from dsv4.tools.receipts import digests
from dsv4.tools.receipts.digests import checkpoint_parts

CONFIG = ModelConfig.tiny()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("digests") / "tiny", CONFIG, shard_bytes=1 << 20)


@pytest.fixture(autouse=True)
def read(monkeypatch, tmp_path):
    """Names of tensors that were read, and a cache folder of the test's own."""
    names, original = [], digests._tensor_digest
    monkeypatch.setattr(digests, "_tensor_digest", lambda info: names.append(info.name) or original(info))
    monkeypatch.setattr(digests, "_SETTLED_SECONDS", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return names


def parts_of(folder):
    return checkpoint_parts(Checkpoint.open(folder), CONFIG)


def test_a_file_is_read_once(folder, read):
    first, count = parts_of(folder), len(Checkpoint.open(folder).tensors)
    assert len(read) == count
    assert parts_of(folder) == first
    assert len(read) == count, "what is known was read again"


def test_another_byte_is_another_digest(folder, read):
    """Also where size and time of the file are what they were."""
    before = parts_of(folder)
    info = next(one for name, one in Checkpoint.open(folder).tensors.items() if name.startswith("layers.1."))
    times = info.file.stat()
    with info.file.open("r+b") as stream:
        stream.seek(info.start)
        byte = stream.read(1)
        stream.seek(info.start)
        stream.write(bytes([byte[0] ^ 1]))
    os.utime(info.file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert info.file.stat().st_mtime_ns == times.st_mtime_ns
    read.clear()
    after = parts_of(folder)
    assert {unit for unit in after if after[unit] != before[unit]} == {"layers.1"}
    in_file = {name for name, one in Checkpoint.open(folder).tensors.items() if one.file == info.file}
    assert set(read) == in_file < set(Checkpoint.open(folder).tensors), "of other files nothing is read"


@pytest.mark.parametrize("way", ["just written", "changed meanwhile", "no folder", "damaged"])
def test_what_is_not_certain_is_not_kept(folder, read, monkeypatch, tmp_path, way):
    if way == "just written":
        monkeypatch.setattr(digests, "_SETTLED_SECONDS", 1e9)
    elif way == "changed meanwhile":
        original = digests._tensor_digest
        monkeypatch.setattr(digests, "_tensor_digest", lambda info: os.utime(info.file) or original(info))
    elif way == "no folder":
        (tmp_path / "cache").write_text("a file")
    first, count = parts_of(folder), len(read)
    if way == "damaged":
        for file in (tmp_path / "cache").rglob("*.json"):
            file.write_text('{"half": ')
    assert parts_of(folder) == first
    assert len(read) == 2 * count
