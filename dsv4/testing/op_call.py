"""`OpCall`: a call of an op as data, so that its kernel, its oracle, and the kernel for some of the rows can be given
the same arguments.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from types import ModuleType
from typing import Any

from torch import Tensor

import dsv4.ops
from dsv4.cache.batch import TokenBatch
from dsv4.formats.trees import map_tensors
from dsv4.ops import Backend, OpSet
from dsv4.ops.compress import Compression


def op_modules() -> list[ModuleType]:
    """Every module below `dsv4.ops`, in folders too."""
    names = [info.name for info in pkgutil.walk_packages(dsv4.ops.__path__, "dsv4.ops.")]
    return [importlib.import_module(name) for name in names]


def family_of(module: str) -> str:
    """`dsv4.ops.moe.launch` -> `moe`."""
    return module.split(".")[2]


def oracles_and_kernels() -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """`<op>_ref` and `<op>` where one family defines both, by "family.op_ref"."""
    defined = {
        f"{family_of(module.__name__)}.{name}": value
        for module in op_modules()
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__
    }
    return {
        name: (oracle, defined[name.removesuffix("_ref")])
        for name, oracle in defined.items()
        if name.endswith("_ref") and name.removesuffix("_ref") in defined
    }


# arguments with one row for each token
ROWS: dict[str, tuple[str, ...]] = {
    "rms_norm": ("x",),
    "rms_norm_quant": ("x",),
    "hc_enter": ("source",),
    "hc_boundary": ("out", "streams", "post", "comb"),
    "hc_pre": ("streams",),
    "hc_post": ("out", "streams", "post", "comb"),
    "hc_head": ("streams",),
    "hc_head_norm": ("streams",),
    "linear": ("x",),
    "linears": ("x", "codes"),
    "grouped_linear": ("x",),
    "grouped_codes": ("x",),
    "route": ("x", "token_ids"),
    "activation_topk": ("logits",),
    "moe": ("x", "experts", "weights", "rounded"),
    "moe_parts": ("x", "experts", "weights"),
    "moe_shared": ("x", "out"),
    "moe_fold": ("parts", "shared_out"),
    "attention_inputs": ("q", "kv", "index_q", "batch"),
    "rope": ("x", "positions"),
    "window_rows": ("kv", "positions"),
    "append_swa": ("rows", "batch"),
    "compress": ("kv", "gate", "batch"),
    "compress_pair": ("attention", "index", "batch"),
    "index_topk": ("q", "weights", "batch"),
    "topk_select": ("scores", "lengths"),
    "sparse_attention": ("q", "rows", "picks", "batch"),
    "sample": ("logits", "rows"),
    "sampled_logprobs": ("logits", "token_ids"),
    "resolve_tokens": ("token_ids", "slots"),
    "tap_streams": ("streams", "out"),
    "confidence": ("hidden", "embedded"),
    "accept": ("drafts", "num_drafts", "drawn", "positions"),
}
# arguments written in place
WRITTEN: dict[str, tuple[str, ...]] = {
    "moe_shared": ("out",),
    "attention_inputs": ("window",),
    "append_swa": ("window",),
    "compress": ("state", "pages"),
    "compress_pair": ("attention", "index"),
    "sample": ("state",),
    "tap_streams": ("out",),
}


@dataclass(frozen=True)
class OpCall:
    """An op's name and its arguments. Calling it calls the kernel."""

    op: str
    arguments: dict[str, Any]

    def __call__(self) -> Any:
        return implementations()[self.op][1](**self.arguments)

    def kernel(self, backend: Backend) -> Callable[..., Any]:
        """The backend's; of an op that only other ops use, its own."""
        is_field = self.op in {field.name for field in fields(OpSet)}
        return getattr(backend.ops, self.op) if is_field else implementations()[self.op][1]

    @property
    def oracle(self) -> Callable[..., Any]:
        return implementations()[self.op][0]

    @property
    def written(self) -> tuple[str, ...]:
        return WRITTEN.get(self.op, ())

    @property
    def num_rows(self) -> int:
        first = self.arguments[ROWS[self.op][0]]
        return first.kv.shape[0] if isinstance(first, Compression) else _leading(first)

    @property
    def has_independent_rows(self) -> bool:
        """Whether no token of the call is another one's past."""
        batch = self.arguments.get("batch")
        return not isinstance(batch, TokenBatch) or bool((batch.chunk_ends - batch.chunk_starts <= 1).all())

    def fresh(self) -> OpCall:
        """The same with copies of what it writes."""
        copies = {name: map_tensors(self.arguments[name], Tensor.clone) for name in self.written}
        return replace(self, arguments=self.arguments | copies)

    def of_rows(self, rows: slice) -> OpCall:
        """The same for some of its rows, over the same caches. Rows are copied, unless they are written."""
        parts = {
            name: _taken(self.arguments[name], rows, name not in self.written)
            for name in ROWS[self.op]
            if self.arguments.get(name) is not None
        }
        return replace(self, arguments=self.arguments | parts)

    def run(self, function: Callable[..., Any]) -> tuple[Any, dict[str, Any]]:
        """What `function` returns for these arguments, and what it was to write."""
        result = function(**self.arguments)
        return result, {name: self.arguments[name] for name in self.written}


def op_call(op: str, /, **arguments: Any) -> OpCall:
    return OpCall(op, arguments)


@cache
def implementations() -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """Oracle and kernel of every op, by its name."""
    return {name.split(".")[1].removesuffix("_ref"): pair for name, pair in oracles_and_kernels().items()}


def rows_of(value: Any, rows: slice) -> Any:
    """Some rows of every tensor of a result."""
    return map_tensors(value, lambda tensor: tensor[rows])


def _leading(value: Any) -> int:
    return int(value.shape[0]) if isinstance(value, Tensor) else int(getattr(value, fields(value)[0].name).shape[0])


def _taken(value: Any, rows: slice, is_copied: bool) -> Any:
    if isinstance(value, Compression):
        return replace(value, kv=value.kv[rows].clone(), gate=value.gate[rows].clone())
    if isinstance(value, TokenBatch):
        columns = rows_of(replace(value, block_table=value.slots), rows)
        return replace(map_tensors(columns, Tensor.clone), block_table=value.block_table)
    taken = rows_of(value, rows)
    return map_tensors(taken, Tensor.clone) if is_copied else taken
