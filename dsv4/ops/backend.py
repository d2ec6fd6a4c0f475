"""`Backend`: a way to run the model: its ops, the layout they want weights in, and what an engine may do with them.

`TORCH` is the oracles: plain torch, any device, any float dtype, bitwise independent of how requests are batched or
chunked. `TRITON` is the kernels, what a GPU runs; it imports without Triton, only a launch needs it.

Ask a backend what it can do; never compare ops. `backend.with_ops(moe=other)` runs another `moe` on the same weights.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from dsv4.formats.layouts import ShuffledTensor
from dsv4.formats.tensors import QuantTensor, Weight
from dsv4.ops import attention, compress, drafting, hyper, indexer, linear, moe, norm, router, rows, sampling
from dsv4.ops.contracts import OpSet
from dsv4.ops.lib.waiting import is_waiting
from dsv4.ops.linear import LinearBundle, prepare_grouped
from dsv4.ops.moe import prepare_routed, prepare_shared

PrepareExperts = Callable[[Sequence[QuantTensor]], Sequence[QuantTensor | ShuffledTensor]]
FAMILIES = (attention, compress, drafting, hyper, indexer, linear, moe, norm, router, rows, sampling)


@dataclass(frozen=True)
class WeightLayout:
    """How weights are laid out for some ops, once, at load; None leaves them as they were loaded.

    bundle   weights that share an input -> one launch
    grouped  the grouped output projection, and its number of groups
    routed   w1, w2, w3 of one routed expert or of a stack, quantised; as they are where no kernel takes them
    shared   the same of the shared expert
    keeps_operands  whether weights keep their fp64 operands (formats/exact_sums.py), where memory allows
    """

    bundle: Callable[[Sequence[Weight]], LinearBundle] | None = None
    grouped: Callable[[Weight, int], Weight | ShuffledTensor] | None = None
    routed: PrepareExperts | None = None
    shared: PrepareExperts | None = None
    keeps_operands: bool = False


@dataclass(frozen=True)
class Backend:
    """One way to run the model.

    name           as people write it
    ops            what model and engine call
    layout         how weights are laid out for them; oracles take every layout
    graph_devices  types of the devices on which a call can be captured
    has_kernels    whether there is something to compile before the first call
    cuts_calls     whether captured calls are cut where experts run, for the host to fetch them: nothing runs beside
    """

    name: str
    ops: OpSet
    layout: WeightLayout
    graph_devices: frozenset[str]
    has_kernels: bool
    cuts_calls: bool = False

    def can_capture(self, device: torch.device) -> bool:
        """Whether a forward call on this device can become a graph."""
        return device.type in self.graph_devices

    def with_ops(self, **ops: Any) -> Backend:
        """The same with some ops exchanged. Weights are laid out as before, so an op given here takes the weights that
        the one it replaces took. Calls are captured as before, unless an op waits for the device, as some oracles do
        (ops/lib/waiting.py): then no call is. What capture cannot hold besides says so when it is tried.
        """
        known = [field.name for field in fields(OpSet)]
        unknown = sorted(set(ops) - set(known))
        if unknown:
            raise ValueError(f"no such op: {', '.join(unknown)}; the ops of a backend are {', '.join(known)}")
        devices = frozenset() if any(map(is_waiting, ops.values())) else self.graph_devices
        return replace(self, ops=replace(self.ops, **ops), graph_devices=devices)

    @property
    def waiting_ops(self) -> tuple[str, ...]:
        """Ops for which no call can be captured."""
        return tuple(field.name for field in fields(OpSet) if is_waiting(getattr(self.ops, field.name)))


def _ops(suffix: str) -> OpSet:
    """Every op by its name, from the family that exports it: `<op>` launches kernels, `<op>_ref` is the oracle."""
    exported = ChainMap(*(vars(family) for family in FAMILIES))
    return OpSet(**{field.name: exported[field.name + suffix] for field in fields(OpSet)})


TORCH = Backend(
    name="torch",
    ops=_ops("_ref"),
    layout=WeightLayout(keeps_operands=True),
    graph_devices=frozenset(),
    has_kernels=False,
)

TRITON = Backend(
    name="triton",
    ops=_ops(""),
    layout=WeightLayout(
        bundle=LinearBundle.build, grouped=prepare_grouped, routed=prepare_routed, shared=prepare_shared
    ),
    graph_devices=frozenset({"cuda"}),
    has_kernels=True,
)


def backend_for(device: torch.device, numerics: str) -> Backend:
    """The kernels on a GPU in `official` numerics; the oracles everywhere else."""
    return TRITON if device.type == "cuda" and numerics == "official" else TORCH
