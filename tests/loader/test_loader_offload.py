"""Experts that go home one by one: the same bits, each once, with nothing but one expert in hand."""

import weakref
from dataclasses import replace

import pytest
import torch
from loader_cases import SET_A, SMALL, flatten, gathered, same_bits
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4.config import ModelConfig
from dsv4.engine.offload.load import load_offloaded
from dsv4.engine.offload.placement import Placement
from dsv4.engine.offload.pool import LayerExperts
from dsv4.formats.trees import tensors_of
from dsv4.loader.checkpoint import Checkpoint
from dsv4.loader.weights import expert_by_expert, load_params, plan_load
from dsv4.loader.write.synth import random_params, write_checkpoint
from dsv4.model.prepare import prepare_params
from dsv4.ops import TORCH, TRITON

CPU = torch.device("cpu")
CONFIG = replace(SMALL, hidden_size=128, q_lora_rank=128, o_lora_rank=64, n_routed_experts=8, moe_intermediate_size=128)
PLACEMENT = Placement(3, 2)


def nbytes(*trees):
    return sum(part.numel() * part.element_size() for tree in trees for part in tensors_of(tree))


def blocks_of(params):
    return [*params.layers, *(draft.block for draft in params.mtp)]


def held(layer, expert_idx):
    """The tensors of an expert, from its fixed slot or its place on the host."""
    where = layer._host_row.get(expert_idx)
    slot = int(layer._slot_of[expert_idx])
    return [host[where] if where is not None else device[slot] for device, host in layer._parts]


@pytest.mark.parametrize("backend", [TORCH, TRITON], ids=["as stored", "shuffled"])
@pytest.mark.parametrize("experts", ["mxfp4", "nvfp4", "fp8", "bf16"])
def test_every_expert_is_at_home_bit_for_bit(tmp_path, experts, backend):
    """Against stacks loaded whole and prepared whole; every other parameter is the same too."""
    folder = write_checkpoint(tmp_path / "model", CONFIG, experts=experts, shard_bytes=150_000)
    params, pool = load_offloaded(Checkpoint.open(folder), CONFIG, PLACEMENT, backend, device=CPU)
    whole = random_params(CONFIG, experts=experts)
    for one, other in zip(flatten(params.layers[1].attn), flatten(whole.layers[1].attn), strict=True):
        assert same_bits(one[1], other[1]) if isinstance(one[1], torch.Tensor) else one == other
    prepare_params(whole, backend)
    for layer_idx, (block, expected) in enumerate(zip(blocks_of(params), blocks_of(whole), strict=True)):
        layer = block.ffn.experts
        assert isinstance(layer, LayerExperts)
        assert pool.layers[layer_idx] is layer
        stacks = tensors_of(expected.ffn.experts.matrices)
        for expert_idx in range(8):
            for found, stack in zip(held(layer, expert_idx), stacks, strict=True):
                assert same_bits(found, stack[expert_idx])
        assert [weight.shape[1:] for weight in layer.stack] == [w.shape[1:] for w in expected.ffn.experts.matrices]


def test_matrices_of_an_expert_may_lie_apart(tmp_path):
    """All w1 first, then all w3, then w2, layers backwards: still one expert at a time."""
    folder = write_checkpoint(tmp_path / "model", CONFIG)
    tensors = gathered(folder)
    # a file of its own for each matrix and layer: the order of the files is that of the names
    for number, part in enumerate(("w1", "w3", "w2")):
        for layer_idx in range(3):
            prefix = f"layers.{layer_idx}.ffn.experts."
            names = [name for name in tensors if name.startswith(prefix) and f".{part}." in name]
            save_file({name: tensors.pop(name) for name in names}, folder / f"{number}-{9 - layer_idx}.safetensors")
    save_file(tensors, folder / "a.safetensors")
    checkpoint = Checkpoint.open(folder)
    order = [source.tensor for source in expert_by_expert(plan_load(checkpoint, CONFIG).sources)]
    assert [tensor.name.split(".")[1] for tensor in order if ".experts." in tensor.name][:3] == ["2", "2", "2"]
    found = [tensor.base.rpartition(".")[0] for tensor in order if tensor.expert_idx is not None]
    assert found == [name for name in dict.fromkeys(found) for _ in range(3)]
    params, pool = load_offloaded(checkpoint, CONFIG, PLACEMENT, TORCH, device=CPU)
    whole = load_params(checkpoint, CONFIG)
    assert [layer.layer_idx for layer in pool.layers] == [0, 1, 2, 3]
    for block, expected in zip(blocks_of(params), blocks_of(whole), strict=True):
        stacks = tensors_of(expected.ffn.experts.matrices)
        assert all(
            same_bits(found, stack[expert_idx])
            for expert_idx in range(8)
            for found, stack in zip(held(block.ffn.experts, expert_idx), stacks, strict=True)
        )


def test_progress_reports_every_byte_once():
    calls = []
    checkpoint, config = Checkpoint.open(SET_A), ModelConfig.from_pretrained(SET_A)
    load_offloaded(
        checkpoint, config, PLACEMENT, TORCH, device=CPU, progress=lambda done, total: calls.append((done, total))
    )
    assert {total for _, total in calls} == {checkpoint.nbytes}
    assert calls[-1][0] == checkpoint.nbytes
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations created and that are still there, and the most there ever were."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._users = {}  # storage: its bytes and how many tensors it has

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {arg.untyped_storage()._cdata for arg in args if isinstance(arg, torch.Tensor)}
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and not any(tensor is arg for arg in args):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._users:
                    if storage._cdata in known:
                        continue  # a view of what was there before
                    self._users[storage._cdata] = [storage.nbytes(), 0]
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                self._users[storage._cdata][1] += 1
                weakref.finalize(tensor, self._drop, storage._cdata)
        return result

    def _drop(self, storage):
        self._users[storage][1] -= 1
        if self._users[storage][1] == 0:
            self.now -= self._users.pop(storage)[0]


def load_counted(folder, config, backend, placement=PLACEMENT):
    """Loaded, with what it keeps and the most it took beyond that, in bytes of the device and the host together."""
    with LiveBytes() as live:
        params, pool = load_offloaded(Checkpoint.open(folder), config, placement, backend, device=CPU)
        others = [replace(block, ffn=replace(block.ffn, experts=None)) for block in blocks_of(params)]
        rest = nbytes(params.embed, params.lm_head, params.head, others)
        rest += sum(nbytes(replace(draft, block=None)) for draft in params.mtp)
        kept = rest + pool.device_bytes() + pool.host_bytes() + sum(nbytes(layer._slot_of) for layer in pool.layers)
        assert live.now == kept
    return kept, live.peak - kept


def test_nothing_is_held_twice(tmp_path):
    """As stored: an expert goes from the mapped file to its home; not even one is copied on the way."""
    folder = write_checkpoint(tmp_path / "model", CONFIG)
    _, extra = load_counted(folder, CONFIG, TORCH)
    assert extra == 0
    checkpoint = Checkpoint.open(folder)
    routed = sum(info.nbytes for name, info in checkpoint.tensors.items() if ".ffn.experts." in name)
    _, pool = load_offloaded(checkpoint, CONFIG, PLACEMENT, TORCH, device=CPU)
    assert pool.host_bytes() == routed // 8 * 5
    assert pool.device_bytes() == routed // 8 * 5


def test_a_new_layout_takes_one_expert_whatever_their_number(tmp_path):
    """What shuffling takes beyond the model does not grow with experts or layers."""
    larger = replace(CONFIG, n_routed_experts=24)
    extras = []
    for config in (CONFIG, larger):
        folder = write_checkpoint(tmp_path / str(config.n_routed_experts), config)
        extras.append(load_counted(folder, config, TRITON)[1])
    assert 0 < extras[0] == extras[1]


def test_the_count_sees_a_second_copy(tmp_path, monkeypatch):
    """Planted: whoever takes the experts keeps what it was given."""
    folder = write_checkpoint(tmp_path / "model", CONFIG)
    kept, put = [], LayerExperts.put

    def greedy(layer, expert_idx, weights):
        kept.append([part.clone() for part in tensors_of(weights)])
        put(layer, expert_idx, weights)

    monkeypatch.setattr(LayerExperts, "put", greedy)
    with pytest.raises(AssertionError):
        load_counted(folder, CONFIG, TORCH)
