"""`Backend`: exchanging an op keeps the layout of weights, graphs and compiling ahead; nobody compares ops."""

import ast
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import pytest
import torch

import dsv4
from dsv4.cache.manager import KVCacheManager
from dsv4.config import EngineConfig, ModelConfig
from dsv4.engine.run.runner import Runner
from dsv4.formats.layouts import ShuffledTensor
from dsv4.formats.tensors import WideWeight
from dsv4.llm import LLM
from dsv4.loader.write.synth import random_params
from dsv4.model.prepare import prepare_params
from dsv4.model.transformer import Transformer
from dsv4.ops import TORCH, TRITON, OpSet
from dsv4.ops.moe import moe_ref
from dsv4.testing.numeric import assert_bitwise

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CONFIG = ModelConfig.tiny(
    vocab_size=64, hidden_size=128, num_hidden_layers=3, compress_ratios=(0, 4, 128), num_attention_heads=2, o_groups=1,
    n_routed_experts=4, index_n_heads=2, index_topk=8, num_nextn_predict_layers=0, max_position_embeddings=512,
)  # fmt: skip
# oracles in which the host reads what the device computed: seven that a capture on an H200 refused, and two made like
# them (moe_parts, compress_pair)
WAITING = {
    "moe", "moe_parts", "attention_inputs", "append_swa", "compress", "compress_pair", "index_topk", "sparse_attention",
    "sample",
}  # fmt: skip
ORACLES = {field.name: getattr(TORCH.ops, field.name) for field in fields(OpSet)}


def other_moe(*arguments, **options):
    return moe_ref(*arguments, **options)


def make_params():
    return random_params(CONFIG, experts="nvfp4", with_mtp=False)


def test_what_the_backends_can_do():
    assert TRITON.can_capture(CUDA)
    assert not TRITON.can_capture(CPU)
    assert not TORCH.can_capture(CUDA)
    assert (TORCH.has_kernels, TRITON.has_kernels) == (False, True)
    params = make_params()
    before = params.layers[1].ffn.experts.w1
    kept = prepare_params(params, TORCH).layers[1].ffn.experts.w1
    assert isinstance(kept, WideWeight)
    assert kept.source is before


@pytest.mark.parametrize("op", list(ORACLES))
def test_any_op_can_be_exchanged_alone(op):
    changed = TRITON.with_ops(**{op: ORACLES[op]})
    assert getattr(changed.ops, op) is ORACLES[op]
    assert [name for name in ORACLES if getattr(changed.ops, name) is not getattr(TRITON.ops, name)] == [op]
    assert (changed.layout, changed.has_kernels) == (TRITON.layout, TRITON.has_kernels)
    assert changed.can_capture(CUDA) == (op not in WAITING)
    assert changed.waiting_ops == ((op,) if op in WAITING else ())
    assert getattr(TRITON.ops, op) is not ORACLES[op]  # the original is as it was


def test_an_unknown_op_is_named():
    with pytest.raises(ValueError, match="no such op: activation_topk, softmax; the ops of a backend are rms_norm, "):
        TRITON.with_ops(softmax=None, activation_topk=None)


def test_weights_are_laid_out_though_an_op_is_exchanged():
    """`moe`, `linears` and `grouped_linear` are what layouts are for: none of them may be what turns one on."""
    block = prepare_params(
        make_params(), TRITON.with_ops(moe=other_moe, linears=ORACLES["linears"], grouped_linear=ORACLES["linears"])
    ).layers[1]
    assert isinstance(block.ffn.experts.w1, ShuffledTensor)
    assert isinstance(block.ffn.shared.w2, ShuffledTensor)
    assert block.attn.input_bundle is not None
    assert block.attn.latent_bundle is not None


def test_oracles_take_every_layout():
    """All of them on weights laid out for the kernels: the bits of weights as they were loaded."""

    def logits(backend):
        model = Transformer(CONFIG, prepare_params(make_params(), backend), torch.bfloat16, backend=backend)
        limits = EngineConfig(max_context_tokens=256, max_concurrent_requests=1)
        cache = KVCacheManager(CONFIG, model.schedule, limits, device=CPU, plain_dtype=None)
        batch = cache.make_batch([cache.admit(20)], [list(range(9))])
        return model.logits(model.forward(batch, cache.handle))

    assert_bitwise(logits(TRITON.with_ops(**ORACLES)), logits(TORCH))


def test_an_exchanged_op_keeps_graphs_and_warm_up(monkeypatch):
    """As `LLM` sets up its runner; a CPU stands for the device that can capture."""
    seen = []

    class Seen(Exception):
        pass

    def runner(model, cache, *, use_graphs, **rest):
        seen.append((use_graphs, model.context.backend.has_kernels, model.context.ops.moe))
        raise Seen

    monkeypatch.setattr("dsv4.llm_start.Runner", runner)
    capturing = replace(TRITON, graph_devices=frozenset({"cpu"}))
    for backend in (capturing.with_ops(moe=other_moe), TRITON.with_ops(moe=other_moe), TORCH.with_ops(moe=other_moe)):
        with pytest.raises(Seen):
            LLM.from_params(CONFIG, make_params(), backend=backend)
    assert seen == [(True, True, other_moe), (False, True, other_moe), (False, False, other_moe)]


@pytest.mark.parametrize("experts", ["fp8", "bf16"])
def test_experts_without_kernels_run_on_oracles_and_are_not_captured(experts, monkeypatch):
    """Loaded as they are, with oracles' bits; a warm-up would capture an op that waits for the device."""
    seen = []
    monkeypatch.setattr("dsv4.llm_start.Runner", partial(recorded_runner, seen))
    capturing = replace(TRITON, graph_devices=frozenset({"cpu"}))
    llm = LLM.from_params(CONFIG, random_params(CONFIG, experts=experts, with_mtp=False), backend=capturing)
    backend = llm.model.context.backend
    assert seen == [False]
    assert backend.waiting_ops == ("moe", "moe_parts")
    ffn = llm.model.params.layers[1].ffn
    x = torch.randn(3, CONFIG.hidden_size, dtype=torch.bfloat16)
    given = x, torch.tensor([[0, 3]] * 3), torch.rand(3, 2), ffn.experts.matrices, ffn.shared.matrices
    assert_bitwise(backend.ops.moe(*given, limit=10.0), ORACLES["moe"](*given, limit=10.0))


def recorded_runner(seen, *arguments, use_graphs, **options):
    seen.append(use_graphs)
    return Runner(*arguments, use_graphs=use_graphs, **options)


def identity_tests(source):
    """Lines that compare an op, an op set or a backend with something other than a constant."""

    def is_op(node):
        if isinstance(node, ast.Attribute):
            return node.attr == "ops" or is_op(node.value)
        return getattr(node, "id", None) in ("TORCH", "TRITON", "ops")

    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Compare)
        and not any(isinstance(side, ast.Constant) for side in node.comparators)
        and any(is_op(side) for side in (node.left, *node.comparators))
    ]


def modules_of(folder):
    found = list(folder.rglob("*.py"))
    assert found, f"{folder} has no modules: it was moved"
    return found


def test_nobody_compares_ops():
    assert identity_tests("if ops.moe is moe:\n    pass\nx = backend.ops == TORCH\ny = ops is None") == [1, 3]
    folder = Path(dsv4.__file__).parent
    files = [
        file for part in ("model", "engine", "loader", "tools", "http", "cli") for file in modules_of(folder / part)
    ]
    found = [f"{file.name}:{line}" for file in [*files, folder / "llm.py"] for line in identity_tests(file.read_text())]
    assert found == []
