"""Files that lines are appended to: whole lines or none, bounded, private; a disk that fails holds nobody up."""

import logging
import os
import stat
import threading

import pytest
from msgspec.structs import replace

from dsv4.config import ConfigError
from dsv4.request import SamplingParams
from dsv4.tools.receipts import files as files_module
from dsv4.tools.receipts import recorder as recorder_module
from dsv4.tools.receipts.files import RecordFile, read_record, rotated
from dsv4.tools.receipts.lines import Answer, Gap, Header, Receipt, RecordError
from dsv4.tools.receipts.recorder import Recorder

HEADER = Header(identity={"checkpoint": "c"}, parts={}, model=None, settings={}, time="t")


def answer(number, **fields):
    """An answer whose first token says which it is."""
    return Answer(**{
        "prompt": (1, 2), "params": SamplingParams(seed=number), "output": (number, 7), "finish": "length", **fields,
    })  # fmt: skip


def open_file(path, max_bytes=2**20, num_files=3):
    return RecordFile(path, max_bytes=max_bytes, num_files=num_files)


def read(*paths):
    """The numbers of the answers, gaps as negative numbers, and the damage."""
    damage = []
    entries = [entry for _, _, entry in read_record(paths, lambda path, number, why: damage.append(number))]
    numbers = [-entry.num_lost if isinstance(entry, Gap) else entry.output[0] for entry in entries]
    return numbers, damage


@pytest.fixture
def path(tmp_path):
    return tmp_path / "receipts.jsonl"


def test_lines_are_private_and_in_order(path):
    before = os.umask(0)
    try:
        with Recorder(open_file(path), HEADER) as recorder:
            for number in range(50):
                recorder.add(answer(number), request_id=f"r{number}", route="/v1", choice=2)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read(path) == (list(range(50)), [])
    (_, header, receipt), *_ = read_record([path])
    assert header == HEADER
    assert (receipt.line, receipt.request_id, receipt.choice) == (2, "r0", 2)


def test_what_is_nothing_to_prove_is_not_written(path):
    with Recorder(open_file(path), HEADER) as recorder:
        recorder.add(answer(0, output=(), finish="disconnected"))
        recorder.add(answer(1, finish="disconnected"))
        recorder.add(answer(2, output=(), finish="length", prompt_logprobs=(None,)))  # a score
    entries = [entry for _, _, entry in read_record([path])]
    assert [(entry.finish, entry.num_output) for entry in entries] == [("disconnected", 2), ("length", 0)]


def test_a_restart_goes_on_after_half_a_line(path):
    with Recorder(open_file(path), HEADER) as recorder:
        recorder.add(answer(0))
    with path.open("ab") as file:
        file.write(path.read_bytes().splitlines()[1][:100])  # killed in the middle
    assert read(path) == ([0], [3])
    os.chmod(path, 0o644)
    with Recorder(open_file(path), replace(HEADER, time="later")) as recorder:
        recorder.add(answer(1))
    assert read(path) == ([0, 1], [3])
    assert [header.time for _, header, _ in read_record([path])] == ["t", "later"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_it_is_bounded(path):
    with Recorder(open_file(path, max_bytes=4000), HEADER) as recorder:
        for number in range(100):
            recorder.add(answer(number))
        recorder.add(answer(100, prompt=tuple(range(3000))))  # longer than a file may be: alone in one
        recorder.add(answer(101))
    kept = [rotated(path, number) for number in (2, 1, 0)]
    assert not rotated(path, 3).exists()
    numbers, damage = read(*kept)
    assert damage == []
    assert numbers == list(range(numbers[0], 102)), "the newest, without a hole"
    assert numbers[0] > 80
    assert kept[0].stat().st_size <= 4000
    assert kept[1].stat().st_size > 4000


def test_one_file_is_kept(path):
    with Recorder(open_file(path, max_bytes=3000, num_files=1), HEADER) as recorder:
        for number in range(20):
            recorder.add(answer(number))
    assert sorted(one.name for one in path.parent.iterdir()) == [path.name]
    assert path.stat().st_size <= 3000
    assert read(path)[0][-1] == 19


def test_what_is_not_ours_is_refused(path, tmp_path):
    path.write_text("precious\n")
    with pytest.raises(ConfigError, match="not a record"):
        open_file(path)
    assert path.read_text() == "precious\n"
    with pytest.raises(ConfigError, match="cannot be written to"):
        open_file(tmp_path)
    with pytest.raises(ConfigError, match="cannot be written to"):
        open_file(tmp_path / "nowhere" / "file")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="not a regular file"):
        open_file(tmp_path / "pipe")
    with pytest.raises(RecordError, match="not a record"):
        read(path)
    first = open_file(tmp_path / "shared")
    with pytest.raises(ConfigError, match="another process"):
        open_file(tmp_path / "shared")
    first.close()
    open_file(tmp_path / "shared").close()


def test_a_file_that_was_moved_or_deleted_is_begun_anew(path):
    recorder = Recorder(open_file(path), HEADER)
    for number, remove in enumerate((lambda: path.rename(path.with_name("moved")), path.unlink, lambda: None)):
        recorder.add(answer(number))
        recorder._queue.join()
        remove()
    recorder.close()
    assert read(path.with_name("moved")) == ([0], [])
    assert read(path) == ([2], [])


@pytest.mark.parametrize("written", [0, 10])
def test_a_full_disk_is_told_once_and_counted(path, monkeypatch, caplog, written):
    """Some bytes of a line fit, or none: what is in the file stays whole lines."""
    caplog.set_level(logging.WARNING, logger="dsv4.receipts")  # a server elsewhere may have set its own
    real_write, is_full = os.write, threading.Event()

    def write(handle, data):
        if is_full.is_set():
            if written and len(data) > written:
                return real_write(handle, data[:written])
            raise OSError(28, "No space left on device")
        return real_write(handle, data)

    monkeypatch.setattr(files_module.os, "write", write)
    recorder = Recorder(open_file(path), HEADER)
    recorder.add(answer(0))
    recorder._queue.join()
    is_full.set()
    for number in range(1, 6):
        recorder.add(answer(number))
    recorder._queue.join()
    assert read(path) == ([0], [])
    is_full.clear()
    for number in range(6, 9):
        recorder.add(answer(number))
    recorder.close()
    assert read(path) == ([0, -5, 6, 7, 8], [])
    said = [(one.levelno, one.getMessage()) for one in caplog.records if one.name == "dsv4.receipts"]
    assert [level for level, _ in said] == [logging.ERROR, logging.WARNING]
    assert "No space left on device" in said[0][1]
    assert "5 requests before are missing" in said[1][1]


def test_a_disk_that_hangs_holds_nobody_up(path, monkeypatch, caplog):
    hangs, real_append = threading.Event(), RecordFile.append

    def append(self, line):
        assert hangs.wait(20)
        real_append(self, line)

    monkeypatch.setattr(recorder_module, "_MAX_PENDING", 10)
    monkeypatch.setattr(RecordFile, "append", append)
    recorder = Recorder(open_file(path), HEADER)
    for number in range(40):
        recorder.add(answer(number))
    hangs.set()
    recorder._queue.join()
    recorder.add(answer(40))
    recorder.close()
    numbers, damage = read(path)
    lost = -sum(number for number in numbers if number < 0)
    kept = [number for number in numbers if number >= 0]
    assert damage == []
    assert lost >= 28
    assert len(kept) + lost == 41
    assert kept == sorted(kept)
    assert [one.levelno for one in caplog.records].count(logging.ERROR) == 1


def test_reading_says_what_it_skips(path):
    with Recorder(open_file(path), HEADER) as recorder:
        for number in range(4):
            recorder.add(answer(number))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[1] + lines[0] + b"\n" + lines[2][:50] + b"\n" + lines[3] + b"\xff\x00\n" + lines[4][:-9])
    assert read(path) == ([2], [1, 4, 6, 7])
    assert all(isinstance(entry, (Receipt, Gap)) for _, _, entry in read_record([path]))
