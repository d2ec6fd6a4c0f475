"""Matches a checkpoint's headers with the model: which stored tensors make up each weight, in which format.

The stored dtype and the siblings decide the format of every single tensor, never the config or the model's name:
layout.py has the table. MXFP4 codes may be U8 too, plain tensors BF16, F16 or F32; .input_scale may be absent.

All disagreements are collected and reported in one error. No data is read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dsv4.config import ModelConfig
from dsv4.formats.rows import MXFP4_GROUP, NVFP4_GROUP
from dsv4.formats.tensors import QuantFormat, QuantTensor, Weight
from dsv4.loader.checkpoint import Checkpoint
from dsv4.loader.header import CheckpointError, TensorInfo
from dsv4.loader.layout import weight_tensors
from dsv4.loader.memory_source import TENSOR_DTYPES
from dsv4.loader.names import LogicalTensor, Naming, Role, detect_naming, expected_tensors, stored_names

FLOAT_DTYPES = ("BF16", "F16", "F32")
SCALE_SUFFIXES = (".scale", ".weight_scale_inv")  # the second is V3's and transformers' name for the same thing
NVFP4_SUFFIXES = (".weight_scale", ".weight_scale_2", ".input_scale")
_MAX_LISTED = 5
_COUNT_SLACK = 8  # a checkpoint that lacks 7 of 8 experts still gets a list of what is missing
_ALWAYS_COUNTED = 100_000  # as does any small model
_DRAFT = re.compile(r"mtp\.(\d+)\.")
_MTP = re.compile(r"mtp\.\d+\.(e_proj|h_proj|enorm|hnorm)\.")
_DSPARK = re.compile(r"mtp\.\d+\.(main_proj|main_norm|markov_head|confidence_head)\.")


@dataclass(frozen=True)
class StoredFormat:
    """How one weight is stored; the experts of one matrix must agree in it. `quant` is None for plain tensors."""

    quant: QuantFormat | None
    dtype: str
    scale_dtype: str | None = None

    @classmethod
    def of(cls, weight: Weight) -> StoredFormat:
        """Of a weight in memory."""
        if not isinstance(weight, QuantTensor):
            return cls(None, TENSOR_DTYPES[weight.dtype])
        dtypes = [TENSOR_DTYPES[part.dtype] for part in (weight.data, weight.scale)]
        return cls(weight.format, dtypes[0], "F8_E8M0" if dtypes[1] == "U8" else dtypes[1])

    @classmethod
    def in_memory(cls, source: Source) -> StoredFormat:
        """As the model has it: control tensors are fp32 there."""
        return cls(None, "F32") if source.tensor.role is Role.CONTROL else source.format

    def __str__(self) -> str:
        if self.quant is None:
            return self.dtype
        return f"{self.quant} ({self.dtype} with {self.scale_dtype} scales)"


@dataclass(frozen=True)
class Source:
    """Where one weight comes from: names of stored tensors. `rows` is set when it is a slice of a stack [E, R, K]."""

    tensor: LogicalTensor
    format: StoredFormat
    data: str
    scale: str | None = None
    global_scale: str | None = None
    rows: tuple[int, int] | None = None
    nbytes: int = 0

    @property
    def stored_names(self) -> list[str]:
        """Of its tensors: the weight, then its scales."""
        return [name for name in (self.data, self.scale, self.global_scale) if name is not None]


@dataclass(frozen=True)
class LoadPlan:
    """A checkpoint that fits its config: what will be read, in file order, and what deserves to be said (`notes`)."""

    sources: tuple[Source, ...]
    num_mtp: int  # draft blocks: MTP, or the layers of a DSpark head
    naming: Naming
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that will be read."""
        return sum(source.nbytes for source in self.sources)


@dataclass(frozen=True)
class Resolution:
    """`plan_load` without the verdict: what fits (`plan`), and what does not, by kind (`problems`)."""

    plan: LoadPlan
    problems: dict[str, list[str]]


def plan_load(checkpoint: Checkpoint, config: ModelConfig) -> LoadPlan:
    """Match every stored tensor with the model; `CheckpointError` lists what is missing, unexpected or ill-formed."""
    found = resolve_tensors(checkpoint, config)
    if found.problems:
        _raise_problems(checkpoint.path, found)
    return found.plan


def resolve_tensors(checkpoint: Checkpoint, config: ModelConfig) -> Resolution:
    """The same for a checkpoint that may not fit; `CheckpointError` only where nothing can be matched at all."""
    naming = detect_naming(checkpoint.tensors)
    drafts = [name for name in checkpoint.tensors if _DRAFT.match(name)] if naming is Naming.OFFICIAL else []
    skipped: Collection[str] = ()
    notes: tuple[str, ...] = ()
    if config.num_spare_ratios:
        extra = config.num_spare_ratios
        notes += (f"compress_ratios ends with {extra} value(s) for draft blocks that the config has not: ignored",)
    _check_drafter(checkpoint.path, config, drafts)
    if drafts and not config.num_draft_layers:
        notes += (f"num_nextn_predict_layers is 0, but {len(drafts)} mtp.* tensors are there: skipped",)
        skipped, drafts = set(drafts), []
    num_mtp = config.num_draft_layers if drafts else 0
    _check_counts(checkpoint, config, naming, config.num_hidden_layers + num_mtp)
    stored = {name: info for name, info in checkpoint.tensors.items() if name not in skipped}
    found, problems = match_tensors(stored, config, naming, expected_tensors(config, with_mtp=num_mtp > 0))
    order = checkpoint.in_file_order({source.data for source in found})
    place = {name: position for position, name in enumerate(order)}
    sources = sorted(found, key=lambda source: place[source.data])
    return Resolution(LoadPlan(tuple(sources), num_mtp, naming, notes), problems)


def match_tensors(
    stored: Mapping[str, TensorInfo], config: ModelConfig, naming: Naming, expected: Iterable[LogicalTensor]
) -> tuple[list[Source], dict[str, list[str]]]:
    """The sources of the weights that are expected, and what does not fit, by kind."""
    resolver = _Resolver(stored, config, naming)
    for tensor in expected:
        resolver.resolve(tensor)
    for name in stored:
        if name not in resolver.claimed:
            resolver.problem("unexpected", name)
    return resolver.sources, {kind: list(texts) for kind, texts in resolver.problems.items()}


def _raise_problems(path: Path, found: Resolution) -> None:
    lines = []
    for kind, texts in found.problems.items():
        rest = f" and {len(texts) - _MAX_LISTED} more" if len(texts) > _MAX_LISTED else ""
        lines.append(f"  {kind} ({len(texts)}): {'; '.join(texts[:_MAX_LISTED])}{rest}")
    raise CheckpointError(f"{path} does not fit its config ({found.plan.naming} names):\n" + "\n".join(lines))


def weight_format(tensors: Collection[str], base: str, dtype: str) -> QuantFormat | None:
    """Format of the weight `<base>.weight` of `dtype`, from its siblings among the stored names; None is plain."""
    if dtype == "F8_E4M3":
        return QuantFormat.FP8_BLOCK
    if dtype in ("I8", "U8"):
        is_nvfp4 = any(base + suffix in tensors for suffix in NVFP4_SUFFIXES[:2])
        return QuantFormat.NVFP4 if is_nvfp4 else QuantFormat.MXFP4
    return None


def _draft_idx(name: str) -> int:
    match = _DRAFT.match(name)
    assert match is not None, name
    return int(match[1])


def _check_drafter(path: Path, config: ModelConfig, drafts: list[str]) -> None:
    """Tensor names say which drafter there is, and the config must agree.

    A DSpark head reuses the names of MTP: loading its first block as MTP would draft nonsense without an error.
    """
    if config.dspark is not None:
        found = [name for name in drafts if _MTP.match(name)]
        if found:
            raise CheckpointError(
                f"{path} holds {found[0]} ({len(found)} such tensors), part of an MTP block, but its config has "
                "dspark_* keys: a DSpark head has no such tensors"
            )
        return
    announced = max(1, config.num_nextn_predict_layers)
    found = [name for name in drafts if _DSPARK.match(name) or _draft_idx(name) >= announced]
    if found:
        raise CheckpointError(
            f"{path} holds {found[0]} ({len(found)} such tensors), part of a DSpark draft head, but its config has no "
            f"dspark_* keys and announces {config.num_nextn_predict_layers} MTP blocks"
        )


def _check_counts(checkpoint: Checkpoint, config: ModelConfig, naming: Naming, num_blocks: int) -> None:
    """Numbers of layers and experts that the headers cannot hold, by far, are refused before they are enumerated."""
    stored = [info for name, info in checkpoint.tensors.items() if ".experts." in name and info.numel]
    num_stored = sum(info.shape[0] if info.shape else 1 for info in stored) if naming is Naming.HF else len(stored)
    announced = 3 * config.n_routed_experts * num_blocks
    if announced > _COUNT_SLACK * num_stored + _ALWAYS_COUNTED:
        raise CheckpointError(
            f"{checkpoint.path} does not fit its config: n_routed_experts {config.n_routed_experts} in {num_blocks} "
            f"blocks (num_hidden_layers and draft blocks) make {announced} matrices, the headers hold {num_stored} "
            "tensors of experts"
        )


class _Resolver:
    """Resolves tensors one by one, remembers which stored names are accounted for, and collects problems by kind."""

    def __init__(self, stored: Mapping[str, TensorInfo], config: ModelConfig, naming: Naming) -> None:
        self.stored = stored
        self.config = config
        self.naming = naming
        self.claimed: set[str] = set()
        self.sources: list[Source] = []
        self.problems: dict[str, dict[str, None]] = {}  # ordered sets: a stacked tensor is looked at more than once
        self.stacks: dict[str, tuple[str, StoredFormat]] = {}
        self.reported_stacks: set[str] = set()

    def problem(self, kind: str, text: str) -> None:
        self.problems.setdefault(kind, {})[text] = None

    def resolve(self, tensor: LogicalTensor) -> None:
        if self.naming is Naming.HF and tensor.role is Role.EXPERT:
            if tensor.expert_idx == 0:
                self._resolve_stack(tensor)
            return
        info = self._find(tensor)
        if info is None:
            return
        if tensor.role is Role.TABLE:
            self._resolve_plain(tensor, info, ("I64",))
        elif tensor.role in (Role.PLAIN, Role.CONTROL):
            self._resolve_plain(tensor, info, FLOAT_DTYPES)
        else:
            self._resolve_weight(tensor, info)

    def _find(self, tensor: LogicalTensor) -> TensorInfo | None:
        candidates = stored_names(tensor, self.naming)
        present = [name for name in candidates if name in self.stored]
        if not present:
            self.problem("missing", candidates[0])
            return None
        self.claimed.add(present[0])  # a second spelling of the same tensor stays unclaimed: unexpected
        return self.stored[present[0]]

    def _check_shape(self, info: TensorInfo, expected: tuple[int, ...]) -> bool:
        if info.shape == expected:
            return True
        self.problem("misshapen", f"{info.name} is {list(info.shape)}, expected {list(expected)}")
        return False

    def _check_dtype(self, info: TensorInfo, expected: tuple[str, ...]) -> bool:
        if info.dtype in expected:
            return True
        self.problem("mistyped", f"{info.name} is {info.dtype}, expected {' or '.join(expected)}")
        return False

    def _resolve_plain(self, tensor: LogicalTensor, info: TensorInfo, dtypes: tuple[str, ...]) -> None:
        if self._check_dtype(info, dtypes) and self._check_shape(info, tensor.shape):
            self._add(Source(tensor, StoredFormat(None, info.dtype), info.name, nbytes=info.nbytes))

    def _resolve_stack(self, tensor: LogicalTensor) -> None:
        """Hugging Face's stacked experts: plain [E, 2 I, D] (w1 above w3) or [E, D, I] (w2)."""
        info = self._find(tensor)
        if info is None:
            return
        rows, cols = tensor.shape
        num_parts = 1 if ".w2." in tensor.name else 2
        expected = (self.config.n_routed_experts, num_parts * rows, cols)
        if not (self._check_dtype(info, FLOAT_DTYPES) and self._check_shape(info, expected)):
            return
        start = rows if ".w3." in tensor.name else 0
        share = info.nbytes // (self.config.n_routed_experts * num_parts)
        for expert_idx in range(self.config.n_routed_experts):
            name = tensor.name.replace(".experts.0.", f".experts.{expert_idx}.")
            expert = replace(tensor, name=name, expert_idx=expert_idx)
            stored = StoredFormat(None, info.dtype)
            self._add(Source(expert, stored, info.name, rows=(start, start + rows), nbytes=share))

    def _resolve_weight(self, tensor: LogicalTensor, info: TensorInfo) -> None:
        base = info.name.removesuffix(".weight")
        quant = weight_format(self.stored, base, info.dtype)
        if quant is None:
            self._resolve_plain(tensor, info, (*FLOAT_DTYPES, "F8_E4M3", "I8", "U8"))
            return
        group = {QuantFormat.MXFP4: MXFP4_GROUP, QuantFormat.NVFP4: NVFP4_GROUP}.get(quant)
        if group is not None and not self._check_group(info, tensor.shape[1], group):
            return
        weight, *scales = weight_tensors(tensor, quant, self.config.weight_block_size)
        is_good = quant is not QuantFormat.NVFP4 or self._check_dtype(info, ("U8",))
        is_good = self._check_shape(info, weight.shape) and is_good
        used: list[TensorInfo] = []
        for part in scales:
            suffix = part.name.removeprefix(tensor.base)
            is_used = suffix != ".input_scale"  # activations stay BF16: checked, not used
            found = self._sibling(base, SCALE_SUFFIXES if suffix == SCALE_SUFFIXES[0] else (suffix,), is_used)
            if found is None:
                is_good = is_good and not is_used
                continue
            is_scalar = part.shape == () and found.shape == (1,)
            dtypes = ("F8_E8M0", "F32") if quant is QuantFormat.FP8_BLOCK else (part.dtype,)
            is_sound = self._check_dtype(found, dtypes) and (is_scalar or self._check_shape(found, part.shape))
            is_good = is_sound and is_good
            used += [found] * is_used
        if is_good:
            stored = StoredFormat(quant, _code_dtype(info.dtype), used[0].dtype)
            nbytes = info.nbytes + sum(one.nbytes for one in used)
            names = [*(one.name for one in used), None]
            self._add(Source(tensor, stored, info.name, names[0], names[1], nbytes=nbytes))

    def _sibling(self, base: str, suffixes: tuple[str, ...], required: bool = True) -> TensorInfo | None:
        for suffix in suffixes:
            if base + suffix in self.stored:
                self.claimed.add(base + suffix)
                return self.stored[base + suffix]
        if required:
            self.problem("missing", base + suffixes[0])
        return None

    def _check_group(self, info: TensorInfo, cols: int, group: int) -> bool:
        if cols % group:
            self.problem("misshapen", f"{info.name} is packed FP4, but {cols} columns are not a multiple of {group}")
        return cols % group == 0

    def _add(self, source: Source) -> None:
        self.sources.append(source)
        if source.tensor.expert_idx is None:
            return
        stack = source.tensor.parameter
        name, expected = self.stacks.setdefault(stack, (source.data, source.format))
        if source.format != expected and stack not in self.reported_stacks:
            self.reported_stacks.add(stack)  # one line for the stack, not one for every expert in it
            self.problem("mixed formats", f"{source.data} is {source.format}, but {name} is {expected}")


def _code_dtype(dtype: str) -> str:
    """I8 and U8 hold the same packed nibbles."""
    return "U8" if dtype == "I8" else dtype
