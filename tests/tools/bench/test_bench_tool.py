"""`dsv4 bench model`: what it counts is right, every section runs on a CPU, and text, JSON and picture come out."""

import json

import pytest
import torch
import typer
from offload_cases import offload
from typer.testing import CliRunner

from dsv4.cli.bench import bench_app
from dsv4.config import ConfigError, ModelConfig
from dsv4.engine.offload.placement import Placement
from dsv4.loader.write.synth import random_params
from dsv4.ops import TORCH
from dsv4.tools.bench import model as bench
from dsv4.tools.bench.context import BenchModel, build_model, build_offloaded, cut_config, make_context
from dsv4.tools.bench.model import Report, Settings, layer_bytes, run_bench
from dsv4.tools.bench.report import PlotError, plot_report
from dsv4.tools.plan.sizes import count_weights

CPU = torch.device("cpu")
CONFIG = cut_config(
    ModelConfig.tiny(hidden_size=128, vocab_size=300, index_n_heads=2), schedule=["swa", "csa", "hca"], hash_layers=1
)


@pytest.fixture(scope="module")
def model():
    return BenchModel("small", CONFIG, random_params(CONFIG, with_mtp=False), "mxfp4", CPU, TORCH)


# ---- models ----


def test_cut_config():
    flash = ModelConfig.flash()
    four = cut_config(flash, 4)
    assert four.compress_ratios == (0, 0, 4, 128)
    assert (four.num_hidden_layers, four.num_hash_layers, four.num_nextn_predict_layers) == (4, 3, 0)
    named = cut_config(flash, 4, ["swa", "csa", "hca", "csa"], hash_layers=1)
    assert named.compress_ratios == (0, 4, 128, 4)
    assert named.num_hash_layers == 1
    assert named.hidden_size == flash.hidden_size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": 0}, "layers must be from 1 to 43, found 0"),
        ({"layers": 44}, "layers must be from 1 to 43, found 44"),
        ({"schedule": ["swa", "mla"]}, "a schedule lists swa, csa, hca, found 'mla'"),
        ({"schedule": []}, "found none"),
        ({"layers": 3, "schedule": ["swa"]}, "the schedule has 1 layers, but 3 were asked for"),
    ],
)
def test_models_that_cannot_be_cut(arguments, message):
    with pytest.raises(ConfigError, match=message):
        cut_config(ModelConfig.flash(), **arguments)


def test_a_model_that_cannot_fit_is_refused_at_once():
    with pytest.raises(ConfigError, match="ask for fewer layers"):
        build_model("pro")
    with pytest.raises(ConfigError, match="need a preset"):
        build_model(None, layers=2)


# ---- made-up contexts ----


@pytest.mark.parametrize(("batch_size", "context"), [(1, 1), (3, 7), (2, 128), (5, 700)])
def test_a_context_is_a_state_the_cache_could_be_in(model, batch_size, context):
    made = make_context(model, batch_size, context)
    made.cache.check_integrity()
    positions = made.batch.positions.tolist()
    assert max(positions) == context - 1
    assert len(set(positions)) == min(batch_size, context)
    ring = made.cache.handle(0).window
    for slot, position in zip(made.slots, positions, strict=True):
        held = sorted(p for p in ring.positions[slot].tolist() if p >= 0)
        assert held == list(range(max(0, position - ring.ring_len), position))
    logits = model.transformer().logits(model.transformer().forward(made.batch, made.cache.handle))
    assert bool(logits.isfinite().all())


def test_a_context_is_really_read(model):
    """Another seed, other rows: the logits must move, at every layer kind that has rows."""
    first, second = (make_context(model, 1, 600, seed) for seed in (1, 2))
    same_token = make_context(model, 1, 600, 1)
    run = model.transformer()
    outputs = [run.logits(run.forward(made.batch, made.cache.handle)) for made in (first, same_token)]
    assert torch.equal(*outputs)
    entries = [made.cache.handle(1).entries.rows.data for made in (first, second)]
    assert not torch.equal(*entries)


def test_a_context_that_cannot_be(model):
    with pytest.raises(ConfigError, match="from 1 to 16384 tokens, found 16385"):
        make_context(model, 1, 16385)


# ---- what is counted ----


def test_bytes_of_a_layer(model):
    """All weights of the layer but the experts not chosen, and the rows of the cache it reads."""
    made = make_context(model, 1, 512)
    sizes = count_weights(CONFIG, "mxfp4", with_draft=False)
    whole = sum(t.num_bytes for t in sizes.tensors if t.name.startswith("layers."))
    norms = sum(t.num_bytes for t in sizes.tensors if t.name.startswith("layers.") and t.name.endswith("_norm.weight")
                and "attn." not in t.name)  # fmt: skip
    tables = sum(t.num_bytes for t in sizes.tensors if t.dtype == "I64" or t.name.endswith("gate.bias"))
    layers = [model.transformer().schedule[i] for i in range(3)]
    weights_only = sum(layer_bytes(model, layer, made, CONFIG.n_routed_experts) for layer in layers)
    row = made.cache.handle(0).window.rows.format.row_bytes
    key = made.cache.handle(1).index_keys.rows.format.row_bytes
    cached = 3 * 128 * row + CONFIG.index_topk * row + 128 * key + 4 * row
    assert weights_only == whole - norms - tables + cached
    fewer = layer_bytes(model, layers[0], made, 2)
    assert fewer < layer_bytes(model, layers[0], made, 8)


# ---- sections ----


SETTINGS = Settings(
    batches=(1, 3), contexts=(4, 260), prefill_tokens=(20,), concurrencies=(1, 2), prompt_tokens=5, output_tokens=3,
    repeats=3, bandwidth=1e9,
)  # fmt: skip


@pytest.fixture(scope="module")
def report(model):
    return run_bench(model, SETTINGS)


def test_every_section_gives_its_records(report):
    counts = {
        kind: len(report.of(kind)) for kind in ("decode", "layer", "stream", "prefill", "serving", "memory", "error")
    }
    assert counts == {"decode": 4, "layer": 12, "stream": 2, "prefill": 1, "serving": 2, "memory": 1, "error": 0}
    for record in report.of("decode"):
        assert record["tokens_per_second"] == pytest.approx(1e3 * record["batch"] / record["ms"], rel=0.01)
        assert record["mode"] == "direct"
    for record in report.of("layer"):
        assert record["floor_ms"] == pytest.approx(1e3 * record["bytes"] / 1e9, abs=1e-4)
        assert record["launches"] is None
    assert [record["attention"] for record in report.of("layer")[:3]] == ["swa", "csa", "hca"]
    for record in report.of("serving"):
        assert 0 < record["first_token_ms"] <= record["first_token_ms_max"]
        assert 0 < record["between_tokens_ms"] <= record["between_tokens_ms_p99"]


def test_memory_is_what_was_planned(report):
    (record,) = report.of("memory")
    assert record["weights"] == record["weights_planned"]
    assert record["cache"] == record["cache_planned"]


def test_an_offloaded_model(model):
    params, pool = offload(model.params, Placement(2, 3), TORCH, top_k=CONFIG.num_experts_per_tok, device=CPU)
    moved = BenchModel("small", CONFIG, params, "mxfp4", CPU, pool.backend, pool)
    found = run_bench(moved, Settings(contexts=(40,), repeats=3, sections=("decode", "layers", "memory")))
    assert not found.of("error")
    stream = bench.measure_stream(moved, 40, 5)
    moved_bytes = stream["misses_per_token"] * pool.layers[0].expert_bytes
    assert stream["bytes_per_token"] == pytest.approx(moved_bytes, abs=1)
    assert stream["misses_per_token"] > 0
    assert found.of("memory")[0]["weights"] < found.of("memory")[0]["weights_planned"]


@pytest.mark.parametrize("experts", ["mxfp4", "nvfp4", "bf16"])
def test_a_random_offloaded_model(experts):
    made = build_offloaded("tiny", layers=2, experts=experts, placement=Placement(1, 3))
    settings = Settings(
        contexts=(40,), prefill_tokens=(9,), repeats=3, sections=("stream", "prefill", "serving", "memory")
    )
    found = run_bench(made, settings)
    assert {record["kind"] for record in found.records} == {"stream", "prefill", "serving", "memory"}
    assert made.pool is not None
    made.pool.check_integrity()
    if experts != "bf16":
        codes = made.pool.layers[0]._host[0].data
        assert not torch.equal(codes[0], codes[1])
    logits = made.transformer().logits(torch.randn(2, 4, 256).bfloat16())
    assert bool(logits.isfinite().all())


def test_the_placement_of_the_plan():
    """On a CPU the plan is that of an H200, which holds the tiny model whole."""
    made = build_offloaded("tiny", layers=1)
    assert made.pool is not None
    assert made.pool.placement == Placement(8, 0)
    assert made.pool.host_bytes() == 0


def test_a_section_that_fails_leaves_the_others(model, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("CUDA out of memory\nmore lines")

    monkeypatch.setattr(bench, "measure_prefill", fail)
    found = run_bench(model, Settings(contexts=(4,), repeats=3, sections=("prefill", "memory")))
    assert found.of("error") == [
        {"kind": "error", "what": "prefill, 512 tokens", "error": "CUDA out of memory"}
    ]  # fmt: skip
    assert found.of("memory")


# ---- the command ----


@pytest.fixture
def command():
    app = typer.Typer()
    app.add_typer(bench_app, name="bench")
    return lambda *arguments: CliRunner().invoke(app, ["bench", *arguments])


def test_the_command(command, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "speed.png"
    options = ["--schedule", "swa,csa", "--batches", "1", "--contexts", "8,64", "--repeats", "3"]
    ran = command("model", "tiny", *options, "--sections", "decode,layers", "--plot", str(picture))
    assert ran.exit_code == 0, ran.output
    assert "tiny-2 on " in ran.stdout
    assert "One layer in a decode step" in ran.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    ran = command(
        "model", "tiny", *["--layers", "1", "--sections", "prefill", "--prefill", "9", "--json", "--repeats", "3"]
    )
    data = json.loads(ran.stdout)
    assert data["records"][0]["tokens"] == 9
    assert data["origin"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["tiny", "--batches", "1,x"], "--batches must be positive integers separated by commas, found '1,x'"),
        (["tiny", "--contexts", "0"], "--contexts must be positive"),
        (["tiny", "--experts", "int4"], "--experts must be one of"),
        (["tiny", "--device", "tpu"], "--device must be cpu or cuda"),
        (["tiny", "--sections", "speed"], "sections are decode, layers, stream, prefill, serving, memory, found speed"),
    ],
)
def test_mistakes_on_the_command_line(command, options, message):
    ran = command("model", *options)
    assert isinstance(ran.exception, ConfigError)
    assert message in str(ran.exception)


def test_nothing_to_plot(tmp_path):
    with pytest.raises(PlotError, match="no decode records"):
        plot_report(Report("m", {"device": "d", "torch": "t"}, ()), tmp_path / "x.png")
