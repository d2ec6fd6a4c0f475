"""A checkpoint's own shapes: green on sound ops, red and named on planted mistakes; once before it is served."""

import json
from dataclasses import replace

import pytest
import torch

from dsv4.cli.main import main
from dsv4.config import ModelConfig
from dsv4.config.layers import build_schedule
from dsv4.engine.run import kernel_record
from dsv4.engine.run.kernel_record import KernelRefused, allowed_backend, model_key
from dsv4.llm import LLM
from dsv4.loader.checkpoint import Checkpoint
from dsv4.loader.write.synth import write_checkpoint
from dsv4.ops import TORCH, TRITON
from dsv4.testing import mistakes
from dsv4.tools.selftest import own
from dsv4.tools.selftest.report import Status
from dsv4.tools.selftest.run import SelftestOptions, run_selftest

CPU = torch.device("cpu")
KEY = {"gpu": "NVIDIA Test 9000", "driver": "1.2", "kernels": "abc", "torch": "2", "triton": "3"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = ModelConfig.tiny(hidden_size=384, num_attention_heads=6, n_routed_experts=5, index_n_heads=3)
    return write_checkpoint(tmp_path_factory.mktemp("odd") / "model", config, experts="nvfp4")


def run(folder, **exchanged):
    return run_selftest(CPU, SelftestOptions(backend=TORCH.with_ops(**exchanged), model=folder))


def test_layers_of_every_kind_are_kept_once():
    for config in (ModelConfig.flash(), ModelConfig.pro(), ModelConfig.tiny()):
        layers = build_schedule(config, with_mtp=False)
        small = own.one_of_each_kind(config)
        kept = build_schedule(small, with_mtp=False)
        kinds = {(layer.attention, layer.router) for layer in layers}
        assert len(kept) == len(kinds)
        assert {(layer.attention, layer.router) for layer in kept} == kinds
        assert (small.hidden_size, small.n_routed_experts) == (config.hidden_size, config.n_routed_experts)


def test_sound_ops_are_green(folder):
    report = run(folder)
    assert report.is_passed, report.failures
    assert {check.part for check in report.checks} == {"oracle", "batch", "requests"}
    checked = {check.op for check in report.checks}
    assert {"moe", "linears", "hc_enter", "hc_boundary", "sparse_attention", "index_topk", "compress_pair"} <= checked
    assert sum(check.part == "requests" for check in report.checks) == 3


@pytest.mark.parametrize(
    ("op", "mistake", "parts"),
    [
        ("rms_norm_quant", mistakes.wrong_scale, {"oracle"}),
        ("hc_enter", mistakes.follows_rows, {"batch"}),
        ("sparse_attention", mistakes.masked_tail, {"oracle"}),
    ],
)
def test_a_planted_mistake_is_red_and_named(folder, op, mistake, parts):
    report = run(folder, **{op: mistake(TORCH.ops)})
    assert report.ops_with(Status.FAILED) == [op]
    assert parts <= {check.part for check in report.failures if check.op == op}
    assert any(check.part == "requests" and f"the first op {op}" in check.detail for check in report.failures)


def test_the_command_names_what_it_takes(folder, capsys):
    for arguments, said in (
        ([str(folder), "--quick"], "leave out --op and --quick"),
        (["flash"], "is a preset"),
        ([str(folder), "--model", "other"], "give one model"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["selftest", *arguments])
        assert ended.value.code == 2
        assert said in " ".join(capsys.readouterr().err.split())


# ---- before a model is served ----


@pytest.fixture
def served(tmp_path, monkeypatch, folder):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel_record, "kernel_key", lambda device: KEY)
    monkeypatch.setattr(own, "has_compiled_kernels", lambda model: True)
    monkeypatch.setattr(own, "SHORT_TOKENS", own.INTERPRETED_TOKENS)
    monkeypatch.setattr(own, "SHORT_SIZES", own.INTERPRETED_SIZES)
    return lambda **ops: LLM(folder, backend=TORCH.with_ops(**ops))


def allowed(folder, *, is_ignored=False):
    config, tensors = ModelConfig.from_pretrained(folder), Checkpoint.open(folder).tensors.values()
    return allowed_backend(TRITON, torch.device("cuda"), config, tensors, is_ignored=is_ignored)


def test_a_served_model_is_checked_once(served, folder):
    llm = served()
    assert "at this model's shapes are right" in own.check_once(llm, is_ignored=False)
    assert own.check_once(llm, is_ignored=False) is None
    assert allowed(folder) is TRITON


def test_a_red_model_is_refused_now_and_when_it_is_loaded(served, folder):
    llm = served(sparse_attention=mistakes.masked_tail(TORCH.ops))
    assert own.check_once(llm, is_ignored=True) is None
    with pytest.raises(KernelRefused, match=r"at this model's shapes: sparse_attention.*--ignore-selftest"):
        own.check_once(llm, is_ignored=False)
    with pytest.raises(KernelRefused, match=r"`dsv4 selftest MODEL`.*NVIDIA Test 9000, at this model's shapes: sparse"):
        allowed(folder)
    assert allowed(folder, is_ignored=True) is TRITON


def test_other_shapes_have_another_verdict(served, folder, tmp_path):
    config = ModelConfig.from_pretrained(folder)
    tensors = Checkpoint.open(folder).tensors
    key = model_key(CPU, config, tensors.values())
    assert key == model_key(CPU, config, Checkpoint.open(folder).tensors.values())
    assert key != model_key(CPU, replace(config, num_experts_per_tok=1), tensors.values())
    assert key != model_key(CPU, config, [info for info in tensors.values() if info.dtype != "F32"])
    assert json.loads(json.dumps(key)) == key


def without_memory(*arguments, **options):
    raise torch.OutOfMemoryError("CUDA out of memory")


class CompilationError(Exception):
    """As Triton's."""


def without_compiler(*arguments, **options):
    raise CompilationError("no such instruction")


@pytest.mark.parametrize(
    ("error", "said"),
    [(without_memory, "left out for want of memory"), (without_compiler, "of sparse_attention cannot")],
)
def test_what_was_not_checked_is_said_and_not_called_right(served, folder, monkeypatch, error, said):
    """For want of memory nothing is kept: the next start checks again. What cannot run is served by its oracle."""
    compare = own.checks_of

    def checks_of(call, name, backend):
        return compare(call, name, backend.with_ops(sparse_attention=error))

    monkeypatch.setattr(own, "checks_of", checks_of)
    llm = served()
    line = own.check_once(llm, is_ignored=False)
    assert said in line
    num_right = int(line.split()[0])
    monkeypatch.setattr(own, "checks_of", compare)
    again = own.check_once(llm, is_ignored=False)
    if error is without_memory:
        assert allowed(folder) is TRITON
        assert int(again.split()[0]) > num_right
    else:
        assert again is None
        assert allowed(folder).ops.sparse_attention is TORCH.ops.sparse_attention


def test_cuts_without_memory_are_no_mistake(served, folder, monkeypatch):
    monkeypatch.setattr(own.CutModel, "rows", without_memory)
    assert "3 were left out" in own.check_once(served(), is_ignored=False)
    assert allowed(folder) is TRITON
