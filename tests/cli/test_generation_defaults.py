"""Sampling defaults of a checkpoint, and what the commands and the server make of them."""

import json
import shutil

import pytest

from dsv4.config import ConfigError, ModelConfig
from dsv4.engine.run.start import choose_threads
from dsv4.loader.generation_defaults import read_sampling_defaults


@pytest.fixture
def folder(checkpoint, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    return copy


def write(folder, content):
    (folder / "generation_config.json").write_text(content if isinstance(content, str) else json.dumps(content))


def test_what_counts(tmp_path):
    assert read_sampling_defaults(tmp_path) == {}
    write(
        tmp_path,
        {"temperature": 0.6, "top_p": 0.95, "top_k": -1, "min_p": None, "do_sample": True, "eos_token_id": [1]},
    )
    assert read_sampling_defaults(tmp_path) == {"temperature": 0.6, "top_p": 0.95, "top_k": 0}


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "not a JSON file"), ("[]", "must hold an object"), ({"temperature": "hot"}, "temperature must be a number"),
     ({"top_p": 2}, "top_p must be a number")],
)  # fmt: skip
def test_what_cannot_be(tmp_path, content, message):
    write(tmp_path, content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_sampling_defaults(tmp_path)
    assert "generation_config.json" in str(caught.value)


def test_generate_follows_the_checkpoint_unless_told(dsv4, folder):
    def text(*options):
        ran = dsv4("generate", "--model", folder, "ab", "--max-tokens", 6, "--seed", 3, "--ignore-eos", *options)
        assert ran.code == 0, ran.err
        return ran.out, ran.err.partition("prompt tokens")[0]

    plain, greedy = text("--temperature", 1), text("--temperature", 0)
    assert plain[0] != greedy[0]
    write(folder, {"temperature": 0})
    followed = text()
    assert followed[0] == greedy[0]
    assert "note: generation_config.json gives temperature 0" in followed[1]
    assert text("--temperature", 1) == plain, "no note where the option decides"


@pytest.mark.parametrize(
    ("hidden_size", "environment", "threads"), [(256, None, 1), (4096, None, None), (256, "4", None)]
)
def test_threads(monkeypatch, hidden_size, environment, threads):
    """By the model alone, unless somebody has chosen."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if environment is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
    config = ModelConfig.flash() if hidden_size == 4096 else ModelConfig.tiny()
    assert config.hidden_size == hidden_size
    assert choose_threads(config) == threads
