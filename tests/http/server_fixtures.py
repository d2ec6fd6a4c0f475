"""Fixtures of the command line's and the server's tests: commands in this process, servers, a checkpoint."""

import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from dsv4.cli.main import main

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def dsv4(capfdbinary):
    """`dsv4("plan", "flash")`: exit code, stdout and stderr of a command."""

    def run(*arguments):
        capfdbinary.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        out, err = capfdbinary.readouterr()
        return Outcome(ended.value.code or 0, out.decode("utf-8"), err.decode("utf-8"))

    return run


SERVE = (sys.executable, "-m", "dsv4", "serve", "--port", "0")
IMPATIENT = """
from dsv4.cli.main import main
from dsv4.http.processes import supervisor
supervisor._SILENT_SECONDS = 2.0
main()
"""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Two layers (window, CSA) and an MTP block, with a byte tokenizer. Tests copy it before they damage it."""
    folder = tmp_path_factory.mktemp("models") / "small"
    with pytest.raises(SystemExit) as ended:
        main(["synth", str(folder), "--layers", "2"])
    assert not ended.value.code
    return folder


@pytest.fixture
def start(checkpoint, tmp_path):
    """`start(options)`: a running `dsv4 serve`, its address and its log. `descriptors` and `file_bytes` limit what it
    may open, and how long its files may get. `program`: Python that runs the command in another way."""
    running = []

    def run(*options, descriptors=None, file_bytes=None, program=None):
        def limit():
            for kind, most in ((resource.RLIMIT_NOFILE, descriptors), (resource.RLIMIT_FSIZE, file_bytes)):
                if most is not None:
                    resource.setrlimit(kind, (most, most))

        log = tmp_path / f"log{len(running)}"
        model = ("--model", str(checkpoint), "--context", "4096")
        command = SERVE if program is None else (sys.executable, "-c", program, *SERVE[3:])
        with log.open("w") as file:
            process = subprocess.Popen(
                [*command, *model, *options], cwd=ROOT, stderr=file, env={**os.environ, "DSV4_API_KEY": "k"},
                preexec_fn=limit,
            )  # fmt: skip
        running.append(process)
        return process, address_of(process, log), log

    yield run
    for process in running:
        kill(process)


def address_of(process, log):
    """Of a `dsv4 serve`, once it answers."""
    deadline = time.monotonic() + 120
    while "running on http" not in (text := log.read_text()):
        assert process.poll() is None, text
        assert time.monotonic() < deadline, text
        time.sleep(0.05)
    return text.partition("running on ")[2].split()[0]


def kill(process):
    """One that has ended stays as it is."""
    if process.poll() is None:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def served_params():
    """Parameters of the model that the servers of the tests serve."""
    import torch
    from server_cases import SERVED

    from dsv4.loader.write.synth import random_params

    return random_params(SERVED, dequantize_to=torch.float32)


@pytest.fixture(scope="session")
def two_layer_params():
    """Parameters of a model with every kind of cache row, where the cache matters."""
    import torch
    from server_cases import TWO_LAYERS

    from dsv4.loader.write.synth import random_params

    return random_params(TWO_LAYERS, dequantize_to=torch.float32)


@pytest.fixture
def open_page(served, tmp_path):
    """`open_page()`: the page of the test file's `served` in Chromium. It may not complain, nor load from elsewhere."""
    from browser import Browser

    browsers = []

    def start(width=1200, height=780, until="model === 'tiny'", **options):
        browser = Browser(tmp_path / f"profile{len(browsers)}", width=width, height=height, **options)
        browsers.append(browser)
        browser.open(served.url + "/")
        browser.wait(f"document.readyState === 'complete' && {until}")
        return browser

    yield start
    for browser in browsers:
        assert browser.complaints == []
        assert all(url.startswith((served.url, "data:", "about:")) for url in browser.requests), "nothing from outside"
        browser.close()


@pytest.fixture(scope="module")
def live(served_params):
    """A server of the test file's own. At the end of it nothing may be held any more."""
    from server_cases import make_llm, start_server

    with start_server(make_llm(served_params)) as server:
        yield server
