"""Bad input on the command line: exit code 2, one paragraph on stderr that names the culprit, nothing half-written."""

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch
import typer.main

from dsv4.cli.main import app
from dsv4.loader.layout import StoredTensor
from dsv4.loader.write.shards import StoredWeight, write_shard
from dsv4.tools.option_names import FOREIGN_OPTIONS, error_text

SHARD = "model-00001-of-00001.safetensors"


def assert_refused(ran, *words):
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("dsv4: error: ")
    assert ran.err.count("\n") == 1, ran.err
    assert ran.err.endswith("\n")
    assert len(ran.err) < 1000
    for word in words:
        assert word in ran.err, f"{word!r} is not in {ran.err!r}"


@pytest.fixture
def damaged(checkpoint, tmp_path):
    """A copy to damage."""
    folder = tmp_path / "damaged"
    shutil.copytree(checkpoint, folder)
    return folder


def edit_json(file, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def edit_header(folder, change):
    """Rewrite the shard with another header over the same data."""
    raw = (folder / SHARD).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    (folder / SHARD).write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


# ---- checkpoints: generate and info see the same mistakes ----


def remove_shard(folder):
    (folder / SHARD).unlink()


def missing_tensor(folder):
    (folder / "model.safetensors.index.json").unlink()

    def rename(header):
        header["norm.wait"] = header.pop("norm.weight")

    edit_header(folder, rename)


def unknown_key(folder):
    edit_json(folder / "config.json", lambda config: config.update(quantum_heads=3))


# one of the files, one of a header, one of the config; all others are tests of the loader and of the config
DAMAGE = [
    (remove_shard, [SHARD, "missing"]),
    (missing_tensor, ["norm.weight", "norm.wait"]),
    (unknown_key, ["config.json", "quantum_heads"]),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGE, ids=[damage.__name__ for damage, _ in DAMAGE])
def test_damaged_checkpoints(dsv4, damaged, damage, words):
    damage(damaged)
    before = {file.name: file.stat().st_size for file in damaged.iterdir()}
    assert_refused(dsv4("generate", "--model", damaged, "Hello", "--max-tokens", 1), *words)
    assert_refused(dsv4("info", damaged), *words)
    assert_refused(dsv4("info", damaged, "--json"), *words)
    assert {file.name: file.stat().st_size for file in damaged.iterdir()} == before


@pytest.mark.parametrize("content", ["{", '{"model": {"type": "WordLevel"}}'])
def test_a_broken_tokenizer(dsv4, damaged, content):
    (damaged / "tokenizer.json").write_text(content)
    assert_refused(dsv4("generate", "--model", damaged, "Hello"), "tokenizer.json")


# ---- options ----


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--temperature", "-1"], ["--temperature must be", "-1"]),
        (["--temperature", "nan"], ["temperature", "nan"]),
        (["--top-p", "0"], ["--top-p must be"]),
        (["--top-k", "-3"], ["--top-k must be", "-3"]),
        (["--min-p", "2"], ["--min-p must be"]),
        (["--repetition-penalty", "0"], ["--repetition-penalty must be"]),
        (["--max-tokens", "0"], ["--max-tokens must be"]),
        (["--seed", "9223372036854775808"], ["--seed must be"]),
        (["--stop", ""], ["stop"]),
        (["--logprobs", "3"], ["--logprobs needs --json"]),
        (["--numerics", "fast"], ["--numerics", "official, exact", "fast"]),
        (["--dtype", "float16"], ["--dtype", "float16"]),
        (["--dtype", "float32"], ["--dtype float32 needs --numerics exact"]),
        (["--dtype", "bfloat16"], ["--dtype bfloat16 needs --numerics exact"]),
        (["--device", "tpu"], ["--device must be", "tpu"]),
        (["--device", "cuda:77"], ["device", "cuda:77"]),
        (["--context", "0"], ["--context must be"]),
        (["--context", "99999999"], ["--context must be at most", "16384"]),
        (["--ids", "1,2"], ["give one prompt"]),
        (["--offload-experts", "foo"], ["--offload-experts must be auto, off or a number"]),
    ],
)
def test_options_of_generate(dsv4, checkpoint, options, words):
    assert_refused(dsv4("generate", "--model", checkpoint, "Hello", *options), *words)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], ["give one prompt"]),
        ([""], ["the prompt is empty"]),
        (["--ids", ""], ["--ids"]),
        (["--ids", "1,,2"], ["--ids", "1,,2"]),
        (["--ids", "1;2"], ["--ids", "1;2"]),
        (["--ids", "1,512"], ["prompt token 1 is 512", "0 to 511"]),
        (["--ids=-1"], ["prompt token 0 is -1"]),
        (["Hello", "--context", "5"], ["5 tokens", "--context is 5 and one must"]),
    ],
)
def test_prompts_of_generate(dsv4, checkpoint, prompt, words):
    assert_refused(dsv4("generate", "--model", checkpoint, *prompt), *words)


def test_text_without_a_tokenizer(dsv4, damaged):
    (damaged / "tokenizer.json").unlink()
    assert_refused(dsv4("generate", "--model", damaged, "Hello"), "no tokenizer.json", "token ids")
    assert_refused(dsv4("generate", "--model", damaged, "--ids", "3", "--stop", "x"), "stop strings need a tokenizer")


@pytest.mark.parametrize(
    "command", [["generate", "x", "--model"], ["info"], ["plan"], ["synth", "new", "--preset"], ["render"]]
)
def test_paths_that_do_not_exist(dsv4, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    assert_refused(dsv4(*command, "nowhere"), "nowhere")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--layers", "0"], ["--layers", "1 to 5"]),
        (["--layers", "6"], ["--layers", "1 to 5", "6"]),
        (["--experts", "int4"], ["--experts", "mxfp4", "int4"]),
        (["--preset", "huge"], ["huge", "flash, pro, tiny"]),
    ],
)
def test_synth_writes_nothing_when_it_refuses(dsv4, tmp_path, options, words):
    assert_refused(dsv4("synth", tmp_path / "new", *options), *words)
    assert list(tmp_path.iterdir()) == []


def test_synth_never_overwrites(dsv4, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    assert_refused(dsv4("synth", tmp_path / "mine"), "mine", "never overwritten")
    assert_refused(dsv4("synth", tmp_path / "mine" / "notes.txt"), "notes.txt")
    assert_refused(dsv4("synth", tmp_path / "mine" / "notes.txt" / "below"), "notes.txt")
    assert [file.name for file in tmp_path.rglob("*")] == ["mine", "notes.txt"]
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpu", "abacus"], ["abacus"]),
        (["--gpus", "0"], ["gpus"]),
        (["--context", "0"], ["--context must be"]),
        (["--context", "99999999"], ["--context must be at most"]),
        (["--requests", "-1"], ["--requests must be"]),
        (["--experts", "int4"], ["--experts"]),
        (["--index-keys", "fp2"], ["--index-keys", "fp2"]),
    ],
)
def test_options_of_plan(dsv4, options, words):
    assert_refused(dsv4("plan", "flash", *options), *words)


def test_render_names_the_message(dsv4, tmp_path):
    file = tmp_path / "chat.json"
    file.write_text('[{"role": "robot"}]')
    assert_refused(dsv4("render", file), "message 0", "role")
    file.write_text("{")
    assert_refused(dsv4("render", file), "chat.json", "not a JSON file")


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "x", "--model"],
        ["generate", "x", "--model", "m", "--max-tokens", "many"],
        ["synth"],
        ["frobnicate"],
        ["plan", "flash", "--frobnicate"],
        ["plan", "flash", "pro"],
    ],
)
def test_wrong_usage(dsv4, arguments):
    ran = dsv4(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert "Error: " in ran.err
    assert "Traceback" not in ran.err


def test_one_model_and_one_prompt(dsv4, checkpoint, tmp_path):
    assert_refused(dsv4("generate", "x", "y", "z"), "expected MODEL and PROMPT", "quotes")
    assert_refused(dsv4("chat", checkpoint, "--model", tmp_path), "give one model", str(checkpoint), str(tmp_path))
    assert_refused(dsv4("generate", checkpoint, "--revision", "v1", "--ids", "5"), "--revision needs a name on the hub")


@pytest.mark.parametrize(
    ("command", "foreign", "ours"),
    [
        ("serve", ["--tensor-parallel-size", "8"], "--gpus N"),
        ("serve", ["--max-model-len=8192"], "--context"),
        ("serve", ["--gpu-memory-utilization", "0.9"], "--memory"),
        ("serve", ["--served-model-name", "x"], "--name"),
        ("serve", ["--trust-remote-code"], "leave it out"),
        ("serve", ["--mem-fraction-static", "0.9"], "--memory"),
        ("generate", ["--max-model-len", "8192"], "--context"),
        ("chat", ["-tp", "2"], "--gpus N"),
    ],
)
def test_options_of_other_servers_have_a_pointer(dsv4, command, foreign, ours):
    assert_refused(dsv4(command, "model", *foreign), f"{foreign[0].partition('=')[0]} is another server's option", ours)


def test_no_pointer_names_an_option_that_is_not_there():
    """Neither one of ours under another's name, nor advice that leads nowhere."""
    command = typer.main.get_command(app).commands["serve"]
    own = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    advised = {word.rstrip(",") for advice in FOREIGN_OPTIONS.values() for word in advice.split() if "--" in word}
    assert not own & set(FOREIGN_OPTIONS)
    assert advised - {"--memory"} <= own


def test_errors_name_options_not_fields(dsv4, checkpoint):
    assert_refused(dsv4("generate", checkpoint, "x", "--context", "0"), "--context must be a positive integer")
    assert_refused(dsv4("generate", checkpoint, "x", "--gpus", "0"), "--gpus must be from 1")


def test_an_address_instead_of_a_name(dsv4):
    for command in ("info", "serve", "chat"):
        ran = dsv4(command, "https://hub.example.org/org/name/tree/main")
        assert_refused(ran, "is an address: give the model's name on the hub, org/name\n")


def test_a_full_disk_has_a_path(tmp_path):
    """Where the disk is a file system of a few bytes: /dev/full."""
    weight = StoredWeight((StoredTensor("a", "U8", (8,)),), lambda: [torch.zeros(8, dtype=torch.uint8)])
    with pytest.raises(OSError, match="/dev/full") as raised:
        write_shard(Path("/dev/full"), [weight], lambda count: None)
    assert "/dev/full" in error_text(raised.value)
    assert "full" in error_text(OSError(errno.ENOSPC, "No space left on device"))
