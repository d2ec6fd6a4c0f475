"""The shipped miniatures: complete, found without a path, the recorded greedy text, and recall beyond the window.

golden_flash_mini.json holds greedy continuations under "checkpoint/numerics": prompt, text, token ids and, for each
token, its distance (nats) from the second best. `exact` in fp32 and `official` on any CPU give the same tokens.
`official` rounds to bf16, FP8 and FP4 at every turn, so a sum in another order can move a gap by tenths: on another
device the rule of `assert_greedy` holds. The prompts were chosen, from 88, for clear choices.
"""

import json
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4 import LLM, EngineConfig, SamplingParams
from dsv4.config.layers import AttentionKind
from dsv4.loader.shipped import DSPARK_TWIN, NVFP4_TWIN, shipped_checkpoint, shipped_names, shipped_text
from dsv4.ops.attention import sparse_attention_ref
from dsv4.testing.numeric import assert_greedy
from dsv4.testing.shipped_data import GOLDEN_TEXTS
from dsv4.tools.evaluate import negative_log_likelihood
from dsv4.tools.plan.plan import plan

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "demo_model"))

import needle

ROOT = Path(__file__).parents[3]
GOLDEN = json.loads(GOLDEN_TEXTS.read_text(encoding="utf-8"))
COPIES = 16  # of the refrain
LIMITS = EngineConfig(max_context_tokens=128, max_concurrent_requests=12)


@pytest.fixture(scope="module")
def exact():
    return LLM(numerics="exact")


@pytest.fixture(scope="module")
def official():
    return LLM(engine=LIMITS)


@pytest.fixture(scope="module")
def plain(official):
    """What the miniature writes behind four golden prompts without drafts, by temperature."""
    return {temperature: continued(official, temperature) for temperature in (0.0, 1.0)}


def continued(llm, temperature):
    prompts = [row["prompt"] for row in GOLDEN["flash-mini/official"][:4]]
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=5, logprobs=0, ignore_eos=True)
    return [(found.token_ids, found.logprobs) for found in llm.generate(prompts, params)]


# ---- what ships ----


@pytest.mark.parametrize(("name", "drafts", "least"), [("flash-mini", 3, 0.5), (DSPARK_TWIN, 5, 0.5)])
def test_shipped_drafters_change_nothing_and_are_right_more_often_than_not(plain, name, drafts, least):
    """Tokens and log-probabilities, greedy and sampled; the first draft of a step at temperature 0."""
    llm = LLM(name, engine=LIMITS, drafts=drafts)
    assert continued(llm, 0.0) == plain[0.0]
    assert llm.engine.stats().drafts.acceptance[0] > least
    assert continued(llm, 1.0) == plain[1.0]


def test_the_dspark_twin_is_the_same_model(official):
    base, twin = official, LLM(DSPARK_TWIN, engine=LIMITS)
    assert replace(twin.config, dspark=None, compress_ratios=base.config.compress_ratios) == base.config
    assert twin.model.weights.mtp == []
    assert twin.config.num_draft_layers == len(twin.model.weights.dspark.blocks) == 2
    held, others = ({info.file for info in llm.checkpoint.tensors.values()} for llm in (base, twin))
    assert {file.resolve() for file in held} < {file.resolve() for file in others}


def test_the_default_model_is_flash_mini(official):
    assert official.config == LLM(shipped_checkpoint("flash-mini"), engine=LIMITS).config
    assert official.tokenizer is not None
    assert [layer.attention.value for layer in official.model.schedule] == [
        "swa", "swa", "csa", "hca", "csa", "hca", "csa", "swa"
    ]  # fmt: skip
    with pytest.raises(ValueError, match="config.json"):
        LLM("flash-maxi")


def test_its_cache_holds_the_planned_bytes(official):
    """The MTP block is loaded, but no draft is asked for: its rings are neither planned nor held."""
    assert official.model.weights.mtp
    assert official.cache.memory_bytes() == plan(official.config, LIMITS).schema.total_bytes


def test_everything_shipped_but_the_twin_is_package_data_and_small():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    package = ROOT / "dsv4"
    packed = {file for pattern in settings["package-data"]["dsv4"] for file in package.glob(pattern)}
    shipped = {file for file in (package / "demo").rglob("*") if file.is_file()}
    assert packed == {file for file in shipped if NVFP4_TWIN not in file.parts}
    assert settings["packages"]["find"]["exclude"] == ["dsv4.demo*"]  # else the twin's folder counts as a package
    assert shipped_text() in shipped
    assert shipped_names() == ["flash-mini", "flash-mini-dspark", "flash-mini-nvfp4"]
    for name in shipped_names():
        files = [file for file in shipped if file.parent.name == name]
        assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in files}
        assert sum(file.stat().st_size for file in files) < 20e6


def test_held_out_text_is_far_better_predicted_than_by_frequency(exact):
    """The unigram baseline over all held-out text is 862; NVFP4 experts cost less than 2 % of perplexity."""
    ids = exact.encode(shipped_text().read_text(encoding="utf-8"))[:640]
    nvfp4 = LLM("flash-mini-nvfp4", numerics="exact")
    first, second = (negative_log_likelihood(llm.logits(ids), ids) / (len(ids) - 1) for llm in (exact, nvfp4))
    assert torch.tensor(first).exp() < 862 / 20
    assert torch.tensor(second - first).exp() < 1.02


# ---- greedy text ----


@pytest.mark.parametrize("numerics", ["exact", "official"])
def test_greedy_text_token_for_token(official, numerics):
    rows = GOLDEN[f"flash-mini/{numerics}"]
    assert len(rows) == 12
    llm = official if numerics == "official" else LLM(numerics=numerics, engine=LIMITS)
    done = llm.generate([row["prompt"] for row in rows], SamplingParams(max_tokens=16, temperature=0))
    for found, row in zip(done, rows, strict=True):
        assert list(found.token_ids) == row["token_ids"], row["prompt"]
        assert found.text == row["text"]


def check_greedy(llm, rows):
    for row in rows:
        prompt = llm.encode(row["prompt"])
        logits = llm.logits([*prompt, *row["token_ids"][:-1]])[len(prompt) - 1 :]
        assert_greedy(logits, row["token_ids"], row["gaps"], row["prompt"])


def test_greedy_text_of_nvfp4():
    check_greedy(LLM("flash-mini-nvfp4", engine=LIMITS), GOLDEN["flash-mini-nvfp4/official"])


def test_greedy_text_of_another_model_is_refused(official):
    """The rule is not so wide that a model whose routed experts weigh a third less passes for flash-mini."""
    lighter = LLM.from_params(
        replace(official.config, routed_scaling_factor=1.0), official.model.weights, numerics=official.numerics,
        dtype=official.model.context.dtype, engine=LIMITS, tokenizer=official.tokenizer,
    )  # fmt: skip
    with pytest.raises(AssertionError, match="lacks"):
        check_greedy(lighter, GOLDEN["flash-mini/official"])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["flash-mini/exact", "flash-mini/official", "flash-mini-nvfp4/official"])
def test_greedy_text_on_gpu(name):
    checkpoint, numerics = name.split("/")
    check_greedy(LLM(checkpoint, device="cuda", numerics=numerics, engine=LIMITS), GOLDEN[name])


# ---- beyond the window ----


def test_facts_beyond_the_window_come_from_compressed_entries(exact):
    """A fact at least 160 tokens back, where the window of 128 does not reach. CSA entries carry the answer: without
    them it is lost, with or without HCA's."""
    prompts = needle.shipped_needles(3, 320)
    assert min(len(prompt) for prompt, _ in prompts) > exact.config.sliding_window + 32
    shares = {
        name: needle.accuracy(needle.hide_entries(exact, kinds), prompts) for name, kinds in needle.VARIANTS.items()
    }
    assert shares == {
        "nothing hidden": 1.0, "CSA entries hidden": 0.0, "HCA entries hidden": 1.0, "both hidden": 0.0,
    }  # fmt: skip


def test_a_refrain_beyond_every_window_comes_from_hca_entries(exact):
    """A word sung COPIES times, then more text than seven layers of windows reach back over, then the question. With
    CSA entries hidden, HCA entries alone carry it; with both hidden it is lost."""
    config = exact.config
    distance = config.num_hidden_layers * (config.sliding_window - 1) + 11
    prompts = needle.shipped_refrains(2, 1280, COPIES, min_distance=distance)
    assert needle.accuracy(needle.hide_entries(exact, (AttentionKind.CSA,)), prompts) == 1.0
    assert needle.accuracy(needle.hide_entries(exact, (AttentionKind.CSA, AttentionKind.HCA)), prompts) == 0.0


def test_an_engine_that_keeps_only_the_newest_hca_entry_loses_the_refrain(exact):
    """The test above can fail: the mistake changes nothing that a window or a CSA entry carries."""

    def newest_only(
        q: Tensor, rows: Any, window: Any, entries: Any, picks: Any, sink: Tensor, batch: Any, **rest: Any
    ) -> Tensor:
        if picks is not None:  # a CSA layer
            entries = picks = None
        elif entries is not None:
            picks = ((batch.positions + 1) // 128 - 1).unsqueeze(-1)
        return sparse_attention_ref(q, rows, window, entries, picks, sink, batch, **rest)

    prompts = needle.shipped_refrains(2, 768, COPIES, min_distance=320)
    mistaken = LLM.from_params(
        exact.config, exact.model.weights, numerics="exact", dtype=exact.model.context.dtype, engine=exact.cache.limits,
        tokenizer=exact.tokenizer, backend=exact.model.context.backend.with_ops(sparse_attention=newest_only),
    )  # fmt: skip
    assert needle.accuracy(needle.hide_entries(exact, (AttentionKind.CSA,)), prompts) == 1.0
    assert needle.accuracy(mistaken, prompts) == 0.0


def test_a_refrain_beyond_the_window_in_official_numerics():
    prompts = needle.shipped_refrains(2, 640, COPIES)
    assert needle.accuracy(needle.hide_entries(LLM(), (AttentionKind.CSA,)), prompts) == 1.0


def test_facts_beyond_the_window_in_official_numerics():
    assert needle.accuracy(LLM(), needle.shipped_needles(2, 320)) == 1.0
