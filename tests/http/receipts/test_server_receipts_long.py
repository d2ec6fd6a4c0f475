"""Five hundred requests of every kind against a real server that is killed in between; then run again."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from receipt_cases import ask_all, mixed_requests, small_checkpoint
from server_fixtures import SERVE, address_of, kill

from dsv4.tools.receipts.files import read_record

ROOT = Path(__file__).parents[3]


def start(folder, log, *options):
    with log.open("w") as file:
        command = [*SERVE, "--model", str(folder), "--context", "512", *options]
        process = subprocess.Popen(command, cwd=ROOT, stderr=file)
    return process, address_of(process, log)


def replay(*options):
    ended = subprocess.run(
        [sys.executable, "-m", "dsv4", "replay", *map(str, options), "--json"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode in (0, 1), ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.slow
def test_five_hundred_requests(tmp_path):
    folder, path = small_checkpoint(tmp_path / "model"), tmp_path / "receipts.jsonl"
    requests = mixed_requests(620, "model", seed=1)
    server, url = start(folder, tmp_path / "log", "--record", str(path), "--requests", "8")
    try:
        assert set(ask_all(url, requests[:250])) == {200}
        crowd = threading.Thread(target=_ask_until_it_dies, args=(url, requests[250:400]))
        crowd.start()
        while path.read_bytes().count(b"\n") < 400:
            time.sleep(0.05)
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
        crowd.join()
        server, url = start(folder, tmp_path / "log", "--record", str(path), "--requests", "3", "--chunk", "64")
        assert set(ask_all(url, requests[400:])) == {200}
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        kill(server)
    num_asked = len({receipt.request_id for _, _, receipt in read_record([path])})
    assert num_asked >= 500
    for options in ((), ("--batch", 1, "--no-prefix-cache"), ("--batch", 16, "--chunk", 33)):
        report = replay(path, *options)
        print(options, report["num_requests"], report["num_tokens"], f"{report['seconds']:.1f} s", flush=True)
        assert report["differences"] == []
        assert report["changes"] == []
        assert report["num_requests"] >= num_asked
        assert len(report["damaged"]) <= 1


def _ask_until_it_dies(url, requests):
    try:
        ask_all(url, requests)
    except Exception:
        return  # the server was killed
