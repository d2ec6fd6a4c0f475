"""The memory plan: its arithmetic against the cache itself, its answers, its texts, and the command."""

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from dsv4.cli.plan import plan_command
from dsv4.config import ConfigError, EngineConfig, ModelConfig
from dsv4.engine.offload.placement import HOLE_BYTES, graph_bytes, workspace_bytes
from dsv4.ops.attention import PLAN
from dsv4.tools.bench.context import cut_config
from dsv4.tools.plan.plan import plan
from dsv4.tools.plan.targets import GIB, GPU_GIB, parse_gpu, resolve_target
from dsv4.tools.plan.text import print_plan

FLASH, PRO, TINY = ModelConfig.flash(), ModelConfig.pro(), ModelConfig.tiny()
SET_A = "tests/vectors/setA/model"


@pytest.fixture
def run():
    app = typer.Typer()
    app.command()(plan_command)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def test_json_without_a_gpu_has_all_of_them(run):
    data = json.loads(run("flash", "--json").stdout)
    assert [fit["gpu"] for fit in data["fits"]] == list(GPU_GIB)
    assert data["weights"]["total_bytes"] == 159_609_485_896
    assert "\n" not in data["summary"]


def test_tokens_of_cache_beside_tensor_parallelism(run):
    """What is left of each GPU, by hand; nearly as many times as there are GPUs, where weights are small."""
    data = json.loads(run("flash", "--gpu", "b200", "--gpus", "8", "--requests", "64", "--json").stdout)
    assert [one["gpus"] for one in data["capacities"]] == [2, 4, 8]
    eight, gpu, per_token = data["capacities"][-1], data["gpu"], data["kv"]["bytes_per_token"]
    rest = gpu["total_bytes"] - gpu["weights_bytes"] - gpu["cache_bytes"]
    room = GPU_GIB["b200"] * GIB - rest
    assert eight["tokens"] == 8 * int((room - gpu["weights_bytes"]) / per_token)
    assert eight["tensor_parallel_tokens"] == int((room - data["weights"]["total_bytes"] // 8) / per_token)
    assert 7 < eight["tokens"] / eight["tensor_parallel_tokens"] < 8
    small = json.loads(run("pro", "--gpu", "40", "--json").stdout)["capacities"]
    assert [one["tokens"] for one in small] == [0, 0, 0]
    assert json.loads(run("flash", "--json").stdout)["capacities"] == []
    assert "DP attention + EP" in run("flash", "--gpu", "h200").stdout


def total_on(config, engine, **arguments):
    return plan(config, engine, gpu="1000", **arguments).budget.total


@pytest.mark.parametrize("offload", [False, True])
def test_capacities_are_the_largest_that_fit(offload):
    engine = EngineConfig(max_context_tokens=32768, max_concurrent_requests=4)
    gpus, usable = 2, GPU_GIB["h200"] * GIB
    fit = plan(FLASH, engine, gpu="h200", gpus=gpus, offload_experts=offload).fits[0]
    arguments = {"gpus": gpus, "offload_experts": offload}
    most = dict(fit.max_requests)[32768]
    assert total_on(FLASH, replace(engine, max_concurrent_requests=most), **arguments) <= usable
    assert total_on(FLASH, replace(engine, max_concurrent_requests=most + 1), **arguments) > usable
    many = replace(engine, max_concurrent_requests=600)
    longest = plan(FLASH, many, gpu="h200", **arguments).fits[0].max_context_tokens
    assert 0 < longest < FLASH.max_position_embeddings
    assert total_on(FLASH, replace(many, max_context_tokens=longest), **arguments) <= usable
    assert total_on(FLASH, replace(many, max_context_tokens=longest + 1), **arguments) > usable


def test_fewest_gpus():
    engine = EngineConfig(max_context_tokens=1048576, max_concurrent_requests=64)
    fit = plan(FLASH, engine, gpu="h200").fits[0]
    assert not fit.fits
    assert fit.spare_bytes < 0
    assert plan(FLASH, engine, gpu="h200", gpus=fit.min_gpus).fits[0].fits
    assert not plan(FLASH, engine, gpu="h200", gpus=fit.min_gpus - 1).fits[0].fits
    assert plan(PRO, engine, gpu="1").fits[0].min_gpus is None


def test_experts_are_divided_and_offloaded():
    engine = EngineConfig()
    one, three = plan(FLASH, engine, gpu="h200"), plan(FLASH, engine, gpu="h200", gpus=3)
    routed = one.weights.routed_expert_bytes
    assert one.budget.weights == one.weights.total_bytes
    assert three.budget.weights == one.weights.total_bytes - routed + routed // 256 * 86
    offloaded = plan(FLASH, engine, gpu="h200", offload_experts=True)
    assert offloaded.budget.host == routed
    staged, chosen = routed * 2 // 44, routed * 6 // 256  # two layers whole, and what one token chooses of every layer
    assert offloaded.budget.weights == one.weights.total_bytes - routed + staged + chosen
    assert plan(FLASH, engine, with_draft=False, gpu="1").weights.total_bytes < one.weights.total_bytes


def test_reserves_by_hand():
    engine = EngineConfig(max_context_tokens=8192, max_concurrent_requests=5, max_chunk_tokens=16, max_draft_tokens=3)
    # 256 wide, 4 streams, 4 heads of 128: attention 2 * (1024 + 384 + 512) + 64 = 3904, experts 3 * 2 * 640 = 3840
    per_token = 4096 + 1536 + 1024 + 3904
    draws = 8 * 25 * 512

    def held(alive):
        return max(alive, alive // 2 + HOLE_BYTES)

    assert workspace_bytes(TINY, engine) == held(20 * per_token + 4 * 20 * 2048 + draws)
    long = replace(engine, max_context_tokens=131_073)  # two runs of attention for each token
    assert workspace_bytes(TINY, long) == held(20 * per_token + 4 * 20 * 32_769 + 4 * 64 * 128 * 40 + draws)
    more = workspace_bytes(FLASH, replace(long, max_chunk_tokens=8192)) - workspace_bytes(
        FLASH, replace(long, max_chunk_tokens=8192, max_context_tokens=131_072)
    )
    states = 4 * 256 + PLAN.max_states * 4 * 64 * 512
    assert states // 2 <= more <= states
    many = EngineConfig(max_concurrent_requests=100)
    assert graph_bytes(FLASH, many) >> 18 == 8 * 43, "eight sizes"
    assert graph_bytes(FLASH, replace(many, max_draft_tokens=3)) >> 18 == 10 * (43 + 4), "more, each with an MTP block"


def test_a_plan_is_what_a_gpu_held():
    """Its reserves were fitted to these three runs of four Flash layers; weights and cache are counted."""
    config = cut_config(FLASH, schedule=("swa", "csa", "hca", "csa"), hash_layers=1)
    lines = Path("benchmarks/results/nvidia-h200-step.jsonl").read_text(encoding="utf-8").splitlines()
    runs = [record for record in map(json.loads, lines) if record["kind"] == "memory"]
    assert len(runs) == 3
    for run in runs:
        limits = EngineConfig(
            max_context_tokens=run["context"], max_concurrent_requests=run["requests"], max_chunk_tokens=run["chunk"]
        )
        planned = plan(config, limits, experts="nvfp4", with_draft=False).budget.total
        assert abs(planned / run["used"] - 1) < 0.03


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"gpu": "b200"}, ["Fits on 1 x b200", "to spare", "the KV cache limits"]),
        ({"gpu": "h200"}, ["Does not fit", "weights and reserves limit", "--gpus 2", "--offload-experts (140.2 GiB"]),
        ({"gpu": "h200", "offload_experts": True}, ["Fits on 1 x h200"]),
        ({"gpu": "2"}, ["Does not fit on 1 x 2 GiB", "a larger GPU or smaller experts would help"]),
    ],
)
def test_summary(arguments, expected):
    summary = plan(FLASH, EngineConfig(), **arguments).summary
    assert all(text in summary for text in expected), summary


def test_summary_when_the_cache_limits():
    engine = EngineConfig(max_context_tokens=1048576, max_concurrent_requests=64)
    result = plan(FLASH, engine, gpu="h200", gpus=2)
    fit = result.fits[0]
    assert f"the KV cache limits: {result.budget.cache / GIB:.1f} GiB a GPU" in result.summary
    assert f"{dict(fit.max_requests)[1048576]} requests of 1048576 tokens fit" in result.summary
    assert f"--gpus {fit.min_gpus}" in result.summary


def test_text_fits_a_terminal_and_agrees_with_the_plan():
    result = plan(FLASH, EngineConfig(), name="flash")
    console = Console(width=80, record=True, file=io.StringIO())
    print_plan(result, console)
    text = console.export_text()
    assert "…" not in text
    for expected in ("159,609,485,896", "3,514.25", "3,214,336", "11,776,000", f"{result.budget.workspace:,}", "h200"):
        assert expected in text
    assert " ".join(result.summary.split()) in " ".join(text.split())


def test_gpus_by_name_and_by_size():
    assert parse_gpu(" H200 ").usable_bytes == 139 * GIB
    assert parse_gpu("79.5").usable_bytes == 79.5 * GIB
    assert parse_gpu("96GiB").name == "96 GiB"
    for text in ("h300", "", "-1", "0", "nan", "inf", "1e30"):
        with pytest.raises(ConfigError, match="gpu"):
            parse_gpu(text)


def test_targets(request, tmp_path):
    assert resolve_target("Flash").config == FLASH
    folder = request.config.rootpath / SET_A
    for path in (folder, folder / "config.json"):
        target = resolve_target(str(path))
        assert (target.config, target.experts) == (ModelConfig.from_pretrained(folder), "mxfp4")
    raw = json.loads((folder / "config.json").read_text())
    for changes, experts in (
        ({"expert_dtype": "fp8"}, "fp8"),
        ({"quantization_config": {"quant_method": "fp8", "moe_quant_algo": "NVFP4"}}, "nvfp4"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(raw | changes))
        assert resolve_target(str(tmp_path)).experts == experts
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": {"moe_quant_algo": "INT4"}}))
    with pytest.raises(ConfigError, match="moe_quant_algo must be 'NVFP4', found 'INT4'"):
        resolve_target(str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["flush"], "'flush' is neither a preset"),
        (["flash", "--gpu", "h300"], "gpu must be one of"),
        (["flash", "--gpus", "0"], "gpus must be from 1 to the number of experts 256, found 0"),
        (["flash", "--gpus", "257"], "found 257"),
        (["flash", "--experts", "int4"], "--experts must be one of"),
        (["flash", "--index-keys", "bf16"], "--index-keys must be fp4 or fp8"),
        (["flash", "--context", "0"], "max_context_tokens must be a positive integer"),
        (["flash", "--context", "1048577"], "max_position_embeddings 1048576"),
        (["flash", "--requests", "0"], "max_concurrent_requests must be a positive integer"),
        (["flash", "--draft-tokens", "2", "--no-mtp"], "needs draft blocks"),
    ],
)
def test_bad_input_is_a_config_error(run, arguments, message):
    result = run(*arguments)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


def test_options_reach_the_plan(run):
    options = (
        "--gpu 96 --gpus 4 --context 5000 --requests 6 --chunk 100 --draft-tokens 2 --index-keys fp8 --experts nvfp4"
    )
    data = json.loads(run("flash", *options.split(), "--offload-experts", "--json").stdout)
    expected = {
        "max_context_tokens": 5000,
        "max_concurrent_requests": 6,
        "max_chunk_tokens": 100,
        "max_draft_tokens": 2,
        "index_key_format": "fp8",
    }
    assert data["engine"] == expected
    assert data["kv"]["bytes_per_token"] == 3850.25
    assert data["kv"]["window_bytes_per_request"] == 584 * 130 * 44
    assert data["weights"]["experts"] == "nvfp4"
    assert (data["gpu"]["gpus"], data["gpu"]["offload_experts"]) == (4, True)
    assert data["fits"][0]["usable_bytes"] == 96 * GIB
    assert json.loads(run("tiny", "--no-mtp", "--json").stdout)["weights"]["num_draft_parameters"] == 0


@pytest.mark.parametrize(
    ("arguments", "chunk"),
    [
        (["--gpu", "b200"], 8192),
        (["--gpu", "b200", "--chunk", "2048"], 2048),
        (["--gpu", "h200", "--offload-experts"], 2048),
        (["--gpus", "2"], 8192),  # of H200s
        (["--gpu", "80"], 512),  # the weights do not fit
    ],
)
def test_the_chunk_of_a_plan(run, arguments, chunk):
    assert json.loads(run("flash", *arguments, "--json").stdout)["engine"]["max_chunk_tokens"] == chunk


@pytest.mark.parametrize(
    "module",
    ["dsv4.cache.schema", "dsv4.cache.allocator", "dsv4.cache.errors", "dsv4.tools.plan.plan", "dsv4.cli.plan"],
)
def test_plans_need_no_torch(module, request):
    script = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=request.config.rootpath)
    assert torch.__version__  # the machine has it, so the import above could have failed
