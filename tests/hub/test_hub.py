"""Models by their name on a hub, against one on loopback: what is downloaded, kept and refused, and what is said."""

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from loopback_hub import COMMIT, Hub

from dsv4 import hub as hub_module
from dsv4.cli.main import main
from dsv4.hub import HubFile, is_hub_name

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.thorough  # every command is a process that loads torch
SHARD = "model-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "small"
    with pytest.raises(SystemExit) as ended:
        main(["synth", str(folder), "--layers", "1"])
    assert not ended.value.code
    return folder


@pytest.fixture
def hub(folder):
    hub = Hub(folder)
    yield hub
    hub.stop()


class Ran:
    def __init__(self, process):
        self.out, self.err = process.communicate(timeout=120)
        self.code = process.returncode


@pytest.fixture
def dsv4(hub, tmp_path):
    """A command in a process of its own: huggingface_hub reads its settings when it is imported."""

    def begin(*arguments, **environment):
        settings = {
            **os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_ETAG_TIMEOUT": "2",
            "PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_PROGRESS_BARS": "1", **environment,
        }  # fmt: skip
        return subprocess.Popen(
            [sys.executable, "-m", "dsv4", *map(str, arguments)], env=settings, cwd=tmp_path, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(*arguments, **environment):
        return Ran(begin(*arguments, **environment))

    run.begin = begin
    return run


def refused(ran, *words):
    assert ran.code == 2, ran.err
    assert "Traceback" not in ran.err
    for word in words:
        assert word in ran.err, ran.err


def test_a_download_and_its_cache(dsv4, hub):
    """Once from the hub; then from the cache, also without a connection; another revision is asked for anew."""
    first = dsv4("generate", "org/small", "--ids", "5,6", "--max-tokens", 2, "--temperature", 0)
    assert first.code == 0, first.err
    assert SHARD in hub.downloads
    hub.downloads.clear()
    known = dsv4("info", "--model", "org/small", "--revision", "main", "--json")
    assert known.code == 0, known.err
    assert hub.downloads == []
    refused(dsv4("info", "org/small@v9"), "no revision 'v9'")
    hub.stop()
    again = dsv4("generate", f"org/small@{COMMIT}", "--ids", "5,6", "--max-tokens", 2, "--temperature", 0)
    assert (again.code, again.out) == (0, first.out), again.err
    offline = dsv4("info", "org/small", "--json", HF_HUB_OFFLINE="1")
    assert (offline.code, offline.out) == (0, known.out), offline.err
    refused(dsv4("info", "org/other"), "org/other is not in the cache", "cannot be reached")


def test_only_small_files_for_a_plan(dsv4, hub):
    ran = dsv4("plan", "org/small", "--json")
    assert ran.code == 0, ran.err
    assert "config.json" in hub.downloads
    assert SHARD not in hub.downloads


def test_a_download_that_was_killed_goes_on(dsv4, hub, tmp_path):
    """Files that were whole are not fetched again; the one under way is."""
    hub.slow = SHARD
    process = dsv4.begin("info", "org/small")
    deadline = time.monotonic() + 60
    while SHARD not in hub.downloads or not list((tmp_path / "hf").rglob("config.json")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.communicate()
    hub.slow = None
    hub.downloads.clear()
    assert dsv4("info", "org/small", "--json").code == 0
    assert SHARD in hub.downloads
    assert "config.json" not in hub.downloads


def test_a_download_that_breaks_off(dsv4, hub):
    hub.cut = SHARD
    ran = dsv4("serve", "org/small", "--port", 0)
    refused(ran, "dsv4: error: org/small: the download", "run the command again")
    hub.cut = None
    hub.downloads.clear()
    assert dsv4("info", "org/small", "--json").code == 0
    assert hub.downloads == [SHARD], "what was whole is kept"


def test_a_broken_connection_goes_on_inside_the_file(dsv4, hub):
    """The library keeps what came in whole pieces of 10 MiB."""
    piece = 10 << 20
    hub.files[SHARD] += bytes(2 * piece)  # no checkpoint any more, but whole
    hub.digests[SHARD] = hashlib.sha256(hub.files[SHARD]).hexdigest()
    hub.cut, hub.cut_at = SHARD, piece + 5000
    refused(dsv4("info", "org/small"), "bytes after the last tensor")
    assert hub.ranges == [f"bytes={piece}-"]
    assert hub.downloads.count(SHARD) == 2


def test_a_damaged_download_is_named_and_deleted(dsv4, hub):
    data = bytearray(hub.files[SHARD])
    data[-1] ^= 1
    hub.served[SHARD] = bytes(data)
    refused(dsv4("info", "org/small"), SHARD, "is damaged: SHA-256 should be", "run the command again")
    hub.served.clear()
    assert dsv4("info", "org/small", "--json").code == 0


def test_a_file_of_another_size(dsv4, hub):
    hub.served["tokenizer.json"] = hub.files["tokenizer.json"] + b" "
    refused(dsv4("info", "org/small"), "tokenizer.json should have")


def test_what_a_hub_refuses(dsv4, hub):
    hub.gated = True
    refused(dsv4("info", "org/small"), "org/small is gated", "HF_TOKEN")
    refused(dsv4("info", "org/nothing"), "neither a folder here nor a model on the hub")
    hub.gated = False
    del hub.files["config.json"]
    refused(dsv4("info", "org/small"), "has no config.json")


def test_a_missing_shard_is_named_before_the_others_come(dsv4, hub):
    hub.files["other.safetensors"] = hub.files.pop(SHARD)
    hub.digests["other.safetensors"] = hub.digests[SHARD]
    refused(
        dsv4("info", "org/small"), f"org/small is incomplete on the hub: its index names {SHARD}, and it has no such"
    )
    assert "other.safetensors" not in hub.downloads
    del hub.files["other.safetensors"]
    refused(dsv4("info", "org/small"), "no .safetensors files")


def test_too_small_a_disk(dsv4, hub):
    hub.listed_sizes[SHARD] = 10**15
    refused(dsv4("info", "org/small"), "GiB are to be downloaded", "GiB free", "HF_HOME")
    assert SHARD not in hub.downloads


def test_what_is_there_needs_no_room(tmp_path, monkeypatch):
    """Equal files are one on the disk, and so are those of another revision."""
    monkeypatch.setattr(hub_module.shutil, "disk_usage", lambda place: SimpleNamespace(free=2**28 + 100))
    files = [HubFile(name, 80, digest) for name, digest in (("a", "1"), ("b", "1"), ("c", "2"))]
    with pytest.raises(hub_module.HubError, match="are to be downloaded"):
        hub_module._check_disk("org/small", tmp_path, files, COMMIT)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "2").touch()
    hub_module._check_disk("org/small", tmp_path, files, COMMIT)


def test_what_is_a_hub_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "here").mkdir(parents=True)
    assert is_hub_name("deepseek-ai/DeepSeek-V4-Flash")
    assert is_hub_name("org/name@refs/pr/1")
    for other in ("org/here", "name", "./org/name", "/org/name", "a/b/c", "../name", ""):
        assert not is_hub_name(other), other


# ---- Git LFS ----


@pytest.mark.parametrize("file", [SHARD, "tokenizer.json", "config.json"])
def test_a_git_lfs_pointer_says_what_it_is(folder, tmp_path, capfd, file):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / file).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n")
    with pytest.raises(SystemExit) as ended:
        main(["info", str(copy)])
    assert ended.value.code == 2
    error = capfd.readouterr().err
    assert f"{file} is a Git LFS pointer" in error
    assert f"`git lfs pull` in {copy}" in error
