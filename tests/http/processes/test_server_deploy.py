"""What stands in deploy/, beside a running server."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[3] / "deploy"


def test_systemd_hears_when_a_server_serves_and_how_long_it_ends(start, tmp_path, monkeypatch):
    """`Type=notify`; the time to stop follows --drain-seconds."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        process, _, _ = start("--drain-seconds", "200", "--port", "0")
        assert manager.recv(1000) == b"READY=1"
        process.send_signal(signal.SIGTERM)
        stopping, extended = manager.recv(1000).decode().split("\n")
        assert stopping == "STOPPING=1"
        assert extended == f"EXTEND_TIMEOUT_USEC={215 * 10**6}"
        assert process.wait(60) == 0


@pytest.mark.parametrize("is_https", [False, True])
def test_the_health_check_finds_the_server(start, tmp_path, monkeypatch, is_https):
    """On whatever port, with HTTPS or without; dead servers are found, too."""
    monkeypatch.setenv("DSV4_ADDRESS_FILE", str(tmp_path / "address"))
    options = ["--host", "0.0.0.0"]
    if is_https:
        made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=example.org", "-days", "1"]
        files = [tmp_path / "key.pem", tmp_path / "cert.pem"]
        subprocess.run([*made, "-keyout", files[0], "-out", files[1]], capture_output=True, check=True)
        options += ["--ssl-keyfile", files[0], "--ssl-certfile", files[1]]
    process, url, _ = start(*map(str, options))
    assert url.startswith("https:" if is_https else "http:")
    check = [sys.executable, DEPLOY / "healthcheck.py"]
    assert subprocess.run(check, capture_output=True, check=False).returncode == 0
    process.kill()
    process.wait()
    assert subprocess.run(check, capture_output=True, check=False).returncode != 0
