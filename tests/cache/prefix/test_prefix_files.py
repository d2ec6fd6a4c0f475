"""What may happen to the files of a prefix cache: no wrong row, no crash, and a message that names the file."""

import errno
import logging
import os
import time

import pytest
from row_cases import check_rows, write_rows
from safetensors import safe_open
from test_prefix_life import MAX_CONTEXT, admit_read, chain_labels, make_manager
from typer.testing import CliRunner

from dsv4.cache.tiers import segment_file
from dsv4.cache.tiers.segment_file import SegmentFileError, verify_file
from dsv4.cli.main import app

TOKENS = [7] * 128 + [8] * 128 + [9] * 44
LABELS = chain_labels(None, TOKENS)


def open_manager(folder, **changes):
    settings = {"slack": 0, "num_snapshots": 9, "host_units": 40, "disk_files": 100, **changes}
    return make_manager(folder, *settings.values())


def serve(manager, tokens=TOKENS):
    """A request from start to end; how much of it came from the cache. Its rows are right, or the test fails."""
    labels = chain_labels(None, tokens)
    slot = admit_read(manager, MAX_CONTEXT, manager.chain(tokens, None))
    start = position = manager.position(slot)
    check_rows(manager, slot, labels[:position])
    while position < len(tokens):
        end = min(len(tokens), manager.next_stop(slot))
        manager.make_batch([slot], [tokens[position:end]])
        write_rows(manager, slot, labels[:end], end - position)
        manager.launched(slot)
        position = end
    check_rows(manager, slot, labels)
    manager.release(slot)
    manager.check_integrity()
    return start


@pytest.fixture
def filled(tmp_path):
    manager = open_manager(tmp_path)
    assert (serve(manager), serve(manager)) == (0, 256)
    manager.close()
    return tmp_path


def files_of(folder):
    return sorted(folder.rglob("*.safetensors"))


def test_a_file_is_found_again_and_is_plain_safetensors(filled):
    (file,) = files_of(filled)
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata()["format"] == segment_file.FORMAT
        for name in opened.keys():  # noqa: SIM118
            assert not opened.get_tensor(name).isnan().any()
    manager = open_manager(filled)
    assert serve(manager) == 256
    assert (manager.prefix.stats.num_disk_hits, manager.tiers.disk.num_bad) == (1, 0)
    manager.close()


def test_every_region_of_a_file_flipped(filled, caplog):
    """Length, header, padding, every tensor's ends, and the last byte."""
    (file,) = files_of(filled)
    content = file.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    spots = {*range(9), *range(8, header, 37), header - 1, *range(header, len(content), len(content) // 40)}
    for spot in sorted(spots | {len(content) - 1}):
        damaged = bytearray(content)
        damaged[spot] ^= 0x10
        file.write_bytes(damaged)
        with pytest.raises(SegmentFileError, match=file.name):
            verify_file(file)
        if spot % 5 == 0:
            caplog.clear()
            manager = open_manager(filled)
            assert serve(manager) == 0, f"byte {spot} of {len(content)}"
            manager.close()
            assert file.name in caplog.text
    for size in (0, 7, 8, header - 1, header, len(content) - 1):
        file.write_bytes(content[:size])
        manager = open_manager(filled)
        assert serve(manager) == 0
        manager.close()
    file.write_bytes(content + b"x")
    with pytest.raises(SegmentFileError, match="too long"):
        verify_file(file)


def test_damage_after_the_file_was_found(filled, caplog):
    (file,) = files_of(filled)
    manager = open_manager(filled)
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    assert serve(manager) == 0
    assert f"{file} is damaged: its checksum does not match" in caplog.text
    manager.close()
    again = open_manager(filled)
    assert serve(again) == 256, "what was damaged is written anew"
    file.unlink()
    again.prefix.tree.make_room(again.schema.num_blocks)
    assert serve(again) == 256, "host memory still has it"
    again.close()


def test_another_name_or_another_model(filled, caplog):
    (file,) = files_of(filled)
    stranger = file.with_name("0" * 64 + ".safetensors")
    file.rename(stranger)
    manager = open_manager(filled)
    assert serve(manager) == 0
    assert "holds another segment than its name states" in caplog.text
    manager.close()
    foreign = filled / "other model"
    foreign.mkdir()
    (foreign / file.name).write_bytes(file.read_bytes())
    assert open_manager(filled).tiers.disk.fingerprint == "tests"


def test_a_missing_beginning(tmp_path, caplog):
    manager = open_manager(tmp_path)
    long = TOKENS + [9] * 300
    serve(manager, TOKENS)
    serve(manager, long)
    manager.close()
    first = min(files_of(tmp_path), key=lambda file: segment_file.read_label(file)[0].end)
    first.unlink()
    manager = open_manager(tmp_path)
    assert serve(manager, long) == 0
    assert "lacks its beginning" in caplog.text
    manager.close()


def test_a_full_disk(tmp_path, caplog, monkeypatch):
    def no_space(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    manager = open_manager(tmp_path)
    monkeypatch.setattr(segment_file.os, "replace", no_space)
    assert (serve(manager), serve(manager)) == (0, 256)
    manager.tiers.flush()
    assert "No space left on device; free some space or lower cache_disk_bytes" in caplog.text
    assert list(tmp_path.rglob("*.tmp")) + files_of(tmp_path) == []
    monkeypatch.undo()
    serve(manager, TOKENS + [9] * 200)
    manager.close()
    assert len(files_of(tmp_path)) == 2, "once there is room, the beginning is written too"


def test_a_folder_that_cannot_be_written(filled, caplog, monkeypatch):
    """(Root may write anywhere, so the refusal is made here.)"""
    real = os.open

    def refuse(path, *rest, **options):
        if str(path).endswith("lock"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, *rest, **options)

    monkeypatch.setattr("dsv4.cache.tiers.disk.os.open", refuse)
    before = files_of(filled)
    manager = open_manager(filled)
    assert "only reads" in caplog.text
    assert "Read-only file system" in caplog.text
    assert serve(manager) == 256
    serve(manager, [5] * 200)
    manager.close()
    assert files_of(filled) == before
    with pytest.raises(OSError, match="cache_dir .* cannot be created"):
        open_manager(before[0])


def test_two_processes_on_one_folder(filled, caplog):
    first = open_manager(filled)
    second = open_manager(filled)
    assert "only reads" in caplog.text
    assert "another process writes there" in caplog.text
    assert [first.tiers.disk.can_write, second.tiers.disk.can_write] == [True, False]
    assert serve(second) == 256
    serve(second, [5] * 300)
    second.tiers.flush()
    assert len(files_of(filled)) == 1
    # what one deletes, the other does not miss for long
    third = open_manager(filled)
    for file in files_of(filled):
        file.unlink()
    assert serve(third) == 0
    for manager in (second, third, first):
        manager.close()


def test_clocks_that_go_backwards(filled):
    (file,) = files_of(filled)
    for seconds in (0, time.time() + 10**6):
        os.utime(file, (seconds, seconds))
        manager = open_manager(filled)
        assert serve(manager) == 256
        manager.close()


def test_the_budget_of_files_is_kept(tmp_path):
    manager = open_manager(tmp_path, disk_files=3)
    for token in range(20, 30):
        serve(manager, [token] * 300)
        manager.tiers.flush()
        assert sum(file.stat().st_size for file in files_of(tmp_path)) <= manager.limits.cache_disk_bytes
    assert serve(manager, [29] * 300) == 256
    manager.close()
    smaller = open_manager(tmp_path, disk_files=2)
    smaller.tiers.flush()
    assert serve(smaller, [29] * 300) == 256
    smaller.close()
    assert sum(file.stat().st_size for file in files_of(tmp_path)) <= smaller.limits.cache_disk_bytes


def test_the_command(filled):
    run = CliRunner().invoke
    (file,) = files_of(filled)
    listed = run(app, ["cache", "ls", str(filled)])
    assert (listed.exit_code, "256" in listed.output, "1 prefixes, 0 unusable" in listed.output) == (0, True, True)
    assert run(app, ["cache", "verify", str(filled)]).output == "1 files, 0 damaged or foreign\n"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    broken = file.with_name("1" * 64 + ".safetensors")
    broken.write_bytes(content)
    checked = run(app, ["cache", "verify", str(filled)])
    assert (checked.exit_code, broken.name in checked.output.replace("\n", "")) == (1, True)
    assert run(app, ["cache", "rm", str(filled), "--damaged"]).output == "deleted 1 files\n"
    manager = open_manager(filled)
    refused = run(app, ["cache", "rm", str(filled)])
    assert "is in use" in str(refused.exception)
    manager.close()
    assert run(app, ["cache", "rm", str(filled)]).output == "deleted 1 files\n"
    assert files_of(filled) == []
    assert "is not a folder" in str(run(app, ["cache", "ls", str(filled / "nothing")]).exception)


@pytest.fixture(autouse=True)
def warnings_are_seen(caplog):
    caplog.set_level(logging.WARNING, logger="dsv4.cache")
