"""What the processes of a server share: the engine's signs of life, and the front ends' numbers."""

import os
import stat
import tempfile
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dsv4.engine.stats import EngineStats
from dsv4.http.processes.folder import delete_abandoned, private_folder
from dsv4.http.processes.heartbeat import Heartbeat, Pulse, PulseReader, PulseWatch, make_pulse_file
from dsv4.http.telemetry.metrics import Metrics
from dsv4.http.telemetry.shared_metrics import SharedMetrics

STATS = EngineStats(
    num_waiting=1, num_running=2, num_slots=3, num_blocks_used=4, num_blocks=8, num_steps=5, num_prompt_tokens=6,
    num_output_tokens=7, num_finished=8, num_aborted=9, num_failed=10, num_preemptions=11, num_recomputed_tokens=12,
)  # fmt: skip


def test_a_folder_is_private_and_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with private_folder() as folder:
        assert folder.parent == tmp_path
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


def test_folders_of_killed_supervisors_are_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    abandoned, young, foreign = tmp_path / "dsv4-serve-1", tmp_path / "dsv4-serve-2", tmp_path / "other"
    for folder in (abandoned, young, foreign):
        folder.mkdir()
    with private_folder() as running:
        for folder in (abandoned, running, foreign):
            os.utime(folder, (0, 0))
        delete_abandoned(tmp_path)
        assert sorted(tmp_path.iterdir()) == sorted((young, foreign, running))


class Beats:
    """A reader whose engine beats when told to."""

    def __init__(self):
        self.num_beats = 0

    def read(self):
        return Pulse(self.num_beats, 0.0)


def test_an_engine_is_silent_after_so_many_looks_without_a_beat():
    beats = Beats()
    watch = PulseWatch(beats, seconds=1.5, period=0.25)
    beats.num_beats += 1
    assert not watch.look()
    assert [watch.look() for _ in range(7)] == [False] * 5 + [True] * 2
    beats.num_beats += 1
    assert not watch.look(), "it is back"
    assert [watch.look() for _ in range(6)] == [False] * 5 + [True]


def test_beats_arrive_in_another_mapping(tmp_path):
    path = tmp_path / "pulse"
    make_pulse_file(path)
    reader, starts = PulseReader(path), [None]
    heart = Heartbeat(path, lambda: starts[0])
    first = reader.read()
    deadline = time.monotonic() + 10
    while reader.read().num_beats <= first.num_beats + 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert reader.read().step_seconds == 0.0
    starts[0] = time.monotonic() - 5.0
    while not reader.read().step_start:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert reader.read().step_seconds >= 5.0
    heart.stop()
    last = reader.read().num_beats
    time.sleep(0.3)
    assert reader.read().num_beats == last
    again = Heartbeat(path, lambda: None)  # another engine goes on counting
    while reader.read().num_beats <= last:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    again.stop()


def samples_of(shared):
    text = shared.text(STATS).decode()
    return {
        (one.name, *sorted(one.labels.items())): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


@pytest.fixture
def two_front_ends(tmp_path):
    made = []
    for reason in ("stop", "length"):
        metrics = Metrics("m")
        metrics.finished("stop")
        metrics.finished(reason)
        metrics.first_token.add(0.02)
        made.append((metrics, SharedMetrics(metrics, "m", tmp_path)))
    return made


def test_counters_and_histograms_add_up(two_front_ends):
    (_, one), (_, other) = two_front_ends
    other.publish()
    found = samples_of(one)
    label = ("model_name", "m")
    assert found["dsv4_request_success_total", ("finished_reason", "stop"), label] == 3
    assert found["dsv4_request_success_total", ("finished_reason", "length"), label] == 1
    assert found["dsv4_time_to_first_token_seconds_count", label] == 2
    assert found["dsv4_time_to_first_token_seconds_bucket", ("le", "0.025"), label] == 2
    assert found["dsv4_time_to_first_token_seconds_bucket", ("le", "0.01"), label] == 0
    one.publish()
    without_times = {key: value for key, value in found.items() if not key[0].endswith("_created")}
    assert without_times == {key: value for key, value in samples_of(other).items() if key in without_times}
    assert found["dsv4_num_requests_running", label] == 2, "the engine's own are not added up"


def test_numbers_of_a_dead_front_end_stay(two_front_ends, tmp_path):
    (metrics, one), (_, other) = two_front_ends
    one.publish()
    metrics.finished("stop")
    one.publish()  # its last: the file is replaced, not added
    del one
    assert len(list(tmp_path.iterdir())) == 1
    label = ("model_name", "m")
    assert samples_of(other)["dsv4_request_success_total", ("finished_reason", "stop"), label] == 4


def test_a_front_end_alone_needs_no_folder():
    shared = SharedMetrics(Metrics("m"), "m")
    shared.publish()
    assert samples_of(shared)["dsv4_slots", ("model_name", "m")] == 3


def test_a_full_disk_is_said_once_and_tried_again(two_front_ends, tmp_path, monkeypatch, caplog):
    (_, one), (_, other) = two_front_ends
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", lambda path, data: (_ for _ in ()).throw(OSError(28, "No space left")))
        one.publish()
        one.publish()
    assert [record.getMessage().endswith("No space left") for record in caplog.records] == [True]
    assert list(tmp_path.iterdir()) == []
    one.publish()
    assert samples_of(other)["dsv4_time_to_first_token_seconds_count", ("model_name", "m")] == 2


def test_a_folder_that_is_gone_is_no_error(two_front_ends, tmp_path):
    (_, one), _ = two_front_ends
    tmp_path.rmdir()
    one.publish()
    assert samples_of(one)
