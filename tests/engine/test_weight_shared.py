"""New weights that stay in another process's GPU memory while they are read (CUDA IPC)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from shared_cases import DEVICE, FakeDriver
from weight_cases import CONFIG, LIMITS, answers, tensors

from dsv4 import LLM
from dsv4.engine.request import WeightsIncomplete
from dsv4.engine.weights.shared import SharedTensors, SharingFailed, share
from dsv4.loader.header import CheckpointError
from dsv4.loader.write.synth import write_checkpoint

KINDS = (
    torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float16, torch.bfloat16,
    torch.float32, torch.int32, torch.int64, torch.float64,
)  # fmt: skip


@pytest.fixture
def driver(monkeypatch):
    made = FakeDriver(monkeypatch)
    yield made
    assert made.num_open == 0, "memory of another process is left open"


def sent(given):
    """As it arrives at the engine."""
    return json.loads(json.dumps(share(given)))


def test_tensors_arrive_as_they_are(driver):
    given = {str(dtype): torch.arange(12).view(3, 4).to(dtype) for dtype in KINDS}
    whole = torch.arange(60.0).view(5, 12)
    given |= {
        "columns": whole[1:4, 3:5].T, "every other": whole[0, ::2], "scalar": torch.tensor(7.0),
        "nothing": torch.empty(0, 4), "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
    }  # fmt: skip
    described = sent(given.items())
    assert described[0].keys() == {
        "name", "dtype", "shape", "stride", "offset", "handle", "storage_bytes", "device",
    }  # fmt: skip
    found = SharedTensors(described)
    assert driver.num_open == len({one["handle"] for one in described}) < len(given), "an allocation is opened once"
    for name, one in given.items():
        assert found.values[name].dtype == one.dtype
        assert found.values[name].shape == one.shape
        assert found.values[name].stride() == one.stride()
        assert torch.equal(found.values[name].float(), one.float())
    found.close()


def test_only_memory_of_a_gpu_is_shared():
    with pytest.raises(SharingFailed, match="a: it is on cpu, and only memory of a GPU is shared"):
        share({"a": torch.zeros(1)})


def test_a_whole_model(driver, folders, expected):
    """The bits of a fresh engine, and the name that the same tensors of this process give; then the trainer's memory
    may hold anything."""
    llm, (given, memory) = LLM(folders[0], engine=LIMITS), driver.trainers(tensors(folders[1]))
    assert llm.update_weights(SharedTensors(sent(given)), version="B") == "B"
    digest = llm.weights_digest
    llm.update_weights(given)
    assert llm.weights_digest == digest
    memory.fill_(0xFF)
    assert answers(llm) == expected[1]


def test_in_pieces(driver, folders, expected):
    """What is not whole yet is copied: the trainer uses its memory again after every answer."""
    llm, new = LLM(folders[0], engine=LIMITS), list(tensors(folders[1]).items())
    for order in (new, [*new[1::2], *new[::2]]):
        llm.pause()
        for part in (dict(order[:20]), dict(order[20:50]), dict(order[50:])):
            given, memory = driver.trainers(part)
            version = llm.control.obey("take_weights", {"tensors": sent(given), "version": "7"})
            memory.fill_(0xFF)
            if version is None:
                with pytest.raises(WeightsIncomplete, match="come in part"):
                    llm.resume()
        assert version == "7"
        llm.resume()
        assert answers(llm) == expected[1]


def test_values_are_checked_before_any_is_written(driver, folders, expected):
    llm, good = LLM(folders[0], engine=LIMITS), tensors(folders[1])
    table = next(name for name in good if name.endswith("tid2eid"))
    layer = {name: one for name, one in good.items() if name.startswith(table.partition(".ffn.")[0])}
    wrong = layer | {table: good[table] + 99}
    for order in (wrong | {**good, **wrong}, {name: good[name] for name in good.keys() - wrong.keys()} | wrong):
        given = sent(driver.trainers(order)[0])
        with pytest.raises(CheckpointError, match="names expert"):
            llm.update_weights(SharedTensors(given))
        with pytest.raises(CheckpointError, match="names expert"):
            llm.control.obey("take_weights", {"tensors": given})
    assert llm.control.obey("finish_update", {}) == "0", "the old weights are whole"
    assert answers(llm) == expected[0]


GOOD = {
    "name": "a", "dtype": "bfloat16", "shape": [2, 3], "stride": [3, 1], "offset": 4, "storage_bytes": 16,
    "device": DEVICE,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"handle": "AAAA"}, "handle must be 64 bytes in base64"),
        ({"handle": "?" * 88}, "handle must be 64 bytes in base64"),
        ({"handle": 7}, "handle must be a string, found 7"),
        ({"handle": "A" * 86 + "=="}, "its memory cannot be opened: cuIpcOpenMemHandle_v2"),
        ({"device": "GPU-1"}, "its memory cannot be opened"),
        ({"dtype": "complex64"}, "a is complex64, expected one of"),
        ({"dtype": "__import__"}, "a is __import__, expected one of"),
        ({"shape": [2, -3]}, r"cannot have the shape \[2, -3\]"),
        ({"shape": [2, True]}, "cannot have the shape"),
        ({"shape": "ab"}, "cannot have the shape"),
        ({"shape": [6]}, r"cannot have the shape \[6\] and the stride \[3, 1\]"),
        ({"shape": [1] * 9, "stride": [1] * 9}, "cannot have the shape"),
        ({"stride": [3, 2]}, "a ends at byte 20 of an allocation of 16"),
        ({"shape": [2**40, 2**40]}, "a ends at byte"),
        ({"offset": 6}, "a ends at byte 18 of an allocation of 16"),
        ({"offset": 3}, "offset 3 in 16 bytes is no place"),
        ({"offset": -2}, "offset -2 in 16 bytes is no place"),
        ({"offset": 6, "storage_bytes": 1 << 40}, "a ends at byte 18, its allocation at 16"),
        ({"more": 1}, "a shared tensor has the fields device, dtype, handle, name"),
        ({"name": None}, "name must be a string"),
    ],
    ids=str,
)
def test_hostile_descriptions(driver, change, message):
    memory = torch.zeros(8, dtype=torch.bfloat16)
    (own,) = share({"a": memory})
    assert SharedTensors([{**own, **GOOD}]).close() is None
    with pytest.raises(CheckpointError, match=message):
        SharedTensors([own, {**own, **GOOD, **change}])
    for whole in ([own, own], ["text"], [None]):
        with pytest.raises(CheckpointError, match="given twice|a shared tensor has the fields"):
            SharedTensors(whole)


# ---- two processes and a GPU ----

TRAINER = """
import json, sys
import torch
from pathlib import Path
from safetensors.torch import load_file
from dsv4.engine.weights.shared import share

(file,) = Path(sys.argv[1]).glob("*.safetensors")
tensors = list(load_file(file, device="cuda").items())
for line in sys.stdin:
    first, last = json.loads(line)
    part = tensors[first:last]
    print(json.dumps(share(part)), flush=True)
    sys.stdin.readline()
    for _, one in part:  # the engine has answered
        one.view(torch.uint8).fill_(0xFF) if one.dim() else one.zero_()
    torch.cuda.synchronize()
    print("overwritten", flush=True)
"""


class Trainer:
    def __init__(self, folder):
        self._process = subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def share(self, first, last):
        self._process.stdin.write(f"[{first}, {last}]\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def overwrite(self):
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "overwritten\n"

    def kill(self):
        self._process.kill()
        self._process.wait()


@pytest.mark.gpu
@pytest.mark.parametrize("experts", ["mxfp4", "nvfp4"])
def test_from_another_process_on_a_gpu(tmp_path, experts):
    """A -> B has the bits of a fresh B, whole and in pieces, whatever becomes of the trainer's memory afterwards; a
    trainer that has died is an error, and the weights stay."""
    folders = [
        write_checkpoint(tmp_path / name, CONFIG, experts=experts, seed=seed, device="cuda")
        for seed, name in enumerate("AB")
    ]
    fresh = [answers(LLM(folder, engine=LIMITS, device="cuda")) for folder in folders]
    assert fresh[0] != fresh[1]
    count = len(tensors(Path(folders[1])))

    llm, trainer = LLM(folders[0], engine=LIMITS, device="cuda"), Trainer(folders[1])
    llm.update_weights(SharedTensors(trainer.share(0, count)))
    trainer.overwrite()
    assert answers(llm) == fresh[1]
    trainer.kill()
    assert answers(llm) == fresh[1]
    llm.update_weights(folders[0])

    trainer = Trainer(folders[1])
    for first, last in ((0, 20), (20, 50), (50, count)):
        llm.control.obey("take_weights", {"tensors": trainer.share(first, last), "version": "7"})
        trainer.overwrite()
    assert llm.weight_version == "7"
    assert answers(llm) == fresh[1]
    trainer.kill()

    trainer = Trainer(folders[0])
    given = trainer.share(0, count)
    trainer.kill()
    with pytest.raises(CheckpointError, match="its memory cannot be opened"):
        llm.update_weights(SharedTensors(given))
    assert answers(llm) == fresh[1]
