"""Every known way to get a prefix cache wrong must show in one short life of a cache, which passes as the code stands.

Rows carry labels as in test_prefix_life.py; here the life is written down, so that each mistake is met for certain.
"""

import logging

import pytest
from prefix_mistakes import MISTAKES
from row_cases import check_rows, write_rows
from test_prefix_life import MAX_CONTEXT, admit_read, chain_labels, make_manager, poison

from dsv4.cache.errors import CacheError
from dsv4.cache.tiers.segment_file import file_name

STEM = [7] * 128 + [8] * 128 + [9] * 44
LONG = STEM + [10] * 300


class Life:
    """One manager after another over one folder; every request is checked row by row, beside NaN."""

    def __init__(self, folder):
        self.folder = folder
        self.manager = self.open()

    def open(self, fingerprint="tests", **changes):
        settings = {"slack": 3, "num_snapshots": 9, "host_units": 80, "disk_files": 100, **changes}
        return make_manager(self.folder, *settings.values(), fingerprint=fingerprint)

    def restart(self, **changes):
        self.manager.close()
        self.manager = self.open(**changes)

    def start(self, tokens, salt=None, model=None):
        """A request's slot and its labels, what it took over checked."""
        manager = self.manager
        labels = chain_labels((salt, model), tokens)
        slot = admit_read(manager, MAX_CONTEXT, manager.chain(tokens, salt))
        assert manager.position(slot) < len(tokens), "the last token is fed again"
        self.check(slot, labels)
        return slot, labels

    def check(self, slot, labels):
        self.manager.check_integrity()
        poison(self.manager)
        check_rows(self.manager, slot, labels[: self.manager.position(slot)])

    def feed(self, slot, tokens, labels, end):
        manager, position = self.manager, self.manager.position(slot)
        manager.make_batch([slot], [tokens[position:end]])
        write_rows(manager, slot, labels[:end], end - position)

    def serve(self, tokens, salt=None, model=None):
        """From start to end; how much came from the cache."""
        slot, labels = self.start(tokens, salt, model)
        begin = self.manager.position(slot)
        while self.manager.position(slot) < len(tokens):
            self.feed(slot, tokens, labels, min(len(tokens), self.manager.next_stop(slot)))
            self.manager.launched(slot)
            self.check(slot, labels)
        self.manager.release(slot)
        self.manager.check_integrity()
        return begin

    def evict(self):
        self.manager.prefix.tree.make_room(self.manager.schema.num_blocks)
        poison(self.manager)

    def file_of(self, tokens, num_blocks):
        return self.folder / "tests" / file_name(self.manager.chain(tokens, None).first(num_blocks)[-1].hex())

    # ---- chapters ----

    def on_the_device(self):
        assert [self.serve(STEM), self.serve(STEM), self.serve(STEM, salt="x")] == [0, 256, 0]
        assert [self.serve(STEM[:256]), self.serve(STEM[:256])] == [0, 128]
        assert self.serve(STEM[128:256] + STEM[:128] + STEM[:44]) == 0

    def together(self):
        first, labels = self.start(STEM)
        second, _ = self.start(STEM)
        self.manager.release(first)
        self.check(second, labels)
        self.evict()
        self.check(second, labels)
        self.feed(second, STEM, labels, 300)
        self.check(second, labels)
        self.manager.release(second)

    def failed(self):
        """The call that drew token 128 failed: what it wrote is anything, and nobody may start from it."""
        tokens, wrong = [3] * 127, chain_labels("wrong", [3] * 128)
        slot, labels = self.start(tokens)
        self.feed(slot, tokens, labels, 127)
        self.feed(slot, [3] * 128, wrong, 128)
        self.manager.launched(slot)
        tokens += [3]
        self.manager.release(slot, keep=False)
        assert self.serve([3] * 150) == 0

    def with_drafts(self):
        """Three drafts, one taken: a snapshot of the others was of tokens that never were."""
        known = [11] * 254
        slot, _ = self.start(known)
        self.feed(slot, known, chain_labels((None, None), known), 254)
        self.manager.launched(slot)
        drafted = [*known, 5, 6, 6, 6]
        self.feed(slot, drafted, chain_labels((None, None), drafted), 258)
        self.manager.launched(slot)
        self.manager.rewind(slot, 255)
        real = [*known, 5, 7]
        known += [5]
        self.feed(slot, real, chain_labels((None, None), real), 256)
        known += [7]
        self.manager.launched(slot)
        self.manager.release(slot)
        assert self.serve([*known, 4]) == 256

    def past_the_mark(self):
        """A call that ends too far behind a multiple of 128 leaves no snapshot there."""
        tokens = [12] * 140
        slot, labels = self.start(tokens)
        self.feed(slot, tokens, labels, 140)
        self.manager.launched(slot)
        self.manager.release(slot)
        assert self.serve(tokens) == 0

    def below_the_device(self):
        assert [self.serve(LONG), self.serve(LONG)] == [256, 512]
        self.evict()
        assert self.serve(STEM) == 256
        assert self.serve(LONG) == 512
        self.restart()
        assert self.serve(LONG) == 512
        assert self.manager.prefix.stats.num_disk_hits == 1
        self.restart(num_snapshots=1, host_units=6)
        assert self.serve(STEM) == 256

    def another_model(self):
        self.restart(fingerprint="other")
        assert self.serve(STEM, model="other") == 0
        self.restart()

    def damaged(self):
        for end, expected in ((4, 256), (2, 0)):
            self.restart()
            file = self.file_of(LONG, end)
            content = file.read_bytes()
            data = 8 + int.from_bytes(content[:8], "little")
            file.write_bytes(content[:data] + bytes(byte ^ 1 for byte in content[data:]))
            assert self.serve(LONG) == expected

    def swapped_files(self):
        """Two files that have each other's content, in every byte."""
        self.serve([13] * 300)
        self.serve([14] * 300)
        self.manager.close()
        one, other = self.file_of([13] * 300, 2), self.file_of([14] * 300, 2)
        content = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(content)
        self.manager = self.open()
        assert [self.serve([13] * 300), self.serve([14] * 300)] == [0, 0]

    def scarce(self):
        self.restart(num_snapshots=2, host_units=8, disk_files=3)
        for round_idx in range(6):
            slot, labels = self.start(STEM)
            self.serve([20 + round_idx] * 400)
            self.check(slot, labels)
            self.manager.release(slot)
            self.manager.tiers.flush()
            held = sum(file.stat().st_size for file in self.folder.glob("tests/*.safetensors"))
            assert held <= self.manager.limits.cache_disk_bytes


CHAPTERS = (
    Life.on_the_device, Life.together, Life.failed, Life.with_drafts, Life.past_the_mark, Life.below_the_device,
    Life.another_model, Life.damaged, Life.swapped_files, Life.scarce,
)  # fmt: skip


def live(folder):
    """None, or the chapter in which something was wrong."""
    life = None
    for chapter in CHAPTERS:
        try:
            life = life or Life(folder)
            chapter(life)
            life.manager.check_integrity()
        except (AssertionError, CacheError) as error:
            logging.getLogger(__name__).info("%s: %r", chapter.__name__, error)
            return chapter.__name__
    life.manager.close()
    return None


def test_nothing_is_wrong(tmp_path):
    assert live(tmp_path) is None


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_seen(mistake, tmp_path, monkeypatch):
    mistake(monkeypatch)
    assert live(tmp_path) is not None, mistake.__doc__
