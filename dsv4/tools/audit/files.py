"""Checks that need no weight: files, index, headers, config, tokenizer. Whatever can still be read is handed on, in
units that are read together: each layer, each draft block, and the rest.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dsv4.config import ConfigError, ModelConfig
from dsv4.loader.checkpoint import INDEX_FILE, Checkpoint
from dsv4.loader.header import CheckpointError, TensorInfo, read_header
from dsv4.loader.resolve import LoadPlan, Source, resolve_tensors
from dsv4.text.protocol import PROTOCOL
from dsv4.tools.audit.report import Finding, fault, note

_NAMED = re.compile(r"tensor '([^']+)'")
REST = "embedding and head"


@dataclass
class Opened:
    """A checkpoint as far as it can be read; `config` and `plan` are None where nothing can be matched. `token_ids` are
    the tokenizer's, without names it reserves."""

    checkpoint: Checkpoint
    config: ModelConfig | None
    plan: LoadPlan | None
    findings: list[Finding]
    token_ids: frozenset[int] = frozenset()


def open_for_audit(folder: Path) -> Opened:
    """`CheckpointError` if there is no checkpoint at all; every other flaw is a finding."""
    findings: list[Finding] = []
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; expected a checkpoint folder")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json; is it a checkpoint folder?")
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder} holds no .safetensors file")
    checkpoint = _open_files(folder, findings)
    if not checkpoint.tensors:  # nothing of it can be read
        return Opened(checkpoint, None, None, findings)
    _check_total(folder, checkpoint, findings)
    try:
        config = ModelConfig.from_pretrained(folder)
    except ConfigError as error:
        findings.append(fault("config", "config.json", str(error)))
        return Opened(checkpoint, None, None, findings)
    token_ids = _check_tokenizer(folder, config, findings)
    try:
        resolution = resolve_tensors(checkpoint, config)
    except CheckpointError as error:
        findings.append(fault("headers", "config.json", str(error)))
        return Opened(checkpoint, config, None, findings)
    for kind, texts in resolution.problems.items():
        findings += (fault(kind, text.split(" ", 1)[0], text) for text in texts)
    findings += (note("left out", "mtp", text) for text in resolution.plan.notes)
    if config.num_draft_layers and not resolution.plan.num_mtp and not resolution.plan.notes:
        findings.append(
            note("no draft block", "mtp", f"the config announces {config.num_draft_layers}, the files hold none")
        )
    return Opened(checkpoint, config, resolution.plan, findings, token_ids)


def _open_files(folder: Path, findings: list[Finding]) -> Checkpoint:
    try:
        return Checkpoint.open(folder)
    except CheckpointError as error:
        named = _NAMED.search(str(error))
        findings.append(fault("files", named[1] if named else folder.name, str(error)))
    tensors: dict[str, TensorInfo] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            for info in read_header(file):
                tensors.setdefault(info.name, info)
        except CheckpointError as error:
            if str(error) not in {finding.text for finding in findings}:
                findings.append(fault("files", file.name, str(error)))
    return Checkpoint(folder, tensors)


def _check_total(folder: Path, checkpoint: Checkpoint, findings: list[Finding]) -> None:
    """The index's `total_size`: wrong where files were replaced and their index was not."""
    try:
        index = json.loads((folder / INDEX_FILE).read_bytes())
    except (OSError, ValueError):
        return  # none, or reported already
    metadata = index.get("metadata") if isinstance(index, dict) else None
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total, (int, float)) and total != checkpoint.nbytes:
        text = f"total_size is {total:.0f}, the tensors have {checkpoint.nbytes} bytes: an index of other files"
        findings.append(fault("stale index", INDEX_FILE, text))


def _check_tokenizer(folder: Path, config: ModelConfig, findings: list[Finding]) -> frozenset[int]:
    file = folder / "tokenizer.json"
    if not file.is_file():
        findings.append(note("no tokenizer", file.name, "prompts must be given as token ids"))
        return frozenset()
    try:
        raw = json.loads(file.read_bytes())
        vocab = raw["model"]["vocab"]
        added = {token["content"]: token["id"] for token in raw.get("added_tokens", [])}
        largest = max(map(int, [*vocab.values(), *added.values()]))
        spare = added.keys() - set(PROTOCOL.markers)  # reserved names, which nothing writes
        token_ids = frozenset(int(vocab.get(name, added.get(name))) for name in {**vocab, **added} if name not in spare)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        findings.append(fault("tokenizer", file.name, f"cannot be read: {type(error).__name__} {error}"[:200]))
        return frozenset()
    if largest >= config.vocab_size:
        text = f"has token {largest}, the model's vocabulary ends at {config.vocab_size - 1}"
        findings.append(fault("tokenizer", file.name, text))
    return token_ids


# ---- units ----


def unit_of(name: str) -> str:
    """`layers.3.attn.wkv.weight` -> `layers.3`."""
    first, second, *_ = [*name.split("."), ""]
    return f"{first}.{second}" if first in ("layers", "mtp") else REST


def group_sources(sources: Iterable[Source]) -> dict[str, list[Source]]:
    """Unit -> its weights in file order; units in the model's order."""
    units: dict[str, list[Source]] = {}
    for source in sources:
        units.setdefault(unit_of(source.tensor.name), []).append(source)
    return dict(sorted(units.items(), key=lambda item: _place(item[0])))


def _place(unit: str) -> tuple[int, int]:
    if unit == REST:
        return (0, 0)
    first, number = unit.split(".")
    return (1 if first == "layers" else 2, int(number))
