"""Checks of weights against one another: routers and their experts, gate against up, one layer against the rest.

What statistics alone can show rests on two facts of trained mixtures of experts, both measured on the shipped
miniature (docs/checkpoints.md):

* The mean row of w1 minus that of w3 points the same way in all experts of a layer (gate and up do different things to
  the same input). An expert that points the other way has the two exchanged.
* The mean row of an expert's w1, less what all experts share, leans towards that expert's own router row. Two experts
  whose leanings are crossed were exchanged.

A layer where the sound majority does not show the fact (random weights, hash routers) is not judged by it.
"""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor

from dsv4.formats.tensors import QuantTensor, Weight
from dsv4.tools.audit.report import Finding, Routing, TensorRecord, UnitRecord, fault, note
from dsv4.tools.audit.tensors import sample_rows

FAR_EXPERT, ODD_EXPERT = 8.0, 3.0  # root mean square against the median of the layer's experts: fault, note
FAR_LAYER, ODD_LAYER = 64.0, 16.0  # against the median of the same weight in all layers
MIN_PEERS = 4
MIN_GATE_SIGN, SWAPPED_GATE_SIGN = 0.4, -0.3
MIN_ALIGNMENT, CROSSED = 0.2, 0.3
SAME_EXPERT = 0.9  # cosine of two experts' mean rows, less what all share; 0.36 is the most in sound miniatures
MAX_BIAS_RANGE = 50.0
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def mean_row(weight: Weight) -> Tensor:
    """fp32 [K]: mean of the rows (evenly spaced ones of a quantised weight)."""
    return (sample_rows(weight) if isinstance(weight, QuantTensor) else weight.float()).mean(0)


def check_gate_up(prefix: str, w1_means: Tensor, w3_means: Tensor) -> list[Finding]:
    """[E, K] each: which experts have w1 and w3 exchanged."""
    differences = w1_means - w3_means
    num_experts = len(differences)
    if num_experts < MIN_PEERS:
        return []
    others = (differences.sum(0) - differences) / (num_experts - 1)
    signs = (differences * others).sum(1) / others.square().sum(1).clamp_min(1e-30)  # about 1 where all agree
    if float(signs.median()) < MIN_GATE_SIGN:
        return []
    return [
        fault(
            "gate and up swapped", f"{prefix}.{expert_idx}.w1.weight",
            f"w1 and w3 of expert {expert_idx} look exchanged: what separates them in the other experts is reversed",
        )
        for expert_idx in (signs < SWAPPED_GATE_SIGN).nonzero().flatten().tolist()
    ]  # fmt: skip


def check_expert_order(prefix: str, w1_means: Tensor, gate: Tensor) -> list[Finding]:
    """[E, K] each: which two experts stand in one another's place."""
    if len(gate) < MIN_PEERS:
        return []
    rows, leanings = _directions(gate.float()), _directions(w1_means)
    alignment = leanings @ rows.T  # [expert, router row]
    alignment = alignment - alignment.mean(0) - alignment.mean(1, keepdim=True) + alignment.mean()
    own = alignment.diagonal()
    gain = alignment + alignment.T - own - own.unsqueeze(1)  # of exchanging two experts
    if -float(gain.median()) < MIN_ALIGNMENT:
        return []
    best = gain.max(1)
    found = []
    for expert_idx, other_idx in enumerate(best.indices.tolist()):
        is_mutual = int(best.indices[other_idx]) == expert_idx
        if expert_idx < other_idx and is_mutual and float(best.values[expert_idx]) > CROSSED:
            text = f"experts {expert_idx} and {other_idx} look exchanged: each leans to the other's router row"
            found.append(fault("experts swapped", f"{prefix}.{expert_idx}.w1.weight", text))
    return found


def check_copies(prefix: str, w1_means: Tensor) -> list[Finding]:
    """[E, K]: which experts are nearly one another, whatever their bytes."""
    if len(w1_means) < MIN_PEERS:
        return []
    directions = _directions(w1_means)
    pairs = ((directions @ directions.T).triu(1) > SAME_EXPERT).nonzero().tolist()
    return [
        fault("copied expert", f"{prefix}.{other}.w1.weight", f"experts {one} and {other} are nearly the same")
        for one, other in pairs
    ]


def _directions(rows: Tensor) -> Tensor:
    centred = rows - rows.mean(0)
    return centred / centred.norm(dim=1, keepdim=True).clamp_min(1e-30)


# ---- routers ----


def check_table(name: str, table: Tensor, num_experts: int) -> tuple[list[Finding], Routing]:
    """A hash router's table int64 [vocab, k]."""
    findings = []
    inside = (table >= 0) & (table < num_experts)
    if not bool(inside.all()):
        token = int((~inside).any(1).nonzero()[0])
        text = f"token {token} names experts {table[token].tolist()}; there are 0 to {num_experts - 1}"
        findings.append(fault("expert out of range", name, text))
    ordered = table.sort(1).values
    repeated = (ordered[:, 1:] == ordered[:, :-1]).any(1)
    if bool(repeated.any()):
        token = int(repeated.nonzero()[0])
        text = f"{int(repeated.sum())} tokens name an expert twice, the first is {token}: {table[token].tolist()}"
        findings.append(fault("expert named twice", name, text))
    shares = torch.bincount(table[inside], minlength=num_experts) / len(table)
    never = (shares == 0).nonzero().flatten().tolist()
    always = (shares >= 1).nonzero().flatten().tolist()
    if never and table.numel() >= 8 * num_experts:
        findings.append(fault("expert never chosen", name, f"no token names experts {_list(never)}"))
    if always and num_experts > table.shape[1]:
        findings.append(fault("expert always chosen", name, f"every token names experts {_list(always)}"))
    return findings, Routing("hash", float(shares.min()), float(shares.max()))


def check_bias(name: str, bias: Tensor) -> tuple[list[Finding], Routing]:
    """A score router's correction bias [E]."""
    low, high = float(bias.min()), float(bias.max())
    findings = []
    if high - low > MAX_BIAS_RANGE:  # scores are about 0 to 5: such experts are always or never chosen
        extreme = int((bias - bias.median()).abs().argmax())
        text = f"from {low:.3g} to {high:.3g}: expert {extreme} is chosen always or never"
        findings.append(fault("absurd router bias", name, text))
    return findings, Routing("dense", low, high)


def check_gate_rows(name: str, gate: Tensor) -> list[Finding]:
    """Two experts with the same router row are chosen together, always."""
    unique, inverse = gate.float().unique(dim=0, return_inverse=True)
    if len(unique) == len(gate):
        return []
    order = inverse.argsort(stable=True)
    twins = [(a, b) for a, b in pairwise(order.tolist()) if inverse[a] == inverse[b]]
    return [fault("duplicate", name, f"the router rows of experts {a} and {b} are equal") for a, b in twins[:5]]


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")


# ---- one against many ----


def check_experts(records: Sequence[TensorRecord]) -> list[Finding]:
    """The experts' matrices of one layer: sizes that stand out."""
    return _check_sizes([record for record in records if ".experts." in record.name], FAR_EXPERT, ODD_EXPERT, "experts")


def check_units(units: Sequence[UnitRecord]) -> list[Finding]:
    """All layers together: equal tensors, and weights that stand out among the same weight of other layers."""
    records = [record for unit in units for record in unit.tensors]
    single = [record for record in records if ".experts." not in record.name and _is_matrix(record)]
    return _duplicates(records) + _check_sizes(single, FAR_LAYER, ODD_LAYER, "layers")


def _is_matrix(record: TensorRecord) -> bool:
    return len(record.shape) == 2 and not record.name.endswith((".tid2eid", ".ape"))


def _check_sizes(records: Sequence[TensorRecord], far: float, odd: float, peers: str) -> list[Finding]:
    groups: dict[str, list[TensorRecord]] = defaultdict(list)
    for record in records:
        if record.is_sound and math.isfinite(record.rms) and record.rms > 0:
            groups[_NUMBER.sub("*", record.name)].append(record)
    findings = []
    for group in groups.values():
        if len(group) < MIN_PEERS:
            continue
        middle = median(record.rms for record in group)
        for record in group:
            ratio = max(record.rms / middle, middle / record.rms)
            text = f"root mean square {record.rms:.3g}, {middle:.3g} is usual in the other {peers}"
            if ratio >= far:
                findings.append(fault("size outlier", record.name, text))
            elif ratio >= odd:
                findings.append(note("size outlier", record.name, text))
    return findings


def _duplicates(records: Sequence[TensorRecord]) -> list[Finding]:
    first: dict[str, str] = {}
    findings = []
    for record in records:
        if record.is_constant or math.prod(record.shape) < 32:
            continue
        # a tied head computes the same; all hash layers may share one table
        for digest, what in ((record.digest, "bytes"), (record.codes, "codes")):
            other = first.setdefault(digest, record.name) if digest else record.name
            if other != record.name:
                is_usual = {other, record.name} == {"embed.weight", "head.weight"} or record.name.endswith(".tid2eid")
                report = note if is_usual else fault
                findings.append(report("duplicate", record.name, f"the same {what} as {other}"))
                break
    return findings
