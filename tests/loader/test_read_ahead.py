"""Tensors read ahead of their use: every byte in order, bounded memory, mistakes named."""

from __future__ import annotations

import random
import weakref
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from dsv4.loader import read_ahead as module
from dsv4.loader.header import CheckpointError
from dsv4.loader.read_ahead import Span, read_ahead


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "data"
    file.write_bytes(random.Random(1).randbytes(100_000))
    return file


def span(file, start, end, dtype=torch.uint8):
    return Span("x", file, start, end, dtype, ((end - start) // dtype.itemsize,))


def ranges(count):
    source = random.Random(2)
    ends = sorted(source.sample(range(100_001), count))
    pairs = list(pairwise(ends))
    return [*pairs, *source.sample(pairs, count // 2), (7, 7)]  # end to end, then anywhere; and an empty one


@pytest.mark.parametrize("together", [0, 100, 5000, 10**6])
@pytest.mark.parametrize("ahead", [0, 3000, 10**7])
def test_every_byte_in_order(file, monkeypatch, together, ahead):
    monkeypatch.setattr(module, "TOGETHER_BYTES", together)
    monkeypatch.setattr(module, "AHEAD_BYTES", ahead)
    monkeypatch.setattr(module, "PIECE_BYTES", 777)
    data = file.read_bytes()
    pairs = ranges(60)
    owners = [(place, tuple(span(file, *pair) for pair in pairs[place : place + 2])) for place in range(len(pairs))]
    for place, (owner, parts) in enumerate(read_ahead(owners)):
        assert owner == place
        assert [bytes(part.numpy()) for part in parts] == [data[a:b] for a, b in pairs[place : place + 2]]


def test_dtypes_at_any_byte(file):
    """A file may put fp32 anywhere; a read that begins there still gives numbers."""
    spans = (span(file, 0, 3), span(file, 3, 43, torch.float32), span(file, 43, 45, torch.bfloat16))
    ((_, (first, second, third)),) = read_ahead([("a", spans)])
    data = file.read_bytes()
    assert bytes(first.numpy()) == data[:3]
    assert bytes(second.view(torch.uint8).numpy()) == data[3:43]
    assert bytes(third.view(torch.uint8).numpy()) == data[43:45]


def test_memory_is_bounded(file, monkeypatch):
    monkeypatch.setattr(module, "TOGETHER_BYTES", 1000)
    monkeypatch.setattr(module, "AHEAD_BYTES", 4000)
    sizes, alive, empty = set(), weakref.WeakSet(), torch.empty

    def make(*size, **options):
        made = empty(*size, **options)
        sizes.add(size)
        alive.add(made)
        return made

    monkeypatch.setattr(module.torch, "empty", make)
    most = 0
    for _ in read_ahead((place, (span(file, place, place + 100),)) for place in range(0, 100_000, 100)):
        most = max(most, len(alive))
    assert 4 <= most <= 7
    assert sizes == {(1000,)}, "of one size: pinned memory is used again"


def test_mistakes_name_the_file(file, tmp_path):
    with pytest.raises(CheckpointError, match="data changed while it was open: it ends at byte 100000"):
        list(read_ahead([(0, (span(file, 99_000, 101_000),))]))
    with pytest.raises(CheckpointError, match="nothing cannot be read: "):
        list(read_ahead([(0, (span(tmp_path / "nothing", 0, 5),))]))
    with pytest.raises(CheckpointError, match="reading 5 bytes at 0 failed"):
        list(read_ahead([(0, (span(tmp_path, 0, 5),))]))


def test_whoever_stops_early_leaves_nothing_open(file):
    before = len(list(Path("/proc/self/fd").iterdir()))
    found = read_ahead((place, (span(file, place, place + 1),)) for place in range(1000))
    next(found)
    found.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
