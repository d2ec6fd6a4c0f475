"""Copies of the shipped miniatures, cut to a few layers, and ways to damage them."""

import json
import shutil
from math import prod
from pathlib import Path

import numpy as np

from dsv4.loader.checkpoint import INDEX_FILE, Checkpoint
from dsv4.loader.header import ITEM_BYTES
from dsv4.loader.shipped import shipped_checkpoint
from dsv4.tools.audit.run import AuditOptions, audit_checkpoint

NUM_LAYERS = 4
FILE = "model.safetensors"
KEPT_VOCAB = 4096  # the table of hash layers goes by token id


def trimmed(folder: Path, name: str, num_layers: int = NUM_LAYERS) -> Path:
    """The first layers of a shipped model, without its draft block."""
    source = shipped_checkpoint(name)
    folder.mkdir()
    raw = json.loads((source / "config.json").read_text())
    raw |= {"num_hidden_layers": num_layers, "compress_ratios": raw["compress_ratios"][:num_layers],
            "num_nextn_predict_layers": 0, "num_hash_layers": min(2, num_layers)}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw))
    shutil.copy(source / "tokenizer.json", folder)
    rewrite(
        source,
        folder,
        lambda name: int(name.split(".")[1]) < num_layers if name.startswith("layers.") else "mtp" not in name,
    )
    return folder


def raw_tensors(folder: Path) -> dict:
    """Name -> [dtype, shape, bytes]."""
    found = {}
    with Checkpoint.open(folder) as checkpoint:
        for name, info in checkpoint.tensors.items():
            with info.file.open("rb") as stream:
                stream.seek(info.start)
                found[name] = [info.dtype, list(info.shape), stream.read(info.nbytes)]
    return found


def write_tensors(folder: Path, tensors: dict, file: str = FILE) -> None:
    header, position = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        assert prod(shape) * ITEM_BYTES[dtype] == len(data), name
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(data)]}
        position += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / file).write_bytes(len(text).to_bytes(8, "little") + text + b"".join(t[2] for t in tensors.values()))


def rewrite(source: Path, folder: Path, keep) -> None:
    tensors = {name: part for name, part in raw_tensors(source).items() if keep(name)}
    write_tensors(folder, dict(sorted(tensors.items(), key=lambda item: -ITEM_BYTES[item[1][0]])))


def change(folder: Path, edit) -> None:
    """`edit` gets all tensors (name -> [dtype, shape, bytes]) and changes them in place."""
    tensors = raw_tensors(folder)
    edit(tensors)
    write_tensors(folder, tensors)


def poke(folder: Path, name: str, edit, dtype="u1") -> None:
    """`edit` changes one tensor's data in place, as a numpy array of `dtype` in the stored shape."""
    with Checkpoint.open(folder) as checkpoint:
        info = checkpoint.tensors[name]
    array = np.memmap(
        info.file, mode="r+", dtype=dtype, offset=info.start, shape=(info.nbytes // np.dtype(dtype).itemsize,)
    )
    rows = info.shape[0] if len(info.shape) > 1 else 1
    edit(array.reshape(rows, -1) if len(info.shape) > 1 else array)
    array.flush()


def write_index(folder: Path, change_map=lambda names: None, total_change: int = 0) -> None:
    (folder / INDEX_FILE).unlink(missing_ok=True)
    with Checkpoint.open(folder) as checkpoint:
        names = dict.fromkeys(checkpoint.tensors, FILE)
        total = checkpoint.nbytes + total_change
    change_map(names)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": names}))


def audit(folder: Path, **options):
    return audit_checkpoint(folder, AuditOptions(**options))


def faults(report) -> list[tuple[str, str]]:
    return [(finding.kind, finding.tensor) for finding in report.faults]
