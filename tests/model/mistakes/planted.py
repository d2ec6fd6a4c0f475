"""How a mistake is planted in the model, and how far the planted model is from the expected values of set A.

The checks are single blocks wherever a mistake shows there (a twentieth of a second each): layer 1 is SWA with a hash
router, 3 is HCA, 4 is CSA, the last two with score routers. 136 tokens close 34 CSA entries, of which a token reads 16,
and one HCA entry.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path

import pytest
import torch

from dsv4 import LLM
from dsv4.cache.handle import LayerCacheHandle
from dsv4.testing.vectors import VectorSet, entries_missed, relative_l2

NUM_TOKENS = 136  # of the single-block vectors
SWA, HCA, CSA = 1, 3, 4  # the layers of set A with expected values of their own
OUTPUTS = ("attn_out", "ffn_out", "streams")


@dataclass(frozen=True)
class Bed:
    """The model a mistake is planted in; everything is undone when the test ends."""

    llm: LLM
    patch: pytest.MonkeyPatch

    def op(self, name: str, wrong: Callable) -> None:
        """Replace one op of the op set: `wrong(right, *args, **kwargs)`."""
        right = getattr(self.llm.model.context.ops, name)

        def planted(*args, **kwargs):
            return wrong(right, *args, **kwargs)

        self.context(backend=self.llm.model.context.backend.with_ops(**{name: planted}))

    def function(self, right: Callable, wrong: Callable) -> None:
        """Replace a function by `wrong(right, ...)` wherever dsv4 holds it: in modules and in the op set."""

        def planted(*args, **kwargs):
            return wrong(right, *args, **kwargs)

        modules = [module for name, module in list(sys.modules.items()) if name.split(".")[0] == "dsv4"]
        places = [(module, name) for module in modules for name, held in vars(module).items() if held is right]
        assert places, right
        for module, name in places:
            self.patch.setattr(module, name, planted)
        backend = self.llm.model.context.backend
        held = [spec.name for spec in fields(backend.ops) if getattr(backend.ops, spec.name) is right]
        self.context(backend=backend.with_ops(**dict.fromkeys(held, planted)))

    def context(self, **changes: object) -> None:
        """Change what all blocks share: the config, the op set, the rope frequencies."""
        self.patch.setattr(self.llm.model, "context", replace(self.llm.model.context, **changes))

    def config(self, **changes: object) -> None:
        self.context(config=replace(self.llm.model.context.config, **changes))


def poison(handle: LayerCacheHandle) -> None:
    """NaN in every cached row: an earlier run with the same tokens would leave the right values behind."""
    for view in (handle.window, handle.entries, handle.index_keys):
        if view is not None:
            if view.rows.scales is None:
                view.rows.data.fill_(float("nan"))
            else:
                view.rows.data.fill_(0xFF)
                view.rows.scales.fill_(0xFF)


def run_layer(
    llm: LLM, layer_idx: int, streams: torch.Tensor, token_ids: list[int], chunks: Sequence[int],
    views: Callable[[LayerCacheHandle], LayerCacheHandle] = lambda handle: handle,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """One block on streams [T, n, D], fed in pieces through its cache; `views` may change what the block is given."""
    pieces = []
    poison(llm.cache.handle(layer_idx))
    handle = views(llm.cache.handle(layer_idx))
    slot = llm.cache.admit(len(token_ids))
    try:
        start = 0
        for length in chunks:
            here = slice(start, start + length)
            batch = llm.cache.make_batch([slot], [token_ids[here]])
            given = streams[here].to(llm.model.context.dtype)
            pieces.append(llm.model.block(layer_idx, given, handle, batch))
            start += length
    finally:
        llm.cache.release(slot)
    names = [*OUTPUTS, "experts"] + (["entries"] if pieces[0].entries is not None else [])
    return {name: torch.cat([getattr(piece, name) for piece in pieces]) for name in names}


@cache
def _layers_table(root: Path) -> dict[str, torch.Tensor]:
    return VectorSet.open(root).expected("layers")


def layer_deviations(
    llm: LLM, set_a: VectorSet, layer_idx: int, chunks: Sequence[int] | None = None,
    views: Callable[[LayerCacheHandle], LayerCacheHandle] = lambda handle: handle,
) -> dict[str, float]:  # fmt: skip
    """Relative L2 distance of a block's outputs from the expected ones, and the share of entries missed.

    NaN counts as infinite. The streams are judged relative to what the block added to them. `chunks` are how the tokens
    are fed, all at once unless given.
    """
    table = _layers_table(set_a.root)
    kind = "pure" if llm.numerics == "exact" else "quant"
    token_ids, rows = table["tokens"].tolist(), table["positions"]
    output = run_layer(llm, layer_idx, table["input"], token_ids, chunks or [len(token_ids)], views)
    deviations = {}
    for name in OUTPUTS:
        want = table[f"{kind}.{layer_idx}.{name}"]
        reference = want.double() - table["input"].double()[rows] if name == "streams" else None
        distance = relative_l2(output[name][rows], want, reference)
        deviations[name] = distance if distance < float("inf") else float("inf")
    if "entries" in output:
        deviations["entries"] = entries_missed(output["entries"], table[f"{kind}.{layer_idx}.entries"])
    return deviations
