"""Commands without a checkpoint: they run the miniature that ships with the package, and say so."""

import json

import pytest

from dsv4 import LLM, EngineConfig, SamplingParams
from dsv4.loader.shipped import find_checkpoint, shipped_checkpoint

NOTE = "dsv4: note: no MODEL, so the shipped flash-mini: a miniature that continues text, answers nothing\n"
PROMPT = "And the LORD spake unto"


@pytest.fixture(scope="module")
def expected():
    llm = LLM(engine=EngineConfig(max_context_tokens=256, max_concurrent_requests=1))
    return llm.generate(PROMPT, SamplingParams(max_tokens=4, temperature=0))[0]


def test_generate_with_stats(dsv4, expected):
    ran = dsv4("generate", PROMPT, "--max-tokens", 4, "--temperature", 0, "--stats")
    assert (ran.code, ran.out) == (0, expected.text + "\n")
    note, summary, title, headings, *rows = ran.err.splitlines()
    assert note + "\n" == NOTE
    assert "4 new at " in summary
    assert "bytes of KV cache" in summary
    assert title.strip() == "experts used per layer"
    assert headings.split()[:5] == ["layer", "attention", "router", "experts", "used"]
    assert [row.split()[:3] for row in rows] == [
        ["0", "swa", "hash"], ["1", "swa", "hash"], ["2", "csa", "dense"], ["3", "hca", "dense"],
        ["4", "csa", "dense"], ["5", "hca", "dense"], ["6", "csa", "dense"],
    ]  # fmt: skip


def test_generate_counts_every_processed_token(dsv4, expected):
    ran = dsv4("generate", PROMPT, "--max-tokens", 4, "--temperature", 0, "--stats", "--json", "--model", "flash-mini")
    assert ran.err.startswith(f"{len(expected.prompt_token_ids)} prompt tokens"), "no note where --model was given"
    answer = json.loads(ran.out)
    assert answer["text"] == expected.text
    num_processed = len(expected.prompt_token_ids) + 3  # the last token drawn is never fed
    assert [sum(counts) for counts in answer["experts"]] == [2 * num_processed] * 7
    assert [len(counts) for counts in answer["experts"]] == [8] * 7


def test_info(dsv4):
    ran = dsv4("info", "--json")
    assert (ran.code, ran.err) == (0, NOTE)
    info = json.loads(ran.out)
    assert info["path"] == str(shipped_checkpoint())
    assert "nvfp4" in json.loads(dsv4("info", "flash-mini-nvfp4", "--json").out)["weights"]["bytes_by_format"]


def test_eval_reads_the_shipped_text(dsv4):
    ran = dsv4("eval", "--max-tokens", 24, "--decode-tokens", 0, "--json")
    assert ran.code == 0
    assert ran.err.startswith(NOTE)
    numbers = json.loads(ran.out)
    assert numbers["tokens"] == 24
    assert [mode["name"] for mode in numbers["modes"]] == ["exact", "official", "official, FP8 index keys"]


def test_a_folder_comes_before_a_shipped_name(tmp_path, monkeypatch, dsv4):
    monkeypatch.chdir(tmp_path)
    assert find_checkpoint("flash-mini") == shipped_checkpoint()
    (tmp_path / "flash-mini").mkdir()
    assert str(find_checkpoint("flash-mini")) == "flash-mini"
    ran = dsv4("generate", "x", "--model", "flash-mini")
    assert ran.code == 2
    assert "config.json" in ran.err
    assert dsv4("generate", "x", "--model", "flash-maxi").code == 2
