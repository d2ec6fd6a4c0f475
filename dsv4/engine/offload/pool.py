"""Experts that do not fit on the device: they live in pinned host memory and are copied when a layer chooses them.

Every layer has S slots on the device, a stack like a resident one with S in place of E. The first F hold experts that
never leave (`Placement`: by plan, or the most used as measured); their host copy is not kept. The other S - F slots are
a least-recently-used cache of the remaining E - F experts, whose home is the host. When a layer has chosen, the
missing experts are copied into slots on a stream of their own, expert ids become slot ids, and the grouped product runs
on the S-stack as it would on a resident one. The product sums a token's experts in the order of its columns, which stay
in ascending expert order, so the result has the bits of the resident model.

A call that needs more experts than there are slots (a long prompt) goes through a staging stack of all E experts,
shared by all layers: what the device has is copied across the device, the rest from the host. While one layer computes,
the next one's experts are already being copied into a second staging stack.

The host must read the routing: that is the one synchronisation of a layer. A captured call is cut there: a piece ends
with the routing of one layer and the next piece begins with its experts (`Recorder`), so decode is one graph per layer.

Works on a CPU too, where "device" and "host" are two tensors; that is how the tests prove the bits.
"""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from dsv4.engine.offload.placement import Placement
from dsv4.formats.trees import map_tensors, tensors_of
from dsv4.model.parameters import BlockParams, ExpertParams
from dsv4.ops import Backend

PADDED_EXPERT = -1
NOT_HERE = -1
PIN_BYTES = 1 << 20  # smaller host tensors are torch's to pin


class Recorder(Protocol):
    """What captures a call (engine/run/graphs.py). `cut` ends a piece; a replay calls `then` before the next one."""

    def cut(self, then: Callable[[], None]) -> None: ...


@dataclass
class TransferStats:
    """What has been moved since `reset`.

    `num_uses` counts the experts a call of a layer needed, once each; a miss is one of them that the device did not
    have when the layer had chosen. `bytes_moved` also holds what was copied ahead of a choice.
    """

    num_uses: int = 0
    num_misses: int = 0
    bytes_moved: int = 0
    num_staged_layers: int = 0

    @property
    def num_hits(self) -> int:
        return self.num_uses - self.num_misses

    def reset(self) -> None:
        self.num_uses = self.num_misses = self.bytes_moved = self.num_staged_layers = 0


class LayerExperts:
    """The routed experts of one layer: a stack of slots on the device, the rest on the host. Passes for the stacks of
    `ExpertParams`: `matrices` is the object itself, which `ExpertPool.moe` recognises.
    """

    def __init__(self, pool: ExpertPool, layer_idx: int, like: Any) -> None:
        """`like`: the matrices of one expert, tensors in tuples and dataclasses; only shapes and dtypes count."""
        placement, self.num_experts = pool.placement, pool.num_experts
        self.pool = pool
        self.layer_idx = layer_idx
        self.following: LayerExperts | None = None
        self._fixed = list(range(placement.num_fixed))
        self._offloaded = sorted(set(range(self.num_experts)) - set(self._fixed))
        self._host_row = {expert: row for row, expert in enumerate(self._offloaded)}
        num_slots = placement.num_slots
        self.stack = map_tensors(
            like, lambda part: part.new_empty((num_slots, *part.shape), device=pool.device), (num_slots,)
        )
        self._host = map_tensors(like, lambda part: pool.host_tensor((len(self._offloaded), *part.shape), part.dtype))
        # pairs of tensors, device and host, each indexed by slot and by row
        self._parts = list(zip(tensors_of(self.stack), tensors_of(self._host), strict=True))
        # equal for layers whose experts have the same format and shapes
        self.kind = (
            tuple((part.shape[1:], part.dtype) for part, _ in self._parts),
            tuple(getattr(weight, "format", None) for weight in like),
        )
        self.expert_bytes = sum(host[0].numel() * host.element_size() for _, host in self._parts if len(host))
        self._slot_of = torch.full((self.num_experts,), NOT_HERE, dtype=torch.int64)
        for slot, expert in enumerate(self._fixed):
            self._slot_of[expert] = slot
        self._recent: OrderedDict[int, int] = OrderedDict()  # cached expert -> slot, least recently used first
        self._free = list(range(placement.num_fixed, num_slots))
        self._boundaries: dict[int, _Boundary] = {}

    @property
    def matrices(self) -> LayerExperts:
        return self

    def put(self, expert_idx: int, weights: Any) -> None:
        """Bring one expert home: to its fixed slot, or to the host."""
        for (device_part, host_part), source in zip(self._parts, tensors_of(weights), strict=True):
            if expert_idx in self._host_row:
                host_part[self._host_row[expert_idx]].copy_(source)
            else:
                device_part[self._slot_of[expert_idx]].copy_(source)

    def forget_copies(self) -> None:
        """Experts that wander have new weights at home: what slots hold of them is old."""
        for expert, slot in self._recent.items():
            self._slot_of[expert] = NOT_HERE
            self._free.append(slot)
        self._recent.clear()

    def slots_for(self, experts: Tensor, num_valid: int | None = None) -> Tensor | None:
        """experts int64 [T, k] on the host -> slots [T, k], once those experts are (or will be) there.

        Rows from `num_valid` on are padding: they fetch nothing and get -1. None if the slots cannot hold them all.
        """
        num_valid = len(experts) if num_valid is None else min(num_valid, len(experts))
        needed = _distinct(experts[:num_valid])
        wandering = [expert for expert in needed if expert in self._host_row]
        if len(wandering) > self.pool.placement.num_cached:
            return None
        missing = [expert for expert in wandering if expert not in self._recent]
        for expert in wandering:
            if expert in self._recent:
                self._recent.move_to_end(expert)
        self._fetch(missing)
        self.pool.stats.num_uses += len(needed)
        self.pool.stats.num_misses += len(missing)
        slots = torch.full_like(experts, PADDED_EXPERT)
        slots[:num_valid] = self._slot_of[experts[:num_valid].clamp_min(0)]
        slots[:num_valid][experts[:num_valid] < 0] = PADDED_EXPERT
        return slots

    def _fetch(self, missing: list[int]) -> None:
        """Host to slots. The device is done with the slots: the routing this answers comes after their last use.

        An expert is booked once its copy is under way, so that a call cut short (Ctrl-C) leaves no slot that claims to
        hold what it does not.
        """
        while missing and len(self._free) < len(missing):  # never one of this call: those stand at the end
            evicted, slot = self._recent.popitem(last=False)
            self._slot_of[evicted] = NOT_HERE
            self._free.append(slot)
        with self.pool.copying():
            for expert in missing:
                row, slot = self._host_row[expert], self._free[-1]
                targets = [device_part[slot] for device_part, _ in self._parts]
                torch._foreach_copy_(targets, [host_part[row] for _, host_part in self._parts], non_blocking=True)
                self._free.pop()
                self._slot_of[expert] = self._recent[expert] = slot
                self.pool.stats.bytes_moved += self.expert_bytes

    def fill_staging(self, staging: Any, needed: Iterable[int]) -> None:
        """Put the needed experts in their own places of a stack of all E."""
        targets = tensors_of(staging)
        for first, source, length, is_host in self._runs(needed):
            for parts, staged in zip(self._parts, targets, strict=True):
                staged[first : first + length].copy_(parts[is_host][source : source + length], non_blocking=True)
            self.pool.stats.bytes_moved += is_host * length * self.expert_bytes

    def num_absent(self, needed: list[int]) -> int:
        """How many of them no slot holds."""
        return int((self._slot_of[needed] == NOT_HERE).sum())

    def _runs(self, needed: Iterable[int]) -> Iterator[tuple[int, int, int, bool]]:
        """Neighbours that are neighbours where they lie too: first expert, its slot or host row, length, on the host.

        One copy each: a layer's hundreds of experts become a few.
        """
        run: tuple[int, int, int, bool] | None = None
        for expert in needed:
            slot = int(self._slot_of[expert])
            is_host = slot == NOT_HERE
            source = self._host_row[expert] if is_host else slot
            if run is not None and run[3] == is_host and expert - run[0] == source - run[1] == run[2]:
                run = (*run[:2], run[2] + 1, is_host)
                continue
            if run is not None:
                yield run
            run = (expert, source, 1, is_host)
        if run is not None:
            yield run

    def boundary(self, num_tokens: int, top_k: int) -> _Boundary:
        if num_tokens not in self._boundaries:
            self._boundaries[num_tokens] = _Boundary(self, num_tokens, top_k)
        return self._boundaries[num_tokens]

    def check_integrity(self) -> None:
        """Slots and their owners agree, and what a slot holds is what the host has."""
        owners = {slot: expert for expert, slot in enumerate(self._slot_of.tolist()) if slot != NOT_HERE}
        num_slots = self.pool.placement.num_slots
        assert len(owners) == int((self._slot_of != NOT_HERE).sum()), "two experts share a slot"
        assert sorted([*owners, *self._free]) == list(range(num_slots)), "a slot is lost"
        for expert, slot in self._recent.items():
            assert owners[slot] == expert, (expert, slot, owners[slot])
            for device_part, host_part in self._parts:
                home = host_part[self._host_row[expert]]
                # as bytes: FP8 has no equality, and a NaN code equals itself
                same = torch.equal(_bytes(device_part[slot].cpu()), _bytes(home))
                assert same, f"layer {self.layer_idx}: slot {slot} does not hold expert {expert}"


class _Boundary:
    """The cut of a captured call at one layer: routing out to the host, slots back in, through static buffers."""

    def __init__(self, layer: LayerExperts, num_tokens: int, top_k: int) -> None:
        pool = layer.pool
        self._layer = layer
        self.experts = pool.host_tensor((num_tokens, top_k), torch.int64)
        self._slots = pool.host_tensor((num_tokens, top_k), torch.int64)
        self.slots = torch.full((num_tokens, top_k), PADDED_EXPERT, dtype=torch.int64, device=pool.device)

    def cross(self) -> None:
        """Between two pieces of a replay."""
        pool = self._layer.pool
        pool.wait_for_routing()
        found = self._layer.slots_for(self.experts, pool.num_valid)
        assert found is not None, "captured only for sizes whose experts always fit"
        self._slots.copy_(found)
        self.slots.copy_(self._slots, non_blocking=True)
        pool.wait_for_copies()


class _Staging:
    """Stacks of all E experts, filled in turn, for layers whose experts look alike."""

    def __init__(self, layer: LayerExperts, num_stacks: int) -> None:
        count = layer.num_experts
        self.stacks = [
            map_tensors(layer.stack, lambda part: part.new_empty((count, *part.shape[1:])), (count,))
            for _ in range(num_stacks)
        ]
        self.staged: list[LayerExperts | None] = [None] * num_stacks  # prefetched in full
        self.free_events: list[Any] = [None] * num_stacks  # after the last product that read a stack
        self._next = 0

    def holds(self, layer: LayerExperts) -> int | None:
        return self.staged.index(layer) if layer in self.staged else None

    def take(self, in_use: int | None) -> int:
        """The next stack but the one in use, whatever it holds."""
        place = self._next if self._next != in_use else (self._next + 1) % len(self.stacks)
        self._next = (place + 1) % len(self.stacks)
        self.staged[place] = None
        return place


class ExpertPool:
    """All offloaded layers of a model, and the `moe` op over them; of one of several ranks its own experts, as many as
    any other has, and the op's halves.

    `num_valid` (see `only`), `recorder` and `stages_always` are the running call's, and the runner's to set: rows from
    num_valid on are padding; a recorder is there while a call is captured; warm-up stages calls that need not be.
    """

    def __init__(
        self, placement: Placement, num_experts: int, top_k: int, inner: Backend, *, device: torch.device | str,
        num_staging: int = 2, num_ranks: int = 1,
    ) -> None:  # fmt: skip
        placement.check(num_experts, top_k)
        self.placement = placement
        self.num_experts = num_experts
        self.top_k = top_k
        self.num_ranks = num_ranks
        self.device = torch.device(device)
        self.stats = TransferStats()
        self.layers: list[LayerExperts] = []
        self.num_valid: int | None = None
        self.recorder: Recorder | None = None
        self.stages_always = False
        self.inner = inner
        self._num_staging = num_staging
        self.staging: dict[Any, _Staging] = {}  # by what an expert looks like: layers may differ in format
        self._is_cuda = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if self._is_cuda else None

    @property
    def backend(self) -> Backend:
        """The given one with `moe` and what it consists of exchanged."""
        ops = self.inner.with_ops(moe=self.moe, moe_parts=self.moe_parts, moe_shared=self.moe_shared)
        return replace(ops, cuts_calls=True)

    def always_fits(self, num_tokens: int) -> bool:
        """Whether no choice of `num_tokens` tokens on each rank can need more experts than there are cached slots."""
        wandering = self.num_experts - self.placement.num_fixed
        return min(num_tokens * self.num_ranks * self.top_k, wandering) <= self.placement.num_cached

    def adopt(self, layer: LayerExperts, *, is_next: bool = True) -> None:
        """Take a layer in, in the order of the model. `is_next`: a call goes on to it from the one before."""
        assert layer.layer_idx == len(self.layers), (layer.layer_idx, len(self.layers))
        if self.layers and is_next:
            self.layers[-1].following = layer
        self.layers.append(layer)

    @contextmanager
    def only(self, num_valid: int | None) -> Iterator[None]:
        """Rows from `num_valid` on are padding in the calls inside. Rows of several ranks say it themselves (-1)."""
        before, self.num_valid = self.num_valid, num_valid if self.num_ranks == 1 else None
        try:
            yield
        finally:
            self.num_valid = before

    def moe(
        self, x: Tensor, experts: Tensor, weights: Tensor, routed: Any, shared: Any, *, limit: float,
        rounded: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """As `OpSet.moe`; `routed` is a layer of this pool, or resident stacks, which are passed on."""
        op = self.inner.ops.moe
        return self._over(partial(op, x, weights=weights, shared=shared, limit=limit, rounded=rounded), experts, routed)

    def moe_parts(
        self, x: Tensor, experts: Tensor, weights: Tensor, routed: Any, shared: Any, *, limit: float,
        peer_buffers: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """As `OpSet.moe_parts`, likewise."""
        op = self.inner.ops.moe_parts
        run = partial(op, x, weights=weights, shared=shared, limit=limit, peer_buffers=peer_buffers)
        return self._over(run, experts, routed)

    def moe_shared(
        self, x: Tensor, routed: Any, shared: Any, out: Tensor, *, top_k: int, limit: float
    ) -> None:  # fmt: skip
        """As `OpSet.moe_shared`: no routed expert is run."""
        stacks = routed.stack if isinstance(routed, LayerExperts) else routed
        self.inner.ops.moe_shared(x, stacks, shared, out, top_k=top_k, limit=limit)

    def _over(self, run: Callable[..., Any], experts: Tensor, routed: Any) -> Any:
        """`run` with choices of experts, or of slots, and the stacks that hold them."""
        if not isinstance(routed, LayerExperts):
            return run(experts=experts, routed=routed)
        if self.recorder is not None:
            boundary = routed.boundary(*experts.shape)
            boundary.experts.copy_(experts, non_blocking=True)
            self.recorder.cut(boundary.cross)
            return run(experts=boundary.slots, routed=routed.stack)
        chosen = experts.cpu()
        slots = None if self.stages_always else routed.slots_for(chosen, self.num_valid)
        if slots is None:
            return self._staged(run, chosen[: self.num_valid], experts, routed)
        self.wait_for_copies()
        return run(experts=slots.to(self.device), routed=routed.stack)

    def _staged(self, run: Callable[..., Any], chosen: Tensor, experts: Tensor, routed: LayerExperts) -> Any:
        needed = _distinct(chosen)
        self.stats.num_uses += len(needed)
        self.stats.num_misses += routed.num_absent(needed)
        self.stats.num_staged_layers += 1
        staging = self._staging_for(routed)
        place = staging.holds(routed)
        if place is None:
            place = self._stage(staging, routed, needed)
        staging.staged[place] = None
        self.wait_for_copies()
        following = routed.following
        if following is not None and self._num_staging > 1 and 2 * len(needed) > self.num_experts:
            # most experts are wanted, so the next layer will want most of its own: do not wait for its routing
            coming = self._staging_for(following)
            ahead = self._stage(coming, following, range(self.num_experts), in_use=place if coming is staging else None)
            coming.staged[ahead] = following
        out = run(experts=experts, routed=staging.stacks[place])
        if self._is_cuda:
            staging.free_events[place] = torch.cuda.current_stream().record_event()
        return out

    def _staging_for(self, layer: LayerExperts) -> _Staging:
        if layer.kind not in self.staging:
            self.staging[layer.kind] = _Staging(layer, self._num_staging)
        return self.staging[layer.kind]

    def _stage(
        self, staging: _Staging, layer: LayerExperts, needed: Iterable[int], in_use: int | None = None
    ) -> int:  # fmt: skip
        """Start filling the next staging stack; which one."""
        place = staging.take(in_use)
        with self.copying(after=staging.free_events[place]):
            layer.fill_staging(staging.stacks[place], needed)
        return place

    def forget_copies(self, layer: LayerExperts) -> None:
        """After new weights were put: the next call fetches them. Nothing may run."""
        layer.forget_copies()
        for staging in self.staging.values():
            staging.staged[:] = [None if one is layer else one for one in staging.staged]

    # ---- memory and streams ----

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Pinned where there is a GPU, so that copies run beside kernels."""
        nbytes = math.prod(shape) * dtype.itemsize
        if not self._is_cuda or nbytes < PIN_BYTES:
            return torch.empty(shape, dtype=dtype, pin_memory=self._is_cuda)
        # torch's own pinned memory comes in powers of two: of tens of gigabytes that may waste half
        tensor = torch.empty(shape, dtype=dtype)
        runtime, address = torch.cuda.cudart(), tensor.data_ptr()
        if int(runtime.cudaHostRegister(address, nbytes, 0)) != 0:
            return tensor.pin_memory()
        weakref.finalize(tensor, runtime.cudaHostUnregister, address).atexit = False
        return tensor

    def copying(self, after: Any = None) -> Any:
        """Copies started inside run on the pool's own stream, after the event if one is given."""
        if self._stream is None:
            return nullcontext()
        if after is not None:
            self._stream.wait_event(after)
        return torch.cuda.stream(self._stream)

    def wait_for_copies(self) -> None:
        """Kernels launched from here on see every copy started so far."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def wait_for_routing(self) -> None:
        if self._is_cuda:
            torch.cuda.current_stream().synchronize()

    def device_bytes(self) -> int:
        """Slots and staging."""
        trees = [layer.stack for layer in self.layers]
        trees += [stack for staging in self.staging.values() for stack in staging.stacks]
        return sum(part.numel() * part.element_size() for tree in trees for part in tensors_of(tree))

    def host_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for layer in self.layers for _, part in layer._parts)

    def check_integrity(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()
        for layer in self.layers:
            layer.check_integrity()


def with_experts(block: BlockParams, experts: LayerExperts) -> BlockParams:
    """The same block over other routed experts. The model reads `matrices` of them and nothing else."""
    return replace(block, ffn=replace(block.ffn, experts=cast(ExpertParams, experts)))


def _distinct(experts: Tensor) -> list[int]:
    """Ids that occur, ascending; padding left out."""
    return [expert for expert in experts.unique().tolist() if expert >= 0]


def _bytes(part: Tensor) -> Tensor:
    return part.contiguous().reshape(-1).view(torch.uint8)
