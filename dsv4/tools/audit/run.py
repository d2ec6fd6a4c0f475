"""The audit itself: headers, then unit by unit, then what only all units together show.

Memory stays near the largest single matrix, whatever the checkpoint's size. With a progress file, finished units are
kept there, and an audit that was killed goes on behind them.
"""

import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.formats.tensors import Weight
from dsv4.loader.checkpoint import Checkpoint
from dsv4.loader.header import CheckpointError
from dsv4.loader.names import Role
from dsv4.loader.progress import Progress, byte_progress
from dsv4.loader.resolve import Source
from dsv4.loader.weights import read_weight
from dsv4.tools.audit import relations
from dsv4.tools.audit.against import compare, compare_digests
from dsv4.tools.audit.files import Opened, group_sources, open_for_audit
from dsv4.tools.audit.report import AuditReport, Finding, UnitRecord, digests_of, fault, note
from dsv4.tools.audit.tensors import look_at
from dsv4.tools.audit.text_run import TextAudit

_VERSION = 2  # of the progress file


@dataclass(frozen=True)
class AuditOptions:
    """against: a checkpoint folder, or the JSON of an earlier audit. token_ids: run a text through the model as well.
    resume: a file that keeps finished units. device: where the text runs; the weights are read on the CPU."""

    against: Path | None = None
    token_ids: Sequence[int] | None = None
    resume: Path | None = None
    device: str = "cpu"
    progress: Progress = False


def audit_checkpoint(folder: Path, options: AuditOptions | None = None) -> AuditReport:
    """Everything there is to say about the checkpoint; `CheckpointError` only if there is none to look at."""
    options = options or AuditOptions()
    started = time.perf_counter()
    opened = open_for_audit(folder)
    other, digests = _open_other(options.against)
    report = AuditReport(
        path=str(folder),
        against=None if options.against is None else str(options.against),
        naming="" if opened.plan is None else str(opened.plan.naming),
        total_bytes=opened.checkpoint.nbytes,
        units=[],
        findings=list(opened.findings),
    )
    if opened.plan is not None and opened.config is not None:
        report.units = _run_units(opened, other, options)
        report.findings += (finding for unit in report.units for finding in unit.findings)
        report.findings += relations.check_units(report.units)
        report.findings += _compare_all(report.units, other, digests)
        if options.token_ids is not None:
            _run_text(opened, opened.config, options, report)
    report.seconds = time.perf_counter() - started
    report.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    opened.checkpoint.close()
    return report


@dataclass(frozen=True)
class _Other:
    """The checkpoint that is held against: its weights by name."""

    checkpoint: Checkpoint
    config: ModelConfig
    sources: dict[str, Source]


def _open_other(against: Path | None) -> tuple[_Other | None, dict[str, str] | None]:
    if against is None:
        return None, None
    if against.is_file():
        try:
            raw = json.loads(against.read_bytes())
            return None, {one["name"]: one["digest"] for unit in raw["units"] for one in unit["tensors"]}
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{against} is not the JSON of an audit: {type(error).__name__} {error}") from None
    opened = open_for_audit(against)
    if opened.plan is None or opened.config is None:
        raise CheckpointError(f"{against} cannot be compared with: {opened.findings[-1].text}")
    return _Other(
        opened.checkpoint, opened.config, {source.tensor.name: source for source in opened.plan.sources}
    ), None


def _run_units(opened: Opened, other: _Other | None, options: AuditOptions) -> list[UnitRecord]:
    assert opened.plan is not None and opened.config is not None
    grouped = group_sources(opened.plan.sources)
    states = [opened.checkpoint.file_state(), "" if other is None else other.checkpoint.file_state()]
    finished = _Finished(options.resume, ":".join([str(_VERSION), *states]))
    with byte_progress(options.progress, opened.plan.nbytes, "auditing") as advance:
        for name, sources in grouped.items():
            if name in finished.units:
                advance(sum(source.nbytes for source in sources))
            else:
                finished.add(_audit_unit(name, sources, opened, other, advance))
    finished.close()
    return [finished.units[name] for name in grouped]


def _audit_unit(
    name: str, sources: Sequence[Source], opened: Opened, other: _Other | None, advance: Callable[[int], None]
) -> UnitRecord:
    config = opened.config
    assert config is not None
    unit = UnitRecord(name)
    means: dict[tuple[str, int], Tensor] = {}  # matrix and expert: mean row
    gate: Tensor | None = None
    counts: Counter[int] = Counter()
    for source in sources:
        try:
            weight = read_weight(opened.checkpoint, source, config, check=False)
        except CheckpointError as error:
            unit.findings.append(fault("unreadable", source.data, str(error)))
            continue
        look = look_at(source, weight, opened.token_ids)
        unit.tensors.append(look.record)
        unit.findings += look.findings
        if look.log_scales is not None:
            levels, numbers = look.log_scales.floor().to(torch.int64).unique(return_counts=True)
            counts.update(dict(zip(levels.tolist(), numbers.tolist(), strict=True)))
        _check_router(source, weight, config, unit, is_sound=look.record.is_sound)
        _check_input_scale(opened.checkpoint, source, unit)
        part = source.tensor.base.rpartition(".")[2]
        if source.tensor.name.endswith(".ffn.gate.weight") and look.record.is_sound:
            gate = weight.clone() if isinstance(weight, Tensor) else None  # a view would keep its shard mapped
        if source.tensor.expert_idx is not None and part in ("w1", "w3") and look.record.is_sound:
            means[part, source.tensor.expert_idx] = relations.mean_row(weight)
        if other is not None:
            _compare_one(source, weight, other, unit)
        advance(source.nbytes)
    unit.scale_counts = dict(sorted(counts.items()))
    unit.findings += relations.check_experts(unit.tensors)
    if gate is not None and len(means) == 2 * config.n_routed_experts:  # all of them sound
        w1, w3 = (torch.stack([means[part, idx] for idx in range(config.n_routed_experts)]) for part in ("w1", "w3"))
        prefix = f"{name}.ffn.experts"
        unit.findings += relations.check_gate_up(prefix, w1, w3) + relations.check_copies(prefix, w1)
        if config.dspark is None or not name.startswith("mtp."):  # most rows of a head begin as the same noise
            unit.findings += relations.check_expert_order(prefix, w1, gate)
    return unit


def _check_router(source: Source, weight: Weight, config: ModelConfig, unit: UnitRecord, is_sound: bool) -> None:
    if not isinstance(weight, Tensor) or not is_sound:
        return
    findings: list[Finding] = []
    if source.tensor.role is Role.TABLE:
        findings, unit.routing = relations.check_table(source.data, weight, config.n_routed_experts)
    elif source.tensor.name.endswith(".ffn.gate.bias"):
        findings, unit.routing = relations.check_bias(source.data, weight)
    elif source.tensor.name.endswith(".ffn.gate.weight"):
        findings = relations.check_gate_rows(source.data, weight)
    unit.findings += findings


def _check_input_scale(checkpoint: Checkpoint, source: Source, unit: UnitRecord) -> None:
    """NVFP4's activation scale: not used here, but other engines multiply by it."""
    name = source.data.removesuffix(".weight") + ".input_scale"
    if source.global_scale is None or name not in checkpoint.tensors:
        return
    value = float(checkpoint.read(name))
    if not 0 < value < float("inf"):
        unit.findings.append(fault("bad input scale", name, f"the scale of activations is {value}"))


def _compare_one(source: Source, weight: Weight, other: _Other, unit: UnitRecord) -> None:
    theirs = other.sources.get(source.tensor.name)
    if theirs is None:
        report = note if source.tensor.name.startswith("mtp.") else fault
        unit.findings.append(report("unexpected", source.data, "the other checkpoint does not have it"))
        return
    comparison, findings = compare(
        source.data, weight, read_weight(other.checkpoint, theirs, other.config, check=False)
    )
    unit.comparisons.append(comparison)
    unit.findings += findings


def _compare_all(units: Sequence[UnitRecord], other: _Other | None, digests: dict[str, str] | None) -> list[Finding]:
    ours = digests_of(units)
    if digests is not None:
        return compare_digests(ours, digests)
    if other is None:
        return []
    missing = [name for name in other.sources if name not in ours]
    drafts = [name for name in missing if name.startswith("mtp.")]
    findings = [
        fault("missing", name, "the other checkpoint has it") for name in missing if not name.startswith("mtp.")
    ]
    if drafts:
        findings.append(note("no draft block", drafts[0], f"the other checkpoint has {len(drafts)} weights of one"))
    return findings


def _run_text(opened: Opened, config: ModelConfig, options: AuditOptions, report: AuditReport) -> None:
    assert opened.plan is not None and options.token_ids is not None
    if any(finding.kind in ("missing", "misshapen", "mistyped", "mixed formats") for finding in report.faults):
        report.findings.append(note("text not run", "the whole model", "tensors are missing or ill-formed"))
        return
    run = TextAudit(opened.checkpoint, config, opened.plan, options.token_ids, options.device)
    with byte_progress(options.progress, run.nbytes, "running the text") as advance:
        report.text, findings = run.run(advance)
    report.findings += findings


# ---- progress file ----


class _Finished:
    """Finished units, in a file of JSON lines if there is one: a fingerprint, then a unit a line."""

    def __init__(self, file: Path | None, fingerprint: str) -> None:
        self.units: dict[str, UnitRecord] = {}
        self.file = file
        if file is None:
            return
        if file.exists() and file.stat().st_size:
            self._read(file, fingerprint)
        else:
            file.write_text(json.dumps({"fingerprint": fingerprint}) + "\n", encoding="utf-8")

    def _read(self, file: Path, fingerprint: str) -> None:
        whole = [line for line in file.read_bytes().split(b"\n")[:-1] if line]  # a line cut short does not count
        try:
            first, *rest = [json.loads(line) for line in whole]
            if first["fingerprint"] != fingerprint:
                raise CheckpointError(f"{file} belongs to the audit of other files; delete it to start anew")
            units = msgspec.convert(rest, list[UnitRecord], str_keys=True)
            self.units = {unit.name: unit for unit in units}
        except CheckpointError:
            raise
        except (ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
            raise CheckpointError(f"{file} is not a progress file ({error}); delete it to start anew") from None
        file.write_bytes(b"".join(line + b"\n" for line in whole))

    def add(self, unit: UnitRecord) -> None:
        self.units[unit.name] = unit
        if self.file is not None:
            with self.file.open("ab") as stream:
                stream.write(json.dumps(asdict(unit)).encode() + b"\n")

    def close(self) -> None:
        """All is done: the next audit starts anew."""
        if self.file is not None:
            self.file.unlink()
