"""The `dsv4` command: what each subcommand prints, and that it prints nothing else."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsv4 import LLM, SamplingParams, __version__
from dsv4.config import ModelConfig
from dsv4.loader.checkpoint import Checkpoint
from dsv4.tools.model_loading import complete_model

ROOT = Path(__file__).parents[2]
COMMANDS = ("eval", "generate", "info", "plan", "render", "synth")


@pytest.fixture
def without_tokenizer(checkpoint, tmp_path):
    folder = tmp_path / "plain"
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("tokenizer.json"))
    return folder


def run_process(*arguments, **options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=options.get("cwd", ROOT)
    )


# ---- generate ----


def test_generate_text(dsv4, checkpoint):
    ran = dsv4("generate", "--model", checkpoint, "Hello", "--max-tokens", 4, "--seed", 3)
    expected = LLM(checkpoint).generate("Hello", SamplingParams(max_tokens=4, seed=3))[0]
    assert ran.code == 0
    assert ran.out == expected.text + "\n"
    assert ran.err.startswith("5 prompt tokens in ")
    assert "4 new at " in ran.err
    assert "tokens/s (length), " in ran.err
    assert ran.err.endswith(" bytes of KV cache; official numerics on cpu\n")


def test_generate_json(dsv4, checkpoint):
    options = (
        "--max-tokens",
        3,
        "--temperature",
        0,
        "--json",
        "--logprobs",
        2,
        "--numerics",
        "exact",
        "--dtype",
        "float64",
    )
    ran = dsv4("generate", "--model", checkpoint, "--ids", "5,6,7", *options)
    llm = LLM(checkpoint, numerics="exact", dtype=torch.float64)
    expected = llm.generate([5, 6, 7], SamplingParams(max_tokens=3, temperature=0, logprobs=2))[0]
    assert ran.code == 0
    answer = json.loads(ran.out)
    assert answer.pop("seconds") > 0
    assert answer.pop("tokens_per_second") > 0
    assert answer == {
        "text": expected.text,
        "token_ids": list(expected.token_ids),
        "prompt_tokens": 3,
        "finish_reason": "length",
        "kv_bytes": llm.cache.schema.request_bytes(5),
        "logprobs": [
            {"token_id": one.token_id, "logprob": one.logprob, "top": [list(pair) for pair in one.top]}
            for one in expected.logprobs
        ],
    }


def test_generate_without_a_tokenizer_prints_ids(dsv4, without_tokenizer):
    ran = dsv4("generate", "--model", without_tokenizer, "--ids", "5, 6", "--max-tokens", 2, "--ignore-eos")
    assert ran.code == 0
    assert len([int(part) for part in ran.out.split(",")]) == 2
    answer = json.loads(dsv4("generate", "--model", without_tokenizer, "--ids", "5,6", "--max-tokens", 1, "--json").out)
    assert answer["text"] is None
    assert answer["tokens_per_second"] is None


def test_generate_passes_every_option_on(dsv4, checkpoint):
    options = ["--temperature", 0.9, "--top-k", 40, "--top-p", 0.95, "--min-p", 0.01, "--repetition-penalty", 1.2]
    ran = dsv4("generate", "--model", checkpoint, "ab", "--max-tokens", 5, "--seed", 1, "--ignore-eos", *options)
    params = SamplingParams(
        max_tokens=5, seed=1, ignore_eos=True, temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.2
    )
    llm = LLM(checkpoint)
    expected = llm.generate("ab", params)[0].text
    assert ran.out == expected + "\n"
    assert expected != llm.generate("ab", SamplingParams(max_tokens=5, seed=1, ignore_eos=True))[0].text
    stop = next(character for character in expected if character.isprintable())
    cut = dsv4(
        "generate",
        "--model",
        checkpoint,
        "ab",
        "--max-tokens",
        5,
        "--seed",
        1,
        "--ignore-eos",
        *options,
        "--stop",
        stop,
    )
    assert cut.out == expected[: expected.index(stop)] + "\n"


def test_context_limits_prompt_and_answer(dsv4, checkpoint):
    ran = dsv4("generate", "--model", checkpoint, "--ids", "5,6,7", "--context", 5, "--ignore-eos", "--json")
    assert json.loads(ran.out)["finish_reason"] == "length"
    assert len(json.loads(ran.out)["token_ids"]) == 2


# ---- info ----


def test_info_json(dsv4, checkpoint):
    info = json.loads(dsv4("info", checkpoint, "--json").out)
    with Checkpoint.open(checkpoint) as opened:
        assert info["weights"]["total_bytes"] == opened.nbytes
        assert info["weights"]["num_tensors"] == len(opened.tensors)
    assert sum(info["weights"]["bytes_by_format"].values()) == info["weights"]["total_bytes"]
    assert sum(info["weights"]["bytes_by_part"].values()) == info["weights"]["total_bytes"]
    assert [(layer["attention"], layer["router"], layer["is_mtp"]) for layer in info["layers"]] == [
        ("swa", "hash", False), ("csa", "dense", False), ("swa", "dense", True),
    ]  # fmt: skip
    schema = LLM(checkpoint).cache.schema
    assert info["kv"]["bytes_per_token"] == float(schema.bytes_per_token)
    assert info["kv"]["window_bytes_per_request"] * len(schema.layers) == 2 * schema.window_bytes_per_request
    assert info["parameters"]["main"] > info["parameters"]["draft"] > 0


def test_info_for_people(dsv4, checkpoint):
    ran = dsv4("info", checkpoint)
    assert ran.code == 0
    assert ran.err == ""
    for line in (
        "layers      2 + 1 MTP",
        "1 x swa, hash router",
        "1 x csa, dense router",
        "mxfp4",
        "total",
        "bytes a token",
    ):
        assert line in ran.out
    assert str(checkpoint) in ran.out.replace("\n", "")


# ---- synth ----


def test_synth_of_a_dspark_head(dsv4, tmp_path):
    """Cut to two layers it taps those."""
    assert dsv4("synth", tmp_path / "head", "--preset", "tiny-dspark", "--layers", 2).code == 0
    assert ModelConfig.from_pretrained(tmp_path / "head").dspark.target_layer_ids == (0, 1)
    info = json.loads(dsv4("info", tmp_path / "head", "--json").out)
    assert info["drafter"] == "DSpark"
    assert [layer["is_mtp"] for layer in info["layers"]] == [False] * 2 + [True] * 3
    assert "layers      2 + 3 DSpark" in dsv4("info", tmp_path / "head").out


def test_synth(dsv4, tmp_path):
    ran = dsv4("synth", tmp_path / "a", "--layers", 1, "--experts", "nvfp4", "--seed", 5)
    assert (ran.code, ran.out, ran.err) == (0, "", f"wrote {tmp_path / 'a'}\n")
    config = ModelConfig.from_pretrained(tmp_path / "a")
    assert config.num_hidden_layers == 1
    assert "nvfp4" in json.loads(dsv4("info", tmp_path / "a", "--json").out)["weights"]["bytes_by_format"]
    (tmp_path / "b").mkdir()
    dsv4("synth", tmp_path / "b", "--preset", tmp_path / "a" / "config.json", "--experts", "nvfp4", "--seed", 5)
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert files == sorted(file.name for file in (tmp_path / "b").iterdir())
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


# ---- plan and render: without torch ----


def test_plan(dsv4):
    ran = dsv4("plan", "flash", "--gpu", "h200", "--json")
    assert json.loads(ran.out)["kv"]["bytes_per_token"] == 3514.25
    assert "159,609,485,896" in dsv4("plan", "flash").out


def test_render(dsv4, tmp_path):
    file = tmp_path / "chat.json"
    file.write_text('[{"role": "user", "content": "ABCD"}]')
    ran = dsv4("render", file)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == "<｜begin▁of▁sentence｜><｜User｜>ABCD<｜Assistant｜></think>"


def test_plan_render_and_help_do_not_load_torch(tmp_path):
    (tmp_path / "chat.json").write_text('[{"role": "user", "content": "ABCD"}]')
    program = (
        "import sys\n"
        "from dsv4.cli.main import main\n"
        "for line in (['plan', 'flash'], ['render', 'chat.json'], ['--help'], ['generate', '--help'],\n"
        "             ['generate', '--model', 'none', 'x'], ['generate', '--model', 'none', 'x', '--top-p', '7']):\n"
        "    try:\n"
        "        main(line)\n"
        "    except SystemExit:\n"
        "        pass\n"
        "    assert 'torch' not in sys.modules, line\n"
    )
    ran = run_process("-c", program, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr


# ---- the command itself ----


def test_as_a_module(checkpoint):
    ran = run_process("-m", "dsv4", "generate", "--model", str(checkpoint), "--ids", "600")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "dsv4: error: prompt token 0 is 600; ids are integers from 0 to 511\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(dsv4, command):
    ran = dsv4(command, "--help")
    assert ran.code == 0
    assert f"\n    dsv4 {command} " in ran.out
    assert dsv4(command, "-h") == ran


def test_help_names_every_command(dsv4):
    out = dsv4("--help").out
    for command in COMMANDS:
        assert f"  {command} " in out


def test_help_has_whole_sentences(dsv4):
    out = dsv4("--help").out
    assert "..." not in out.replace("COMMAND [ARGS]...", "")
    assert "perplexity of a text,\n            agreement of experts" in out


def test_version(dsv4):
    ran = dsv4("--version")
    assert (ran.code, ran.out) == (0, f"dsv4 {__version__}\n")


def test_completion_of_models(checkpoint, monkeypatch):
    monkeypatch.chdir(checkpoint.parent)
    assert complete_model("") == ["flash-mini", "flash-mini-dspark", "flash-mini-nvfp4", "small"]
    assert complete_model("flash-mini-") == ["flash-mini-dspark", "flash-mini-nvfp4"]
    assert complete_model(f"{checkpoint.parent}/") == [str(checkpoint)]
    assert complete_model("nowhere/") == []


def test_shell_completion():
    """As a shell asks for it."""
    program = "from dsv4.cli.main import app; app(prog_name='dsv4')"
    asked = {"_DSV4_COMPLETE": "complete_bash", "COMP_WORDS": "dsv4 gen", "COMP_CWORD": "1"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **asked}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert ran.stdout.split() == ["generate"], ran.stderr


# ---- one way to name a model ----


@pytest.mark.parametrize("command", [["generate", "x", "--model"], ["info"], ["chat", "--model"], ["eval", "--model"]])
def test_a_preset_has_no_weights(dsv4, command):
    ran = dsv4(*command, "flash")
    assert ran.code == 2
    for word in ("'flash' is a preset", "dsv4 plan flash", "dsv4 synth FOLDER --preset flash", "flash-mini-nvfp4"):
        assert word in ran.err


def test_shipped_names_where_no_weights_are_needed(dsv4, tmp_path):
    assert dsv4("plan", "flash-mini", "--json").code == 0
    assert dsv4("synth", tmp_path / "new", "--preset", "flash-mini", "--layers", 1).code == 0
    assert ModelConfig.from_pretrained(tmp_path / "new").num_hidden_layers == 1


# ---- where prompts come from ----


def test_prompts_from_a_file_and_from_stdin(dsv4, checkpoint, tmp_path, monkeypatch):
    options = ("--model", checkpoint, "--max-tokens", 3, "--json")
    expected = json.loads(dsv4("generate", "Zoë\n", *options).out)["token_ids"]
    file = tmp_path / "prompt.txt"
    file.write_bytes("Zoë\n".encode())
    assert json.loads(dsv4("generate", "--file", file, *options).out)["token_ids"] == expected
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("Zoë\n".encode())))
    assert json.loads(dsv4("generate", "-", *options).out)["token_ids"] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["x", "--file", "FILE"], "give one prompt"), (["--file", "FILE", "--ids", "1"], "give one prompt"),
     (["--file", "FILE"], "is not UTF-8 text"), (["--file", "nowhere.txt"], "nowhere.txt")],
)  # fmt: skip
def test_prompts_that_cannot_be_read(dsv4, checkpoint, tmp_path, arguments, message):
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xff")
    ran = dsv4("generate", "--model", checkpoint, *(file if word == "FILE" else word for word in arguments))
    assert (ran.code, message in ran.err) == (2, True), ran.err
