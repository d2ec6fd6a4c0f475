"""New weights from another process, by broadcast: gloo, two processes."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from safetensors.torch import load_file
from weight_cases import LIMITS, answers, tensors

from dsv4 import LLM
from dsv4.engine.request import WeightsIncomplete
from dsv4.engine.weights.group import WeightGroup
from dsv4.loader.header import CheckpointError
from dsv4.request import RequestError

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


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def headers(sent):
    return {
        "names": list(sent), "dtypes": [str(one.dtype) for one in sent.values()],
        "shapes": [list(one.shape) for one in sent.values()],
    }  # fmt: skip


def test_from_another_process(folders, expected):
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
        }).result()  # fmt: skip
        version = llm.control.obey("receive_weights", {**headers(load_file(file)), "version": "7"})
        assert trainer.stdout.readline() == "sent\n"
    finally:
        trainer.communicate()
    assert version == "7"
    assert answers(llm) == expected[1]


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
    }).result()  # fmt: skip
    trainer.join(30)

    def send(sent, **changes):
        sender = threading.Thread(target=made[0].send, args=(sent.items(),), daemon=True)
        sender.start()
        try:
            return llm.control.obey("receive_weights", {**headers(sent), **changes})
        finally:
            sender.join(30)
            assert not sender.is_alive()

    return llm, send


def test_in_pieces(folders, expected, joined):
    """In whatever order. A layer is written once it is whole; an engine with a part of a model does not go on."""
    llm, send = joined
    new = list(tensors(folders[1]).items())
    shuffled = [*new[1::2], *new[::2]]
    for order, last in ((new, new[-1]), (shuffled, shuffled[-1])):
        half = len(order) // 2
        llm.pause("keep")
        assert send(dict(order[:half])) is None
        for verb in ("resume", "finish_update"):
            with pytest.raises(WeightsIncomplete, match="come in part: . of its 5 parts are not whole .* missing: "):
                llm.control.obey(verb, {})
        with pytest.raises(CheckpointError, match="is given twice"):
            llm.control.obey("receive_weights", headers(dict(order[:1])))
        assert send(dict(order[:half])) is None, "what an error dropped can be sent again"
        assert send(dict(order[half:]), version=last[0]) == last[0]
        assert llm.control.obey("finish_update", {}) == last[0]
        llm.resume()
        assert answers(llm) == expected[1]
    digest = llm.weights_digest
    llm.update_weights(dict(shuffled))
    assert llm.weights_digest == digest, "the same weights have the same name"


def test_what_is_wrong_with_one_tensor_leaves_the_group_in_step(folders, expected, joined):
    """The trainer sends all that it announced; the next update follows in the same group."""
    llm, send = joined
    new = tensors(folders[1])
    table = next(name for name in new if name.endswith("tid2eid"))
    with pytest.raises(CheckpointError, match="names expert"):
        send({table: new[table] + 99, **{name: one for name, one in new.items() if name != table}})
    send(new)
    assert answers(llm) == expected[1]


def test_what_does_not_fit_is_refused_before_it_is_received(folders, expected, joined):
    """Nobody sends here: an engine that waited for tensors, or made room for them, would not answer."""
    llm, _ = joined
    norm, bias = "layers.1.attn_norm.weight", "layers.2.ffn.gate.weight"
    for names, dtypes, shapes, message in (
        ([norm], ["bfloat16"], [[127]], norm),
        (["layers.99.attn_norm.weight"], ["bfloat16"], [[128]], "layers.99"),
        ([bias], ["float32"], [[8, 128]], "is F32, the engine runs BF16"),
        ([norm], ["bfloat16"], [[2**40, 2**40]], norm),
        ([norm, norm], ["bfloat16"] * 2, [[128]] * 2, "given twice"),
        (["a"], ["complex64"], [[1]], "a is complex64, expected one of"),
    ):
        with pytest.raises(CheckpointError, match=message):
            llm.control.obey("receive_weights", {"names": names, "dtypes": dtypes, "shapes": shapes})
        llm.control.obey("finish_update", {})  # nothing is left of it
    with pytest.raises(RequestError, match="expected as many"):
        llm.control.obey("receive_weights", {"names": ["a"], "dtypes": [], "shapes": []})
    assert answers(llm) == expected[0]


def test_a_group_that_is_not_there(folders):
    llm = LLM(folders[0], engine=LIMITS)
    with pytest.raises(RequestError, match="init_group first"):
        llm.control.obey("receive_weights", {"names": [], "dtypes": [], "shapes": []})
    joining = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2}
    with pytest.raises(RequestError, match="needs an engine on a GPU"):
        llm.control.obey("init_group", joining).result()
    with pytest.raises(RequestError, match="no group at 127.0.0.1:9 in 1 s"):
        llm.control.obey("init_group", {**joining, "backend": "gloo", "timeout": 1}).result()
    with pytest.raises(RequestError, match="rank must be from 0 to 1"):
        llm.control.obey("init_group", {**joining, "backend": "gloo", "rank_offset": 2}).result()
