"""Which files hold a checkpoint's tensors, and which tensors they hold. Pure bytes and JSON, as in header.py.

An index (`model.safetensors.index.json`) may also take tensors from a folder beside its own, `../NAME/FILE`: a draft
head is then a folder with its own tensors, and the model it drafts for is stored once. Tensors of such a file that the
index does not name belong to something else; a file of the folder itself must be named completely.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from dsv4.loader.header import CheckpointError, TensorInfo, parse_json_object, read_header

INDEX_FILE = "model.safetensors.index.json"
_SHARD_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
_MAX_FILE_NAME = 200


def find_tensors(root: Path) -> dict[str, TensorInfo]:
    """The tensors of a folder (with an index, or just safetensors files) or of one file, in file order. Checks every
    header and the index."""
    if root.is_file():
        return _collect([root])
    weight_map = _read_index(root)
    return _collect(weight_files(root)) if weight_map is None else _collect_indexed(root, weight_map)


def weight_files(root: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder, those of its neighbours included; reads no header."""
    if not root.is_dir():
        raise CheckpointError(f"{root} does not exist; expected a checkpoint folder or a .safetensors file")
    weight_map = _read_index(root)
    if weight_map is not None:
        return [root / shard for shard in sorted(set(weight_map.values()))]
    files = sorted(root.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{root} holds neither {INDEX_FILE} nor any .safetensors file")
    _check_numbering(root, files)
    return files


def _read_index(root: Path) -> dict[str, str] | None:
    """Tensor names to files, each of which is there; None without an index."""
    index = root / INDEX_FILE
    if not index.is_file():
        return None
    try:
        text = index.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{index} cannot be read: {error}") from None
    weight_map = parse_json_object(index, text, "the index").get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map must map tensor names to file names")
    shards = sorted(set(weight_map.values()))
    outside = [shard for shard in shards if not _is_near(shard)]
    if outside:
        raise CheckpointError(
            f"{index}: {outside[0][:80]!a} is not the name of a file in this folder, nor ../NAME/FILE of one beside it"
        )
    missing = [shard for shard in shards if not (root / shard).is_file()]
    if missing:
        raise CheckpointError(f"{root}: {_first(missing)} named by the index {_are(missing)} missing")
    return weight_map


def _is_near(shard: str) -> bool:
    *folder, file = shard.split("/")
    is_beside = len(folder) == 2 and folder[0] == ".." and _is_name(folder[1])
    return (not folder or is_beside) and _is_name(file)


def _is_name(text: str) -> bool:
    return text.isprintable() and 0 < len(text) <= _MAX_FILE_NAME and text != ".." and Path(text).name == text


def _collect(files: Iterable[Path]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for info in read_header(file):
            _add(tensors, info)
    return tensors


def _add(tensors: dict[str, TensorInfo], info: TensorInfo) -> None:
    if info.name in tensors:
        raise CheckpointError(f"tensor {info.name!r} is in both {tensors[info.name].file} and {info.file}")
    tensors[info.name] = info


def _collect_indexed(root: Path, weight_map: dict[str, str]) -> dict[str, TensorInfo]:
    index = root / INDEX_FILE
    tensors: dict[str, TensorInfo] = {}
    for shard in sorted(set(weight_map.values())):
        is_beside = "/" in shard
        for info in read_header(root / shard):
            if not is_beside or weight_map.get(info.name) == shard:
                _add(tensors, info)
    absent = [name for name, shard in weight_map.items() if name not in tensors or tensors[name].file != root / shard]
    if absent:
        raise CheckpointError(f"{index} places {_first(absent)} in a shard that does not hold {_it(absent)}")
    unlisted = [name for name in tensors if name not in weight_map]
    if unlisted:
        raise CheckpointError(f"{index} does not name {_first(unlisted)}, which its shards hold")
    return tensors


def _check_numbering(root: Path, files: list[Path]) -> None:
    """Without an index, the names model-00001-of-00003 still say how many files there must be."""
    groups: dict[tuple[str, int], set[int]] = {}
    for file in files:
        match = _SHARD_NAME.fullmatch(file.name)
        if match:
            groups.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (stem, total), numbers in groups.items():
        missing = [f"{stem}-{n:05d}-of-{total:05d}.safetensors" for n in range(1, total + 1) if n not in numbers]
        if missing:
            raise CheckpointError(f"{root}: {_first(missing)} {_are(missing)} missing")


def _first(names: list[str]) -> str:
    shown = ", ".join(ascii(name)[1:-1] for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _it(names: list[str]) -> str:
    return "it" if len(names) == 1 else "them"
