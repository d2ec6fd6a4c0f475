"""New weights from another process, by broadcast: gloo, two processes."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from engine_cases import SMALL
from safetensors.torch import load_file

from dsv4 import LLM, EngineConfig, SamplingParams
from dsv4.engine.weight_group import WeightGroup
from dsv4.loader.header import CheckpointError
from dsv4.loader.write.synth import write_checkpoint
from dsv4.request import RequestError

CONFIG = replace(SMALL, n_routed_experts=8)
LIMITS = EngineConfig(max_context_tokens=512, max_concurrent_requests=2, max_chunk_tokens=64)
PARAMS = SamplingParams(max_tokens=8, seed=1, ignore_eos=True, logprobs=1)

# a trainer as slime or AReaL make one: a group of torch's, beside its default one
TRAINER = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper, _world, rendezvous

port, file, name = sys.argv[1:]
minute = timedelta(seconds=60)
store, rank, size = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=minute))
group, _ = _new_process_group_helper(2, 0, [], "gloo", PrefixStore(name, store), group_name=name, timeout=minute)
_world.pg_group_ranks[group] = {0: 0, 1: 1}
for tensor in load_file(file).values():
    part = tensor.view(-1).view(dtype=torch.uint8) if tensor.element_size() == 1 else tensor
    group.broadcast([part], dist.BroadcastOptions()).wait()
print("sent", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("group")
    return [write_checkpoint(root / name, CONFIG, experts="mxfp4", seed=seed) for seed, name in enumerate("AB")]


def answers(llm):
    return [(one.token_ids, one.logprobs) for one in llm.generate([[7, 8, 9], list(range(3, 80))], PARAMS)]


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def tensors_of(folder):
    found = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        found |= load_file(file)
    return found


def headers(tensors):
    return {
        "names": list(tensors), "dtypes": [str(one.dtype) for one in tensors.values()],
        "shapes": [list(one.shape) for one in tensors.values()],
    }  # fmt: skip


def test_from_another_process(folders):
    """A trainer with torch's own group sends a model in one file; the engine has the bits of a fresh one."""
    (file,) = Path(folders[1]).glob("*.safetensors")
    llm, port = LLM(folders[0], engine=LIMITS), free_port()
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(port), str(file), "weights"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        llm.control.obey("init_group", {
            "master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "backend": "gloo",
            "group_name": "weights",
        })  # fmt: skip
        version = llm.control.obey("receive_weights", {**headers(load_file(file)), "version": "7"})
        assert trainer.stdout.readline() == "sent\n"
    finally:
        trainer.communicate()
    assert version == "7"
    assert answers(llm) == answers(LLM(folders[1], engine=LIMITS))


@pytest.fixture
def joined(folders):
    """(engine, what a trainer's thread does with its end of the group)"""
    llm, port, made = LLM(folders[0], engine=LIMITS), free_port(), []

    def make():
        made.append(WeightGroup("127.0.0.1", port, rank=0, world_size=2))

    trainer = threading.Thread(target=make, daemon=True)
    trainer.start()
    llm.control.obey("init_group", {
        "master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "backend": "gloo",
    })  # fmt: skip
    trainer.join(30)

    def send(tensors, **changes):
        sender = threading.Thread(target=made[0].send, args=(tensors.items(),), daemon=True)
        sender.start()
        try:
            return llm.control.obey("receive_weights", {**headers(tensors), **changes})
        finally:
            sender.join(30)

    return llm, send


def test_in_pieces(folders, joined):
    """Until the model is whole the old weights stay, and a paused engine does not go on with a part of it."""
    llm, send = joined
    before, new = answers(llm), list(tensors_of(folders[1]).items())
    half = len(new) // 2
    llm.pause("keep")
    assert send(dict(new[:half])) is None
    with pytest.raises(RequestError, match=f"{half} tensors are here, .* missing, such as"):
        llm.resume()
    assert send(dict(new[half:]), version="whole") == "whole"
    llm.resume()
    after = answers(llm)
    assert after == answers(LLM(folders[1], engine=LIMITS)) != before


def test_what_does_not_fit_is_dropped(folders, joined):
    llm, send = joined
    before, new = answers(llm), tensors_of(folders[1])
    norm = "layers.1.attn_norm.weight"
    for wrong, message in (
        ({norm: new[norm][:-1].clone()}, norm),
        ({"layers.99.attn_norm.weight": new[norm]}, "layers.99"),
    ):
        with pytest.raises(CheckpointError, match=message):
            send(wrong)
        llm.resume()  # nothing is left of it
    with pytest.raises(RequestError, match="expected as many"):
        llm.control.obey("receive_weights", {"names": ["a"], "dtypes": [], "shapes": []})
    with pytest.raises(CheckpointError, match="a is complex64, expected one of"):
        llm.control.obey("receive_weights", {"names": ["a"], "dtypes": ["complex64"], "shapes": [[1]]})
    assert answers(llm) == before


def test_a_group_that_is_not_there(folders):
    llm = LLM(folders[0], engine=LIMITS)
    with pytest.raises(RequestError, match="init_group first"):
        llm.control.obey("receive_weights", {"names": [], "dtypes": [], "shapes": []})
    joining = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2}
    with pytest.raises(RequestError, match="needs an engine on a GPU"):
        llm.control.obey("init_group", joining)
    with pytest.raises(RequestError, match="rank must be from 0 to 1"):
        llm.control.obey("init_group", {**joining, "backend": "gloo", "rank_offset": 2})
