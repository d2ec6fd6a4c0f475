"""Kernels compiled ahead: stand-ins keep what decides a kernel's key, and a call finds everything compiled."""

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_cases import SMALL
from offload_cases import offload

from dsv4.cache.manager import KVCacheManager
from dsv4.config import EngineConfig
from dsv4.engine.offload.placement import Placement
from dsv4.engine.offload.pool import LayerExperts
from dsv4.engine.run import runner as runner_module
from dsv4.engine.run.precompile import ALIGNMENT, on_meta, stand_in
from dsv4.engine.run.runner import Runner
from dsv4.formats.trees import tensors_of
from dsv4.loader.write.synth import random_params
from dsv4.model.transformer import Transformer
from dsv4.ops import TORCH, TRITON
from dsv4.ops.compile_only import SLOWEST

ROOT = Path(__file__).parents[3]
# swa, csa, hca, csa, csa; the first is routed by a table, and the csa layers are alike
FIVE_LAYERS = replace(SMALL, num_hidden_layers=5, compress_ratios=(0, 4, 128, 4, 4), num_nextn_predict_layers=0)


@pytest.fixture(scope="module")
def params():
    return random_params(FIVE_LAYERS)


def make_model(params, **options):
    model = Transformer(FIVE_LAYERS, params, torch.bfloat16, **options)
    limits = EngineConfig(max_context_tokens=256, max_concurrent_requests=8, max_chunk_tokens=64)
    return model, KVCacheManager(FIVE_LAYERS, model.schedule, limits, device="cpu", plain_dtype=None)


def run_process(name):
    """What precompile_process.py found. It compiles, so its kernels must not be interpreted."""
    pytest.importorskip("triton")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "engine")])
    command = [sys.executable, str(Path(__file__).with_name("precompile_process.py")), name]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


# ---- stand-ins ----


@pytest.mark.parametrize("first", [0, 1, 3, 8])
def test_a_tensor_on_meta_keeps_what_decides_a_kernel(first):
    base = torch.zeros(1024, dtype=torch.bfloat16)
    assert base.data_ptr() % ALIGNMENT == 0
    for tensor in (base[first : first + 60].view(6, 10), base[first:].view(-1)[: 6 * 20].view(6, 20)[:, 3:7].t()):
        found = on_meta((tensor,))[0]
        assert (found.device.type, found.dtype, found.shape) == ("meta", tensor.dtype, tensor.shape)
        assert found.stride() == tensor.stride()
        assert found.data_ptr() % ALIGNMENT == tensor.data_ptr() % ALIGNMENT
    assert on_meta((base[:0],))[0].shape == (0,)


def test_one_layer_of_each_kind_and_the_last(params):
    model, cache = make_model(params)
    made = stand_in(model, cache)
    assert [layer.layer_idx for layer in made.model.schedule] == [0, 1, 2, 4]
    assert len(made.model.weights.layers) == len(made.handles) == 4
    assert made.handles[2].entries.rows.data.shape == cache.handle(2).entries.rows.data.shape
    tensors = tensors_of((made.model.weights, made.handles, made.block_table))
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    # the model itself is as it was
    assert len(model.weights.layers) == 5
    assert model.weights.embed.device.type == model.context.window_freqs.device.type == "cpu"


@pytest.mark.parametrize("change", ["alignment", "width", "dtype"])
def test_a_layer_that_differs_is_kept(params, change):
    sink = params.layers[3].attn.sink
    other = {"alignment": torch.cat([sink[:1], sink])[1:], "width": torch.cat([sink, sink]), "dtype": sink.double()}[
        change
    ]
    last = replace(params.layers[3], attn=replace(params.layers[3].attn, sink=other))
    model, cache = make_model(replace(params, layers=[*params.layers[:3], last, params.layers[4]]))
    assert [layer.layer_idx for layer in stand_in(model, cache).model.schedule] == [0, 1, 2, 3, 4]


def test_offloaded_experts_become_stacks(params):
    moved, pool = offload(params, Placement(1, 2), TORCH, top_k=FIVE_LAYERS.num_experts_per_tok, device="cpu")
    model, cache = make_model(moved, backend=pool.backend)
    slots = stand_in(model, cache, pool)
    everything = stand_in(model, cache, pool, num_stacked=pool.num_experts)
    like = params.layers[0].ffn.experts.w1
    for made, count in ((slots, 3), (everything, 4)):
        weight = made.model.weights.layers[0].ffn.experts.w1
        assert weight.shape == (count, *like.shape[1:])
        assert {len(part) for part in tensors_of(weight) if part.dim() > 1} == {count}
        assert made.model.context.backend is TORCH
    assert not isinstance(slots.model.weights.layers[0].ffn.experts, LayerExperts)


# ---- compiling ----


def test_a_pass_that_fails_is_only_a_note(params, monkeypatch, caplog):
    def fail(*arguments, **options):
        raise RuntimeError("no such thing on meta")

    monkeypatch.setattr(runner_module, "can_compile_in_parallel", lambda: True)
    monkeypatch.setattr(runner_module, "precompile", fail)
    model, cache = make_model(params, backend=TRITON)
    with caplog.at_level(logging.WARNING, logger="dsv4.engine"):
        Runner(model, cache, buckets=(1,), use_graphs=False).precompile()
    assert "one by one: RuntimeError: no such thing on meta" in caplog.text


def test_kernels_compile_in_threads():
    """Each once, whatever order they end in; one that does not compile is left to its launch."""
    found = run_process("toy")
    assert found["names"] == ["_copy_kernel", "_copy_kernel"]
    assert found["launchers"] == [["_copy_kernel", "_copy_kernel"]] * 2
    assert found["after"] == []
    assert found["seen"] == [[1, 3], [2, 3], [3, 3]]
    assert found["num_launched"] == 5
    assert "shape" in found["error"]
    assert [text.partition(":")[0] for text in found["warnings"]] == ["_broken_kernel does not compile"]


def test_the_slowest_kernels_come_first():
    """Begun last, they would be waited for on one core, the others idle. Their names are those of kernels."""
    assert run_process("order") == ["_slowest_kernel", "_slow_kernel", "_copy_kernel", "_broken_kernel"]
    source = "".join(file.read_text() for file in (ROOT / "dsv4" / "ops").rglob("*.py"))
    assert all(f"def {name}(" in source for name in SLOWEST)


def test_workers_compile_for_the_process_that_asks():
    """It finds what they made. Without them it compiles all the same."""
    with_workers, without = run_process("workers")
    assert with_workers == {"here": [], "num_found": 2}
    assert without == {"here": ["_rms_norm_kernel"] * 2, "num_found": 2}


def test_stand_ins_launch_what_the_model_launches():
    """The models' own launches, in which tensors lie in memory, find the keys of all their kernels."""
    resident, *others = run_process("keys")
    for found in (resident, *others):
        assert found["late"] == []
        assert found["num_launches"] > 100
    assert len(resident["ahead"]) > 60
    offloaded, drafting = others[:2], others[2:]
    assert any(found["ahead"] for found in offloaded)  # stacks of other lengths
    assert all(found["ahead"] for found in drafting)  # a block, a head


def test_headers_are_enough_to_compile_everything():
    """While weights are read: the model that is then loaded has nothing left to compile. Some calls on "meta" would
    import torch's compiler, which takes a second; a drafter's still do."""
    models = run_process("headers")
    for found in models:
        assert found["late"] == []
        assert found["ahead"]
    assert [found["is_compiler_there"] for found in models] == [False, True, True]


def test_the_check_of_a_first_start_uses_the_kernels_that_serve():
    """Others would be compiled one by one while the server waits. Two are small, and the third takes a second."""
    found = run_process("first_check")
    assert len(found["ahead"]) > 60
    assert found["num_checks"] > 50
    assert found["num_launches"] > 1000
    assert set(found["late"]) <= {"topk_short_kernel", "_few_gate_up_kernel"}


def test_a_model_is_compiled_once():
    """For sm_90, whatever is there: a second pass finds every kernel of the first. Planted: a weight off its alignment
    is noticed."""
    found = run_process("offline")
    assert found["second"] == []
    assert found["seen"][-1] == [len(found["first"])] * 2
    for part in ("attend", "gate_up", "down", "linear", "hyper", "route", "compress", "topk", "norm"):
        assert any(part in name for name in found["first"]), (part, found["first"])
    assert found["shifted"] == ["_rms_norm_kernel"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["resident", "offloaded"])
def test_first_calls_find_everything_compiled(name):
    found = run_process(name)
    assert len(found["ahead"]) > 20
    assert found["late"] == []
    assert found["num_bytes"] == 0
    assert found["captured"]
