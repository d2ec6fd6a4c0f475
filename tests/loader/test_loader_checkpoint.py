"""Opening checkpoints: every flaw of the files is a `CheckpointError` before any data is read."""

import json
import shutil

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from loader_cases import SET_A, same_bits, write_raw
from safetensors.torch import save_file

from dsv4.loader.checkpoint import INDEX_FILE, Checkpoint, CheckpointError
from dsv4.loader.header import read_header


def small_tensors():
    return {
        "a": torch.arange(6, dtype=torch.float32).view(2, 3),
        "b": torch.arange(5, dtype=torch.bfloat16),
        "c": torch.arange(4, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "d": torch.arange(8, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 4),
        "e": torch.tensor(3.0),
        "f": torch.empty((0, 4)),
    }


@pytest.fixture(scope="module")
def small_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("small") / "model.safetensors"
    save_file(small_tensors(), file)
    return file


def test_shards_are_mapped_anew_and_what_was_read_stays(small_file, monkeypatch):
    monkeypatch.setattr("dsv4.loader.checkpoint._MAX_TOUCHED_BYTES", 0)
    with Checkpoint.open(small_file) as checkpoint:
        read = {name: checkpoint.read(name) for name in [*small_tensors()] * 2}
    for name, tensor in small_tensors().items():
        assert same_bits(read[name], tensor.view(torch.uint8) if name == "c" else tensor)


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_reads_every_dtype_by_its_bits(small_file):
    checkpoint = Checkpoint.open(small_file)
    expected = small_tensors()
    expected["c"] = expected["c"].view(torch.uint8)
    assert set(checkpoint.tensors) == set(expected)
    for name, tensor in expected.items():
        assert same_bits(checkpoint.read(name), tensor), name
    assert checkpoint.nbytes == sum(tensor.nbytes for tensor in expected.values())


def test_byte_ranges_are_those_of_the_file(small_file):
    raw = small_file.read_bytes()
    for info in read_header(small_file):
        expected = small_tensors()[info.name].flatten().view(torch.uint8).numpy().tobytes()
        assert raw[info.start : info.end] == expected
        assert info.nbytes == len(expected)


def test_folder_forms(small_file, tmp_path):
    names = set(small_tensors())
    single = tmp_path / "single"
    single.mkdir()
    shutil.copy(small_file, single / "model.safetensors")
    assert set(Checkpoint.open(single).tensors) == names
    parts = tmp_path / "parts"
    parts.mkdir()
    tensors = small_tensors()
    save_file({"a": tensors.pop("a")}, parts / "model-00001-of-00002.safetensors")
    save_file(tensors, parts / "model-00002-of-00002.safetensors")
    assert set(Checkpoint.open(str(parts)).tensors) == names
    assert set(Checkpoint.open(SET_A).tensors) == set(json.loads((SET_A / INDEX_FILE).read_text())["weight_map"])


def test_reading_in_file_order_and_after_closing():
    checkpoint = Checkpoint.open(SET_A)
    order = checkpoint.in_file_order(reversed(list(checkpoint.tensors)))
    places = [(checkpoint.tensors[name].file.name, checkpoint.tensors[name].start) for name in order]
    assert places == sorted(places)
    before = checkpoint.read(order[0]).clone()
    checkpoint.close()
    assert same_bits(checkpoint.read(order[0]), before)


@pytest.mark.parametrize("content", [None, "folder", "text"])
def test_no_checkpoint_there(tmp_path, content):
    path = tmp_path / "model"
    if content == "folder":
        path.mkdir()
    if content == "text":
        path.write_text("hello there")
    with pytest.raises(CheckpointError):
        Checkpoint.open(path)


def test_unknown_name(small_file):
    with pytest.raises(CheckpointError, match="holds no tensor 'z'"):
        Checkpoint.open(small_file).read("z")


@pytest.mark.parametrize("cut", [1, 7, 40])
def test_truncated_shard(small_file, tmp_path, cut):
    file = tmp_path / "model.safetensors"
    file.write_bytes(small_file.read_bytes()[:-cut])
    with pytest.raises(CheckpointError, match="is truncated"):
        Checkpoint.open(file)


def test_file_that_shrinks_after_opening(small_file, tmp_path):
    file = tmp_path / "model.safetensors"
    shutil.copy(small_file, file)
    checkpoint = Checkpoint.open(file)
    file.write_bytes(small_file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="reading tensor 'a' failed"):
        checkpoint.read("a")


def test_file_that_is_replaced_after_opening(small_file, tmp_path):
    file = tmp_path / "model.safetensors"
    shutil.copy(small_file, file)
    checkpoint = Checkpoint.open(file)
    file.unlink()
    save_file(small_tensors() | {"a": torch.zeros(3, 2)}, file)
    with pytest.raises(CheckpointError, match="changed while it was open"):
        checkpoint.read("a")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "does not start with"),
        (b"[1, 2]", "does not start with"),
        (b' {"a": 1}', "does not start with"),
        (b'{"a": ', "not valid JSON"),
        (b'{"a": "\xff"}', "not valid JSON"),
        (b'{"a":' * 100_000, "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"a": 1, "a": 1}', "given twice"),
        ({"a": 1}, "must have dtype, shape and data_offsets"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "must have dtype, shape and data_offsets"),
        ({"a": entry() | {"more": 1}}, "must have dtype, shape and data_offsets"),
        ({"a": entry(dtype="F4")}, "unknown dtype 'F4'"),
        ({"a": entry(dtype="X" * 1000)}, "unknown dtype"),
        ({"a": entry(dtype="F64")}, "16 bytes; its data_offsets"),
        ({"a": entry() | {"shape": 2}}, "impossible shape"),
        ({"a": entry(shape=(-2,))}, "impossible shape"),
        ({"a": entry(shape=(True, 2))}, "impossible shape"),
        ({"a": entry(shape=(2.0,))}, "impossible shape"),
        ({"a": entry(shape=(2**62, 2**62), offsets=(0, 8))}, "impossible shape"),
        ({"a": entry(shape=(1,) * 9, offsets=(0, 4))}, "impossible shape"),
        ({"a": entry(offsets=(-8, 0))}, "impossible data_offsets"),
        ({"a": entry(offsets=(0, 8, 16))}, "impossible data_offsets"),
        ({"a": entry(offsets=(8, 0))}, "data_offsets"),
        ({"a": entry(offsets=(0, 12))}, "data_offsets"),
        ({"a": entry(), "b": entry(offsets=(4, 12))}, "'b' overlaps"),
        ({"a": entry(shape=(1,), offsets=(4, 8))}, "before tensor 'a' belong to no tensor"),
        ({"a": entry(shape=(1,), offsets=(0, 4))}, "after the last tensor belong to no tensor"),
        ({"a": entry(shape=(10**9,), offsets=(0, 4 * 10**9))}, "is truncated"),
        ({"__metadata__": {"format": 1}, "a": entry()}, "__metadata__"),
        ({"__metadata__": [], "a": entry()}, "__metadata__"),
        ({"a\x00": entry()}, "not printable"),
        ({"\ud800": entry()}, "not printable"),
    ],
)
def test_corrupt_header(tmp_path, header, message):
    file = write_raw(tmp_path / "model.safetensors", header, b"\0" * 12 if "overlap" in message else b"\0" * 8)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(file)


@pytest.mark.parametrize("header_bytes", [0, 1, 3, 1000, 2**40, 2**64 - 1])
def test_wrong_header_length(tmp_path, header_bytes):
    file = write_raw(tmp_path / "model.safetensors", {"a": entry()}, b"\0" * 8, header_bytes)
    with pytest.raises(CheckpointError):
        Checkpoint.open(file)


@pytest.mark.parametrize("size", [0, 1, 7])
def test_file_too_short_for_a_length(tmp_path, size):
    (tmp_path / "model.safetensors").write_bytes(b"\0" * size)
    with pytest.raises(CheckpointError, match="too few"):
        Checkpoint.open(tmp_path)


@pytest.fixture
def indexed(tmp_path):
    """A folder of two shards and the parsed index, with a function that writes the index back."""
    tensors = small_tensors()
    save_file({"a": tensors.pop("a")}, tmp_path / "one.safetensors")
    save_file(tensors, tmp_path / "two.safetensors")
    weight_map = {"a": "one.safetensors"} | dict.fromkeys(tensors, "two.safetensors")

    def write(changed):
        (tmp_path / INDEX_FILE).write_text(json.dumps(changed))
        return tmp_path

    return write, weight_map


def test_index(indexed):
    write, weight_map = indexed
    checkpoint = Checkpoint.open(write({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    assert {name: info.file.name for name, info in checkpoint.tensors.items()} == weight_map


def test_index_that_disagrees_with_its_shards(indexed):
    write, weight_map = indexed
    cases = [
        (weight_map | {"z": "one.safetensors"}, "places z in a shard that does not hold it"),
        (weight_map | {"a": "two.safetensors", "b": "one.safetensors"}, "places a, b in a shard"),
        ({name: shard for name, shard in weight_map.items() if name != "b"}, "does not name b"),
        (weight_map | {"a": "three.safetensors"}, "three.safetensors named by the index is missing"),
        (weight_map | {"a": "../one.safetensors"}, "not the name of a file in this folder"),
        (weight_map | {"a": "\ud800"}, "not the name of a file in this folder"),
        (weight_map | {"a": "x" * 5000}, "not the name of a file in this folder"),
        (weight_map | {"a": 1}, "weight_map must map"),
        ([], "weight_map must map"),
    ]
    for changed, message in cases:
        with pytest.raises(CheckpointError, match=message):
            Checkpoint.open(write({"weight_map": changed}))
    with pytest.raises(CheckpointError, match="must be a JSON object"):
        Checkpoint.open(write([]))


def test_index_that_takes_tensors_from_a_folder_beside_its_own(tmp_path):
    """What it does not name there is somebody else's; two files may then hold a tensor of one name."""
    for name in ("model", "head"):
        (tmp_path / name).mkdir()
    save_file({"a": torch.zeros(2), "mtp.0.b": torch.zeros(3)}, tmp_path / "model" / "all.safetensors")
    save_file({"mtp.0.b": torch.ones(3), "mtp.0.c": torch.ones(1)}, tmp_path / "head" / "own.safetensors")
    places = {"a": "../model/all.safetensors", "mtp.0.b": "own.safetensors", "mtp.0.c": "own.safetensors"}
    index = tmp_path / "head" / INDEX_FILE
    index.write_text(json.dumps({"weight_map": places}))
    with Checkpoint.open(tmp_path / "head") as checkpoint:
        assert set(checkpoint.tensors) == set(places)
        assert checkpoint.read("mtp.0.b").tolist() == [1, 1, 1]
        assert checkpoint.read("a").tolist() == [0, 0]
    cases = [
        ({"mtp.0.b": "../model/all.safetensors"}, "'mtp.0.b' is in both"),
        ({"z": "../model/all.safetensors"}, "places z in a shard that does not hold it"),
        ({"z": "../model/other.safetensors"}, "other.safetensors named by the index is missing"),
        *(({"z": far}, "not the name of a file in this folder, nor ../NAME/FILE") for far in FAR_FILES),
    ]
    for changes, message in cases:
        index.write_text(json.dumps({"weight_map": places | changes}))
        with pytest.raises(CheckpointError, match=message):
            Checkpoint.open(tmp_path / "head")


FAR_FILES = (
    "../all.safetensors", "../../model/all.safetensors", "../../all.safetensors", "model/all.safetensors",
    "/model/all.safetensors", ".././all.safetensors", "..//all.safetensors", "../model/../head/own.safetensors",
    "../model/..", f"../{'m' * 201}/all.safetensors", "../mo\ndel/all.safetensors",
)  # fmt: skip


def test_missing_shard_of_an_indexed_checkpoint(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(SET_A, folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors named by the index is missing"):
        Checkpoint.open(folder)
    (folder / INDEX_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors is missing"):
        Checkpoint.open(folder)


def test_duplicate_tensor(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "one.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match="'a' is in both"):
        Checkpoint.open(tmp_path)


def read_all(file):
    checkpoint = Checkpoint.open(file)
    for name, info in checkpoint.tensors.items():
        assert tuple(checkpoint.read(name).shape) == info.shape
    checkpoint.close()


MUTATION = st.tuples(st.integers(0, 600), st.one_of(st.integers(0, 255), st.sampled_from(list(b'0123456789-"{}[],:'))))


@settings(max_examples=150, deadline=None)
@given(mutations=st.lists(MUTATION, min_size=1, max_size=4), cut=st.one_of(st.none(), st.integers(0, 600)))
@example(mutations=[(0, 0)], cut=None)
@example(mutations=[(7, 255)], cut=None)
def test_any_damage_is_a_checkpoint_error(small_file, tmp_path_factory, mutations, cut):
    raw = bytearray(small_file.read_bytes())
    for position, value in mutations:
        raw[position % len(raw)] = value
    file = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    file.unlink(missing_ok=True)
    file.write_bytes(raw if cut is None else raw[:cut])
    try:
        read_all(file)
    except CheckpointError as error:
        str(error).encode("utf-8")  # printable wherever it ends up


VALUE = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.lists(st.integers(-1, 2**64), max_size=3),
    st.sampled_from(["F32", "BF16", "F8_E8M0", ""]),
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from("abcdef"),
    key=st.sampled_from(["dtype", "shape", "data_offsets", "more"]),
    value=VALUE,
    rename=st.text(max_size=3),
)
def test_any_wrong_header_value_is_a_checkpoint_error(small_file, tmp_path_factory, name, key, value, rename):
    raw = small_file.read_bytes()
    header_bytes = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + header_bytes])
    header[name] = header[name] | {key: value}
    header[rename] = header.pop(name)
    file = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    file.unlink(missing_ok=True)
    write_raw(file, header, raw[8 + header_bytes :])
    try:
        read_all(file)
    except CheckpointError as error:
        str(error).encode("utf-8")
