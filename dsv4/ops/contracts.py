"""What the model and the engine call: one Protocol for each op, and `OpSet`, one implementation of all of them.

A Protocol has the signature of the op's oracle and of its kernel; a test compares the three. What an op computes is
said in the docstring of its oracle (`<op>_ref`). Ops that only other ops use are not here: import them from their
family.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import CompressorView, PagedView, WindowView
from dsv4.formats.layouts import ShuffledTensor
from dsv4.formats.row_store import RowStore
from dsv4.formats.rows import RowFormat
from dsv4.formats.tensors import AnyWeight, QuantActivation
from dsv4.ops.compress import Compression, CompressorSpec
from dsv4.ops.drafting import Acceptance
from dsv4.ops.hyper import HyperInput, HyperSettings
from dsv4.ops.linear import LinearBundle
from dsv4.ops.moe import Matrices
from dsv4.ops.sampling import SamplingRows, SamplingState


class RmsNorm(Protocol):
    def __call__(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor: ...


class RmsNormQuant(Protocol):
    def __call__(
        self, x: Tensor, weight: Tensor | None, eps: float, keep_plain: bool
    ) -> tuple[Tensor | None, QuantActivation]: ...


class HcEnter(Protocol):
    def __call__(
        self, source: Tensor, fn: AnyWeight, base: Tensor, scale: Tensor, norm_weight: Tensor, settings: HyperSettings,
        has_codes: bool,
    ) -> HyperInput: ...  # fmt: skip


class HcBoundary(Protocol):
    def __call__(
        self, out: Tensor, streams: Tensor, post: Tensor, comb: Tensor, fn: AnyWeight, base: Tensor, scale: Tensor,
        norm_weight: Tensor, settings: HyperSettings, has_codes: bool, has_rounded: bool = False,
    ) -> HyperInput: ...  # fmt: skip


class HcPost(Protocol):
    def __call__(self, out: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor: ...


class HcHead(Protocol):
    def __call__(
        self, streams: Tensor, fn: AnyWeight, base: Tensor, scale: Tensor, *, hc_eps: float, norm_eps: float
    ) -> Tensor: ...


class HcHeadNorm(Protocol):
    def __call__(
        self, streams: Tensor, fn: AnyWeight, base: Tensor, scale: Tensor, norm_weight: Tensor, *, hc_eps: float,
        norm_eps: float,
    ) -> Tensor: ...  # fmt: skip


class Linear(Protocol):
    def __call__(
        self, x: Tensor | QuantActivation, weight: AnyWeight, out_dtype: torch.dtype | None = None
    ) -> Tensor: ...


class Linears(Protocol):
    def __call__(
        self, x: Tensor | QuantActivation, weights: Sequence[AnyWeight] | LinearBundle,
        out_dtypes: Sequence[torch.dtype | None], codes: QuantActivation | None = None,
    ) -> tuple[Tensor, ...]: ...  # fmt: skip


class GroupedLinear(Protocol):
    def __call__(self, x: Tensor, weight: AnyWeight | ShuffledTensor) -> Tensor: ...


class GroupedCodes(Protocol):
    def __call__(self, x: Tensor, weight: AnyWeight | ShuffledTensor) -> QuantActivation: ...


class Route(Protocol):
    def __call__(
        self, x: Tensor, gate: AnyWeight, bias: Tensor | None, tid2eid: Tensor | None, token_ids: Tensor, *, top_k: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip


class Moe(Protocol):
    def __call__(
        self, x: Tensor, experts: Tensor, weights: Tensor, routed: Matrices, shared: Matrices, *, limit: float,
        rounded: Tensor | None = None,
    ) -> Tensor: ...  # fmt: skip


class MoeParts(Protocol):
    def __call__(
        self, x: Tensor, experts: Tensor, weights: Tensor, routed: Matrices, shared: Matrices, *, limit: float,
        peer_buffers: Tensor | None = None,
    ) -> Tensor | None: ...  # fmt: skip


class MoeShared(Protocol):
    def __call__(
        self, x: Tensor, routed: Matrices, shared: Matrices, out: Tensor, *, top_k: int, limit: float
    ) -> None: ...


class MoeFold(Protocol):
    def __call__(self, parts: Tensor, shared_out: Tensor) -> Tensor: ...


class AttentionInputs(Protocol):
    def __call__(
        self, q: Tensor, kv: Tensor, index_q: Tensor | None, kv_norm: Tensor, freqs: Tensor, eps: float,
        window: WindowView, keys: PagedView | None, batch: TokenBatch, *, appends: bool,
    ) -> tuple[Tensor, RowStore, Tensor | None]: ...  # fmt: skip


class Rope(Protocol):
    def __call__(self, x: Tensor, positions: Tensor, freqs: Tensor, inverse: bool = False) -> Tensor: ...


class WindowRows(Protocol):
    def __call__(
        self, kv: Tensor, norm_weight: Tensor, positions: Tensor, freqs: Tensor, eps: float, row_format: RowFormat
    ) -> RowStore: ...


class AppendSwa(Protocol):
    def __call__(self, rows: RowStore, window: WindowView, batch: TokenBatch) -> None: ...


class Compress(Protocol):
    def __call__(
        self, kv: Tensor, gate: Tensor, spec: CompressorSpec, state: CompressorView, pages: PagedView,
        batch: TokenBatch,
    ) -> None: ...  # fmt: skip


class CompressPair(Protocol):
    def __call__(self, attention: Compression, index: Compression, batch: TokenBatch) -> None: ...


class IndexTopk(Protocol):
    def __call__(
        self, q: Tensor, weights: Tensor, keys: PagedView, batch: TokenBatch, *, ratio: int, top_k: int,
        scale: float = 1.0,
    ) -> Tensor: ...  # fmt: skip


class SparseAttention(Protocol):
    def __call__(
        self, q: Tensor, rows: RowStore, window: WindowView, entries: PagedView | None, picks: Tensor | None,
        sink: Tensor, batch: TokenBatch, *, window_len: int, freqs: Tensor | None = None,
    ) -> Tensor: ...  # fmt: skip


class Sample(Protocol):
    def __call__(self, logits: Tensor, rows: SamplingRows, state: SamplingState) -> Tensor: ...


class SampledLogprobs(Protocol):
    def __call__(self, logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]: ...


class ResolveTokens(Protocol):
    def __call__(self, token_ids: Tensor, slots: Tensor, last_tokens: Tensor) -> Tensor: ...


class TapStreams(Protocol):
    def __call__(self, streams: Tensor, out: Tensor) -> None: ...


class Confidence(Protocol):
    def __call__(self, hidden: Tensor, embedded: Tensor, weight: Tensor) -> Tensor: ...


class Accept(Protocol):
    def __call__(self, drafts: Tensor, num_drafts: Tensor, drawn: Tensor, positions: Tensor) -> Acceptance: ...


@dataclass(frozen=True)
class OpSet:
    """One implementation of every op that the model and the engine call."""

    rms_norm: RmsNorm
    rms_norm_quant: RmsNormQuant
    hc_enter: HcEnter
    hc_boundary: HcBoundary
    hc_post: HcPost
    hc_head: HcHead
    hc_head_norm: HcHeadNorm
    linear: Linear
    linears: Linears
    grouped_linear: GroupedLinear
    grouped_codes: GroupedCodes
    route: Route
    moe: Moe
    moe_parts: MoeParts
    moe_shared: MoeShared
    moe_fold: MoeFold
    attention_inputs: AttentionInputs
    rope: Rope
    window_rows: WindowRows
    append_swa: AppendSwa
    compress: Compress
    compress_pair: CompressPair
    index_topk: IndexTopk
    sparse_attention: SparseAttention
    sample: Sample
    sampled_logprobs: SampledLogprobs
    resolve_tokens: ResolveTokens
    tap_streams: TapStreams
    confidence: Confidence
    accept: Accept
