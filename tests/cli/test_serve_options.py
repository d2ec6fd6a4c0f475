"""`dsv4 serve --config FILE` and `--print-config`; what a running server says about its settings, and its profiles."""

import gzip
import json
import re
import tomllib

import httpx
import pytest
import typer

from dsv4.cli.main import app
from dsv4.cli.serve.options_file import SECRETS, options

HEADERS = {"authorization": "Bearer k"}


def test_every_option_is_in_the_file_and_comes_back(dsv4, tmp_path):
    given = ("here", "--context", "777", "--allowed-host", 'a"b\\', "--memory", "0.5", "--no-generation-config")
    printed = dsv4("serve", *given, "--print-config")
    assert printed.code == 0
    found = tomllib.loads(printed.out)
    assert (found["model"], found["context"], found["allowed-host"]) == ("here", 777, ['a"b\\'])
    assert (found["memory"], found["generation-config"], found["port"]) == (0.5, False, 8000)
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    for one in options(command):
        name = max(one.opts, key=len).removeprefix("--")
        assert f"\n{name} =" in f"\n{printed.out.replace('# ', '')}", name
    file = tmp_path / "serve.toml"
    file.write_text(printed.out, encoding="utf-8")
    assert dsv4("serve", "--config", file, "--print-config").out == printed.out


def test_the_command_line_wins_over_the_file(dsv4, tmp_path, monkeypatch):
    file = tmp_path / "serve.toml"
    file.write_text('context = 128\nport = 99999\ndrafts = 2\nrl-root = ["."]\n', encoding="utf-8")
    found = tomllib.loads(dsv4("serve", "--context", "256", "--config", file, "--print-config").out)
    assert (found["context"], found["port"], found["drafts"], found["rl-root"]) == (256, 99999, "2", ["."])
    assert "--rl-root needs --rl" in dsv4("serve", "--config", file).err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("contxt = 3", "there is no option 'contxt'; did you mean context?"),
        ("zzzz = 3", "there is no option 'zzzz'; options: model, "),
        ("context = true", "context must be a whole number, found True"),
        ('context = "8"', "context must be a whole number"),
        ("memory = true", "memory must be a number"),
        ('allowed-host = "a"', "allowed-host must be a list"),
        ("allowed-host = [1.5]", "allowed-host must be text"),
        ("rl = 1", "rl must be true or false"),
        ('config = "a"', "there is no option 'config'"),
        ("x ==", "Invalid value"),
        *((f'{name.replace("_", "-")} = "x"', f"set {place} in the environment") for name, place in SECRETS.items()),
    ],
)
def test_mistakes_in_the_file(dsv4, tmp_path, text, message):
    file = tmp_path / "serve.toml"
    file.write_text(text, encoding="utf-8")
    ran = dsv4("serve", "--config", file)
    assert ran.code == 2
    assert ran.err.startswith(f"dsv4: error: --config {file}: ")
    assert message in ran.err
    assert ran.err.count("\n") == 1


def test_no_file(dsv4, tmp_path):
    assert "nothing.toml: No such file" in dsv4("serve", "--config", tmp_path / "nothing.toml").err


def test_caches_that_cannot_be_are_refused_before_the_table(dsv4, checkpoint, tmp_path):
    (tmp_path / "file").touch()
    for wrong, words in (
        (["--cache-host-gib", "1e9"], "--cache-host-gib 1e+09: this machine has "),
        (["--cache-dir", tmp_path / "file" / "x"], f"--cache-dir {tmp_path / 'file' / 'x'} cannot be created: Not a "),
        (["--warmup", "later"], "--warmup must be one of fast, full, found 'later'"),
    ):
        ran = dsv4("serve", checkpoint, "--port", 0, *wrong)
        assert ran.code == 2
        assert ran.err.startswith(f"dsv4: error: {words}"), ran.err


def test_profiles_need_a_key(dsv4, checkpoint, tmp_path, monkeypatch):
    monkeypatch.delenv("DSV4_API_KEY", raising=False)
    ran = dsv4("serve", "--model", checkpoint, "--profile-dir", tmp_path)
    assert (ran.code, "--profile-dir needs --api-key" in ran.err) == (2, True)


def test_a_server_says_what_it_chose_and_takes_profiles(start, tmp_path):
    config = tmp_path / "serve.toml"
    config.write_text(f'requests = 3\nprofile-dir = "{tmp_path / "profiles"}"\n', encoding="utf-8")
    _, url, log = start("--config", str(config))
    client = httpx.Client(base_url=url, headers=HEADERS, timeout=60)
    assert httpx.get(f"{url}/server_info").status_code == 401
    assert httpx.post(f"{url}/start_profile").status_code == 401
    info = client.get("/server_info").json()
    assert (info["context_length"], info["max_running_requests"]) == (4096, 3)
    assert {"libraries", "read", "prepare", "cache"} <= set(info["start_seconds"])
    assert sum(info["start_seconds"].values()) > 0
    assert re.search(r"INFO loaded in [0-9.]+ s: read [0-9.]+, prepare", log.read_text())
    settings = info["settings"]
    assert settings["requests"] == {"value": "3 at once", "why": "given", "option": "--requests"}
    assert settings["device"]["option"] == "--device, --gpus"
    assert set(settings) >= {"memory", "context", "cache", "chunk", "drafts"}
    assert info["planned_bytes"]["total"] == info["planned_bytes"]["weights"] + info["planned_bytes"]["cache"]
    table = log.read_text().splitlines()
    for what, one in settings.items():
        (line,) = [line for line in table if line.startswith(f"{what} ")]
        assert one["value"] in line
        assert one["option"] in line

    assert "no profile is being taken" in client.post("/stop_profile").json()["error"]["message"]
    file = client.post("/start_profile").json()["file"]
    assert "already" in client.post("/start_profile").json()["error"]["message"]
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert client.post("/stop_profile").json()["file"] == file
    with gzip.open(file, "rt") as stream:
        names = {event.get("name") for event in json.load(stream)["traceEvents"]}
    assert any(str(name).startswith("aten::") for name in names), "operations of the steps between"
    assert client.get("/health").json() == {"status": "ok"}
