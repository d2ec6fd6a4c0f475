"""What an audit finds, as plain data that survives a trip through JSON."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

FAULT, NOTE = "fault", "note"
UNSEEN = (
    "values that are wrong and look like others (a changed code, a scale off by a little, weights of another training "
    "step) show only with --against, the source or an earlier report"
)


@dataclass(frozen=True)
class Finding:
    """One thing to know. A `fault` makes the checkpoint unsound; a `note` is unusual and harmless in itself.

    kind    a few fixed words (`zero scale`, `duplicate`, ...)
    tensor  the stored tensor or file it is about
    """

    severity: str
    kind: str
    tensor: str
    text: str


def fault(kind: str, tensor: str, text: str) -> Finding:
    return Finding(FAULT, kind, tensor, text)


def note(kind: str, tensor: str, text: str) -> Finding:
    return Finding(NOTE, kind, tensor, text)


@dataclass(frozen=True)
class TensorRecord:
    """One weight of the model. Sizes of numbers are log2; None where there is nothing to measure.

    digest       SHA-256 of the stored bytes: data, then scales
    rms          of the values (quantised weights: of evenly spaced rows)
    largest      greatest magnitude (the same rows)
    is_constant  one value everywhere: says nothing when another tensor is equal
    is_sound     no fault of its own: sizes of others are not judged by the rest
    scales       smallest, median and largest log2 of the scales whose group is not all zero
    codes        SHA-256 of the data alone; empty for plain weights
    """

    name: str
    format: str
    shape: tuple[int, ...]
    nbytes: int
    digest: str
    rms: float
    largest: float
    is_constant: bool = False
    is_sound: bool = True
    scales: tuple[float, float, float] | None = None
    codes: str = ""


@dataclass(frozen=True)
class Routing:
    """One layer's router. Hash: smallest and largest share of tokens that name an expert. Dense: range of the bias."""

    kind: str
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """One weight in two checkpoints: relative error of the values (Frobenius), and how many stored codes moved."""

    name: str
    error: float
    moved: int = 0


@dataclass
class UnitRecord:
    """A unit is what is read together: one layer, one draft block, or the rest. `scale_counts` is a histogram: log2 of
    a scale, rounded down -> how many."""

    name: str
    tensors: list[TensorRecord] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    scale_counts: dict[int, int] = field(default_factory=dict)
    routing: Routing | None = None
    comparisons: list[Comparison] = field(default_factory=list)


@dataclass(frozen=True)
class LayerRun:
    """One layer on a text; see `text_run`. Errors are relative to the exact values, shares from 0 to 1.

    attn_error, ffn_error   official numerics against exact, on the same input: this layer's own error
    stream_error            the same after all layers so far
    noise                   exact arithmetic with bf16 activations against exact, after all layers so far: the floor
    largest                 greatest activation magnitude in the streams
    crest                   that over their root mean square
    router                  share of the chosen experts that official and exact agree on
    index_recall            share of the exact picks that official picks too
    kv_error                rounding of the cached rows to their format
    kernel_error            kernels against oracles on the same input; None without a GPU
    """

    layer_idx: int
    attention: str
    attn_error: float
    ffn_error: float
    stream_error: float
    noise: float
    largest: float
    crest: float
    router: float
    index_recall: float | None
    kv_error: float
    kernel_error: float | None = None


@dataclass(frozen=True)
class TextRun:
    """Perplexity under `exact` and `official`, and the layers."""

    tokens: int
    exact_perplexity: float
    official_perplexity: float
    layers: tuple[LayerRun, ...]


@dataclass
class AuditReport:
    """Everything an audit says."""

    path: str
    against: str | None
    naming: str
    total_bytes: int
    units: list[UnitRecord]
    findings: list[Finding]
    text: TextRun | None = None
    seconds: float = 0.0
    peak_bytes: int = 0

    @property
    def faults(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == FAULT]

    @property
    def is_sound(self) -> bool:
        return not self.faults

    @property
    def verdict(self) -> str:
        """In words: how far it reaches, too."""
        if not self.is_sound:
            return f"{len(self.faults)} {'fault' if len(self.faults) == 1 else 'faults'}"
        if self.against is not None:
            return "sound, and what the other has"
        return f"sound by itself; {UNSEEN}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no word for infinity or NaN: they become null."""
        report = msgspec.json.decode(msgspec.json.encode(self))
        return {"is_sound": self.is_sound, "verdict": self.verdict, **report}


def digests_of(units: Iterable[UnitRecord]) -> dict[str, str]:
    """By the name of the weight."""
    return {record.name: record.digest for unit in units for record in unit.tensors}
